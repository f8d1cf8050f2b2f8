"""Applies and undoes patches, and lists what is patched in this process."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twinkle.errors import ArgumentError, PatchError
from twinkle_patches import record
from twinkle_patches.patch import Patch


@dataclass(frozen=True)
class Applied:
    """One patch that is applied now.

    Attributes:
        patch: where it is from, `package.module:Name`; for one from a hub, the module has the digest of its files.
        target: the class of the object that it was applied to.
        symbols: what it has replaced, as far as it did so by `Patch.replace` and `Patch.wrap`.
        undoable: whether `undo_patch` can take it back.
    """

    patch: str
    target: str
    symbols: tuple[str, ...]
    undoable: bool


def apply_patch(module: Any, patch_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a patch, given in any form of component argument, to `module`.

    Applying it again with the same arguments changes nothing. Where it fails, what it had changed is undone.

    Args:
        module: the object that the patch changes.
        patch_cls: the patch.
        *args: positional arguments of the patch's call.
        **kwargs: keyword arguments of the patch's call.

    Returns:
        what the patch returns, usually the module.

    Raises:
        PatchError: it does not know an installed version, another patch has one of its symbols, or it is applied to
            this object with other arguments.
        ArgumentError: an argument that the patch does not take.
    """
    _check_order("apply_patch", module, patch_cls)
    patch = _instance(patch_cls)
    _check(patch, module, args, kwargs)
    return record.apply(patch, module, args, kwargs, keep=True)[1]


@contextlib.contextmanager
def apply_context(module: Any, patch_cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Apply a patch for the duration of a `with` block; it is undone also when the block raises.

    Blocks of the same patch and object may be nested, and overlap in threads: the last to end undoes it. A patch that
    was applied permanently stays applied. Arguments and errors are those of `apply_patch`.

    Raises:
        PatchError: also where there is no way back: a function, or a patch that neither uses `replace` nor defines
            `unpatch`.
    """
    _check_order("apply_context", module, patch_cls)
    patch = _instance(patch_cls)
    _check(patch, module, args, kwargs)
    if not isinstance(patch, Patch):
        raise PatchError(
            f"apply_context: {record.name_of(patch)} is a function, which cannot be undone; make it a subclass of "
            "Patch that uses self.replace, or apply it permanently with apply_patch"
        )
    application, result = record.apply(patch, module, args, kwargs, keep=False)
    try:
        yield result
    finally:
        record.leave(application)


def undo_patch(module: Any, patch_cls: Any) -> None:
    """Undo a patch that `apply_patch` applied: everything is again what it was, the same objects.

    Args:
        module: the object that it was applied to.
        patch_cls: the patch, in any form of component argument.

    Raises:
        PatchError: it is not applied to `module`, cannot be undone, or somebody has set one of its symbols since; then
            that value stays and the rest is undone.
    """
    from twinkle._registry import registry

    _check_order("undo_patch", module, patch_cls)
    found = registry().resolve(patch_cls, "patch")
    record.undo(found, module)


def is_applied(module: Any, patch_cls: Any) -> bool:
    """Return whether a patch, in any form of component argument, is applied to `module` now."""
    from twinkle._registry import registry

    _check_order("is_applied", module, patch_cls)
    return record.is_applied(registry().resolve(patch_cls, "patch"), module)


def applied_patches(module: Any = None) -> list[Applied]:
    """Return what is patched in this process and by whom, in the order in which it was applied.

    Args:
        module: only patches of this object; None is all.
    """
    return [
        Applied(record.name_of(a.patch), a.shown, tuple(c.symbol for c in a.changes), record.can_undo(a))
        for a in record.applications()
        if module is None or a.target() is module
    ]


def _check_order(function: str, module: Any, patch: Any) -> None:
    """Raise `ArgumentError` if the object and the patch were passed in the wrong order."""
    if (isinstance(module, str) or _is_patch(module)) and not (isinstance(patch, str) or _is_patch(patch)):
        name = patch.__name__ if isinstance(patch, type) else type(patch).__name__
        what = repr(module) if isinstance(module, str) else f"the patch {record.short_name(module)}"
        raise ArgumentError(
            f"{function}: the module is {what} and the patch is of type {name}; are the arguments swapped? "
            f"Write {function}(module, patch)"
        )


def _is_patch(value: Any) -> bool:
    return isinstance(value, Patch) or (isinstance(value, type) and issubclass(value, Patch))


def _instance(patch_cls: Any) -> Any:
    from twinkle._registry import registry

    return registry().build(patch_cls, "patch")


def _check(patch: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from twinkle_registry.checks import check_keywords

    check_keywords(patch, kwargs, what=f"patch {record.short_name(patch)!r}", args=(module, *args))
