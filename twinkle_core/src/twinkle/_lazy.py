"""The lazy namespace of a room: `from twinkle.loss import X` finds X in whichever installed plugin offers it."""

from collections.abc import Callable
from typing import Any


def room(module: str, kind: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the module-level `__getattr__` and `__dir__` (PEP 562) of the room `module` for components of `kind`.

    A name that no plugin offers is an AttributeError whose text is the registry's explanation; a plugin that fails
    keeps its own error.
    """
    import sys

    namespace = sys.modules[module].__dict__

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        from twinkle._registry import registry
        from twinkle.errors import ComponentNotFound

        try:
            value = registry().resolve(name, kind)
        except ComponentNotFound as error:
            raise AttributeError(f"module {module!r}: {error}", name=name) from error
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        from twinkle._registry import registry

        return sorted({*namespace.get("__all__", ()), *registry().names(kind)})

    return __getattr__, __dir__
