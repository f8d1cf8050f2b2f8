"""Processors: the contract `ProcessorLike`, and every installed processor by name."""

from typing import Any, Protocol, runtime_checkable

from twinkle._registry import lazy_names
from twinkle.data_format import InputFeature

__all__ = ["ProcessorLike"]


@runtime_checkable
class ProcessorLike(Protocol):
    """Collates encoded rows into one batch of tensors; a function with this signature is a processor too."""

    def __call__(self, inputs: Any, **kwargs: Any) -> InputFeature:
        """Return the batch of `inputs`: one row, a list of rows, or a batch that is already collated."""


__getattr__, __dir__ = lazy_names(__name__, "processor")
