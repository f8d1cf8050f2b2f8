"""The base class of patches."""

from typing import Any


class Patch:
    """Changes a module in place, and back. Applying twice must be the same as applying once."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Change `module` (a `torch.nn.Module`, or whatever object the patch documents)."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, module, ...)")

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
        """Restore what `__call__` changed, exactly."""
        raise NotImplementedError(f"{type(self).__name__} cannot be undone: it defines no unpatch()")
