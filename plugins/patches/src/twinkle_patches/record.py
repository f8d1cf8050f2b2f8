"""The record of the process: which patch has changed which symbol of which object, and how each was before.

One lock guards it. A patch that is being applied or undone holds that lock, so that threads see all of a patch or none.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import PatchError
from twinkle_patches import slots
from twinkle_patches.versions import check_versions


@dataclass(eq=False)
class Claim:
    """What one patch has done to a symbol; its applications to several objects may share it.

    Attributes:
        patch: whose.
        edit: makes the new value of the old one; None where the patch has replaced the symbol altogether.
        holders: the applications that use it.
    """

    patch: Any
    edit: Callable[[Any], Any] | None
    holders: "list[Application]"


@dataclass(eq=False)
class Change:
    """One symbol that is not as it was: replaced by one patch, or edited by some, one on top of the other."""

    owner: Callable[[], Any]
    name: str
    key: tuple[int, str]
    symbol: str
    old: Any
    now: Callable[[], Any]
    claims: list[Claim]

    def set(self, value: Any) -> None:
        """Replace the symbol's value, and record the change."""
        owner = self.owner()
        slots.put(owner, self.name, value)
        self.now = slots.held(slots.stored(owner, self.name))

    def release(self, application: "Application") -> bool:
        """Remove the application from the holders; False if the symbol was set by other code, whose value is kept."""
        claim = next(claim for claim in self.claims if application in claim.holders)
        claim.holders.remove(application)
        if claim.holders:
            return True
        self.claims.remove(claim)
        owner = self.owner()
        if owner is None:
            return True
        if not _same(slots.stored(owner, self.name), self.now()):
            return False
        value = self.old
        for other in self.claims:
            value = other.edit(value) if other.edit else value
        self.set(value)
        return True


@dataclass(eq=False)
class Application:
    """One patch on one object.

    Attributes:
        patch: the instance (or plain function) that was called.
        target: returns the object, None once it is gone.
        arguments: arguments of the call except the object, and of the patch's constructor.
        result: returns what the patch returned.
        changes: what it replaced, in order.
        parts: applications that it made itself, which end with it.
        kept: whether it was applied permanently.
        users: number of `with` blocks and enclosing patches that use it now.
        undoing: whether it is being undone.
    """

    patch: Any
    target: Callable[[], Any]
    shown: str
    arguments: tuple[tuple[Any, ...], Mapping[str, Any], Mapping[str, Any]]
    result: Callable[[], Any] = lambda: None
    changes: list[Change] = field(default_factory=list)
    parts: "list[Application]" = field(default_factory=list)
    kept: bool = False
    users: int = 0
    undoing: bool = False


_lock = threading.RLock()
_applications: list[Application] = []
_changes: dict[tuple[int, str], Change] = {}
_running: list[Application] = []
"""Being applied now, the innermost last; only touched under the lock."""
_version = 0
"""Grows with each patch that is applied or undone."""


def apply(
    patch: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keep: bool
) -> tuple[Application, Any]:
    """Apply a patch unless it is already applied, record it, and return the record with the patch's result.

    Args:
        patch: an instance of `Patch`, or a function.
        target: what it is to change.
        args: further arguments of the patch.
        kwargs: its keyword arguments.
        keep: apply permanently; otherwise the caller must `leave` it.

    Raises:
        PatchError: it is applied with other arguments, does not know an installed version, or replaces a symbol that
            another patch has.
    """
    with _lock:
        _forget_the_gone()
        found = _find(patch, target)
        if found is None:
            check_versions(patch)
            found, result = _apply(patch, target, args, kwargs)
        elif not _same(found.arguments, _arguments(patch, args, kwargs)):
            raise PatchError(
                f"{name_of(patch)} is applied to this {found.shown} already, with other arguments; undo that first: "
                f"twinkle.patch.undo_patch(module, {short_name(patch)!r})"
            )
        else:
            result = found.result()
        if _running:
            _running[-1].parts.append(found)
        part = bool(_running)
        found.kept |= keep and not part
        found.users += part or not keep
        return found, result


def leave(application: Application) -> None:
    """End one use of an application; the last one undoes the patch unless it was applied permanently."""
    with _lock:
        application.users -= 1
        if application.users == 0 and not application.kept and application in _applications:
            _undo(application)


def undo(patch: Any, target: Any) -> None:
    """Undo a permanently applied patch; if a `with` block uses it, it is undone at the end of the block.

    Raises:
        PatchError: it is not applied to this object, only for a `with` block, or cannot be undone.
    """
    with _lock:
        _forget_the_gone()
        found = _find(patch, target)
        if found is None:
            here = [name_of(a.patch) for a in _applications if a.target() is target]
            what = f"applied to it: {', '.join(here)}" if here else "no patch is"
            raise PatchError(f"{name_of(patch)} is not applied to this {type(target).__name__}; {what}")
        if found.undoing:
            return
        if not found.kept:
            raise PatchError(f"{name_of(patch)} is applied for a `with` block, whose end undoes it")
        found.kept = False
        if not found.users:
            _undo(found)


