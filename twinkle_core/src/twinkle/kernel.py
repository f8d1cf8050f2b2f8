"""Kernels: the contract `Kernel`, and every installed kernel by name."""

from typing import Any, Protocol, runtime_checkable

from twinkle._registry import lazy_names

__all__ = ["Kernel"]


@runtime_checkable
class Kernel(Protocol):
    """A faster form of a layer's forward or of a function, with the same numbers.

    A subclass of `torch.nn.Module` replaces the forward of a layer: its `forward` runs with the parameters, buffers,
    submodules and attributes of the layer that it replaces, and its `__init__` never runs. Any other class is built
    without arguments and called: in place of a function with the function's arguments, in place of a layer's forward
    with the layer first.

    A kernel may say on which devices it runs, in a class attribute: `devices = ("cuda",)`. Without one it runs on all.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the replaced layer or function computes."""


__getattr__, __dir__ = lazy_names(__name__, "kernel")
