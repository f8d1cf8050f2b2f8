"""The lazy namespaces of core: `from twinkle.loss import X` loads X from whichever installed plugin offers it."""

from collections.abc import Callable
from typing import Any


def room(module: str, kind: str = "") -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a public module of core.

    An attribute is, in this order: what a plugin's manifest exports to the module (`[[export]]`), the component of that
    name and kind. A name that no plugin offers is an AttributeError with the registry's explanation; a plugin that
    fails keeps its own error.

    Args:
        module: the public module, `__name__`.
        kind: the kind of component whose names the module shows; empty where it shows exports only.
    """
    import sys

    namespace = sys.modules[module].__dict__

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        from twinkle._registry import registry
        from twinkle.errors import ComponentNotFound

        try:
            value = registry().attribute(module, name, kind)
        except ComponentNotFound as error:
            raise AttributeError(f"module {module!r}: {error}", name=name) from error
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        from twinkle._registry import registry

        names = registry().names(kind) if kind else ()
        return sorted({*namespace.get("__all__", ()), *registry().exports(module), *names})

    return __getattr__, __dir__
