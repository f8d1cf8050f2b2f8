"""The contract of a kernel."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Kernel(Protocol):
    """A faster form of a layer's forward or of a function, with the same numbers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the replaced layer or function computes."""
