"""The `forward` of a layer while a kernel replaces it."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any


class KernelForward:
    """The forward of one layer, computed by a kernel; survives deep copies and pickling together with its layer.

    A kernel that is a `torch.nn.Module` class gets as `self` an object of that class that shares the layer's
    attributes: parameters, buffers and submodules are the present ones of the layer, even if they were replaced.

    Args:
        layer: whose forward it is.
        kernel: a module class, or a function that takes the layer and the arguments of its forward.
    """

    def __init__(self, layer: Any, kernel: Any) -> None:
        # Weak, so that a model whose last user has gone frees its memory at once.
        self._layer, self.kernel = weakref.ref(layer), kernel

    @property
    def layer(self) -> Any:
        """Whose forward it is.

        Raises:
            ReferenceError: the layer is gone.
        """
        layer = self._layer()
        if layer is None:
            raise ReferenceError(f"the layer whose forward {kernel_name(self.kernel)} computes is gone")
        return layer

    def __getstate__(self) -> tuple[Any, Any]:
        return self.layer, self.kernel

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self._layer, self.kernel = weakref.ref(state[0]), state[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer's own forward computes."""
        kernel = self.kernel
        if not is_layer_class(kernel):
            return kernel(self.layer, *args, **kwargs)
        twin = object.__new__(kernel)
        object.__setattr__(twin, "__dict__", self.layer.__dict__)
        return kernel.forward(twin, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the layer's own forward, which callers look at."""
        layer = self.layer
        own: Callable[..., Any] = type(layer).forward
        return inspect.signature(own.__get__(layer))

    def __repr__(self) -> str:
        return f"<forward of {type(self.layer).__name__} by {kernel_name(self.kernel)}>"


def is_layer_class(kernel: Any) -> bool:
    """Return whether a kernel is a layer class, whose `forward` is used."""
    from torch import nn

    return isinstance(kernel, type) and issubclass(kernel, nn.Module)


def kernel_name(kernel: Any) -> str:
    """Return how messages name a kernel."""
    return str(getattr(kernel, "__qualname__", type(kernel).__qualname__))
