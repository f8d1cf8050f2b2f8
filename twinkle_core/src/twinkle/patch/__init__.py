"""Patches: the base class `Patch`, the functions that apply one, and every installed patch by name."""

import contextlib
from collections.abc import Iterator
from typing import Any

from twinkle._lazy import room
from twinkle.patch.base import Patch

__all__ = ["Patch", "apply_context", "apply_patch"]


def apply_patch(module: Any, patch_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a patch, given in any form of component argument, to `module`.

    Returns what the patch returns, usually the module. Positional and keyword arguments go to the patch's call.
    """
    return _instance(patch_cls)(module, *args, **kwargs)


@contextlib.contextmanager
def apply_context(module: Any, patch_cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Apply a patch for the duration of a `with` block; it is undone also when the block raises."""
    patch = _instance(patch_cls)
    result = patch(module, *args, **kwargs)
    try:
        yield result
    finally:
        patch.unpatch(module, *args, **kwargs)


def _instance(patch_cls: Any) -> Any:
    from twinkle._registry import registry

    return registry().build(patch_cls, "patch")


__getattr__, __dir__ = room(__name__, "patch")