def claim(patch: Any, owner: Any, name: str, *, new: Any = None, edit: Callable[[Any], Any] | None = None) -> None:
    """Replace one symbol by `new`, or edit it, on behalf of the patch that is being applied.

    Raises:
        PatchError: no application of `patch` is going on, or another patch has the symbol.
    """
    with _lock:
        if not _running or _running[-1].patch is not patch:
            raise PatchError(f"{name_of(patch)}: symbols are replaced while it is applied; do so in __call__")
        application = _running[-1]
        key = id(owner), name
        change = _changes.get(key)
        if change is None or change.owner() is not owner:
            change = _new_change(owner, name, application)
        claimed = next((c for c in change.claims if _key(c.patch) is _key(patch)), None)
        if claimed is None:
            if change.claims and (edit is None or change.claims[0].edit is None):
                raise _conflict(application, change)
            change.set(edit(getattr(owner, name)) if edit else new)
            claimed = Claim(patch, edit, [])
            change.claims.append(claimed)
            _changes[key] = change
        if application not in claimed.holders:
            claimed.holders.append(application)
            application.changes.append(change)


def is_running(patch: Any, target: Any) -> bool:
    """Return whether this thread is currently applying this patch to this object."""
    with _lock:
        return any(a.patch is patch and a.target() is target for a in _running)


def is_undoing(patch: Any, target: Any) -> bool:
    """Return whether this patch is currently being undone on this object."""
    with _lock:
        return any(a.undoing and a.target() is target and _key(a.patch) is _key(patch) for a in _applications)


def is_applied(patch: Any, target: Any) -> bool:
    """Return whether a patch (an instance, a class or a function) is applied to an object."""
    with _lock:
        _forget_the_gone()
        return _find(patch, target) is not None


def is_recorded(owner: Any, name: str) -> bool:
    """Return whether a recorded patch replaces this symbol."""
    with _lock:
        change = _changes.get((id(owner), name))
        return change is not None and change.owner() is owner


def applications() -> list[Application]:
    """Return what is applied now, in the order in which it was."""
    with _lock:
        _forget_the_gone()
        return list(_applications)


def version() -> int:
    """Return a number that changes whenever a patch is applied or undone in this process."""
    return _version


def name_of(patch: Any) -> str:
    """Return where a patch is from, `package.module:Name`: for one from a hub, the module has its digest."""
    found = patch if hasattr(patch, "__qualname__") else type(patch)
    return f"{found.__module__}:{found.__qualname__}"


def short_name(patch: Any) -> str:
    """Return the bare name of a patch."""
    return str(getattr(patch, "__name__", type(patch).__name__))


def _apply(patch: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Application, Any]:
    application = Application(patch, slots.held(target), type(target).__name__, _arguments(patch, args, kwargs))
    _running.append(application)
    try:
        result = patch(target, *args, **kwargs)
    except BaseException:
        _restore(application)
        raise
    finally:
        _running.pop()
    application.result = slots.held(result)
    _applications.append(application)
    _count()
    return application, result


def _count() -> None:
    global _version
    _version += 1


def _new_change(owner: Any, name: str, application: Application) -> Change:
    symbol = slots.symbol_of(owner, name, application.target())
    return Change(
        slots.held(owner), name, (id(owner), name), symbol, slots.stored(owner, name), lambda: slots.MISSING, []
    )


def _conflict(application: Application, change: Change) -> PatchError:
    first = change.claims[0].patch
    return PatchError(
        f"{name_of(application.patch)} cannot replace {change.symbol}, which {name_of(first)} has replaced; use one "
        f"of the two, or undo the other first: twinkle.patch.undo_patch(module, {short_name(first)!r})"
    )


def _undo(application: Application) -> None:
    if not can_undo(application):
        application.kept = True
        raise PatchError(
            f"{name_of(application.patch)} cannot be undone: it changed nothing through replace(), wrap() or "
            "edit() and defines no unpatch()"
        )
    application.undoing = True
    args, kwargs, _ = application.arguments
    try:
        if _own_unpatch(application.patch):
            application.patch.unpatch(application.target(), *args, **kwargs)
    finally:
        _applications.remove(application)
        lost = _restore(application)
        _count()
    if lost:
        raise PatchError(
            f"{name_of(application.patch)} is undone but for {', '.join(lost)}: somebody has set that since, and the "
            "value stays; undo in the reverse order"
        )


def can_undo(application: Application) -> bool:
    """Return whether it can be undone."""
    return bool(application.changes or application.parts) or _own_unpatch(application.patch)


def _own_unpatch(patch: Any) -> bool:
    return bool(getattr(patch, "own_unpatch", False))


def _restore(application: Application) -> list[str]:
    """Restore the symbols of an application, the newest first; return those that other code has set."""
    lost = []
    for part in reversed(application.parts):
        leave(part)
    application.parts.clear()
    for change in reversed(application.changes):
        if not change.release(application):
            lost.append(change.symbol)
        if not change.claims and _changes.get(change.key) is change:
            del _changes[change.key]
    application.changes.clear()
    return lost


def _forget_the_gone() -> None:
    """Drop what belongs to objects that no longer exist; symbols of classes and modules are theirs again."""
    for application in [a for a in _applications if a.target() is None and a.shown != "NoneType"]:
        _applications.remove(application)
        _restore(application)
    for key in [key for key, change in _changes.items() if change.owner() is None]:
        del _changes[key]


def _find(patch: Any, target: Any) -> Application | None:
    key = _key(patch)
    return next((a for a in _applications if a.target() is target and _key(a.patch) is key), None)


def _key(patch: Any) -> Any:
    """Return what identifies a patch: the class of a `Patch` (only those have `own_unpatch`), or the function."""
    is_instance = hasattr(patch, "own_unpatch") and not isinstance(patch, type)
    return type(patch) if is_instance else patch


def _arguments(
    patch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any], Mapping[str, Any]]:
    return args, dict(kwargs), dict(getattr(patch, "__dict__", {}))  # as it was made: a call may leave notes in it


def _same(first: Any, second: Any) -> bool:
    try:
        return first is second or bool(first == second)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays have no single truth
        return False
