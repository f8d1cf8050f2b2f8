"""One attribute of one object: reads, replaces and restores it without a trace."""

import inspect
import types
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from twinkle.errors import ArgumentError

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()
"""What an attribute is that its owner does not have itself (its class may)."""

_MODULE_STORES = ("_parameters", "_buffers", "_modules")


def held(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` without keeping it alive, where Python allows that."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def stored(owner: Any, name: str) -> Any:
    """Return the attribute `name` of `owner` itself: descriptors are not resolved, inherited values are ignored."""
    store = _store(owner, name)
    if store is not None:
        return store.get(name, MISSING)
    return getattr(owner, name, MISSING)


def put(owner: Any, name: str, value: Any) -> None:
    """Set the attribute, or take it off where `value` is `MISSING`.

    Raises:
        ArgumentError: the owner does not let it be set.
    """
    store = _store(owner, name)
    try:
        if value is MISSING:
            delattr(owner, name)
        elif isinstance(store, dict) and name in store and store is not vars(owner):
            store[name] = value  # keeps the place of a submodule among its siblings
        else:
            setattr(owner, name, value)
    except (AttributeError, TypeError) as error:
        raise ArgumentError(f"{symbol_of(owner, name)} cannot be replaced: {error}") from error


def has(owner: Any, name: str) -> bool:
    """Return whether the attribute exists, own or inherited, without evaluating it."""
    if inspect.getattr_static(owner, name, MISSING) is not MISSING:
        return True
    store = _store(owner, name)
    return store is not None and name in store


def symbol_of(owner: Any, name: str, within: Any = None) -> str:
    """Return how people call the attribute.

    Args:
        owner: a module, a class or an instance.
        name: of the attribute.
        within: the patched object; if it is a `torch.nn.Module`, the result contains the path of `owner` in it.
    """
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}.{name}"
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    path = _path(owner, within)
    where = f"{type(within).__name__}:{path}" if path else type(owner).__name__
    return f"{where}.{name} (this instance)"


def _path(owner: Any, within: Any) -> str:
    if owner is within or not callable(getattr(within, "named_modules", None)):
        return ""
    return next((path for path, module in within.named_modules() if module is owner), "")


def _store(owner: Any, name: str) -> MutableMapping[str, Any] | Any | None:
    """Return the mapping in which `owner` keeps this attribute, None where a descriptor of its class keeps it."""
    if isinstance(owner, type):
        return vars(owner)
    descriptor = inspect.getattr_static(type(owner), name, MISSING)
    if hasattr(descriptor, "__set__") or not hasattr(owner, "__dict__"):
        return None
    own = vars(owner)
    for key in _MODULE_STORES:  # torch.nn.Module; its parameters, buffers and parts are no plain attributes
        store = own.get(key)
        if isinstance(store, dict) and name in store:
            return store
    return own
