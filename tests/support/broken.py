"""Broken components for the tests of the contract kit: a good one with one method changed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Broken(NamedTuple):
    """A component that breaks one check, with its example."""

    component: Any
    example: Mapping[str, Any]


def changed(base: type, **members: Any) -> type:
    """Return a subclass of `base` with other members."""
    return type(f"Broken{base.__name__}", (base,), {"__doc__": "Broken.", **members})


def broken(component: Any, /, **example: Any) -> Broken:
    """Return a broken component with its example."""
    return Broken(component, example)


def after(base: type, change: Callable[[Any], Any], method: str = "__call__") -> type:
    """Return a subclass of `base` whose method gives `change` of what it gave."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(getattr(base, method)(self, *args, **kwargs))

    return changed(base, **{method: call})
