"""Kernels: the contract `Kernel`, and every installed kernel by name."""

from typing import Any, Protocol, runtime_checkable

from twinkle._registry import lazy_names

__all__ = ["Kernel"]


@runtime_checkable
class Kernel(Protocol):
    """A faster form of a layer's forward or of a function, with the same numbers.

    A subclass of `torch.nn.Module` replaces the forward of a layer: its `forward` runs with the parameters, buffers,
    submodules and attributes of the replaced layer, and its `__init__` never runs. Any other class is built without
    arguments and called with the arguments of the replaced function; to replace the forward of a layer, it gets the
    layer as first argument.

    The class attribute `devices`, such as `devices = ("cuda",)`, limits a kernel to some devices; the default is all.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the replaced layer or function computes."""


__getattr__, __dir__ = lazy_names(__name__, "kernel")
