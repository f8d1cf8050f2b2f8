"""The registry of this process, filled with the installed plugins on first use, and the lazy namespaces of core."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_registry import ComponentSpec, PluginRecord, Registry


@cache
def registry() -> "Registry":
    """Return this process's plugin registry: installed plugins, and those of a hub that twinkle.lock lists."""
    from twinkle import __version__, hookspecs
    from twinkle.kinds import KINDS
    from twinkle_registry import Registry
    from twinkle_registry.discovery import locked_plugins

    contracts = {name: kind.contract or None for name, kind in KINDS.items()}
    plugins = Registry(hookspecs, kinds=contracts, core_version=__version__)
    plugins.load_installed(extra=locked_plugins())
    return plugins


def check_kind_in(text: str) -> None:
    """Check the kind in `kind:Name`; other texts pass.

    Raises:
        ComponentNotFound: the kind does not exist, or the component of that name is of another kind.
    """
    from twinkle.errors import ComponentNotFound
    from twinkle.kinds import KINDS
    from twinkle_registry.naming import nearest_or_all

    kind, colon, name = text.partition(":")
    if not colon or not kind.isidentifier() or name.startswith("//"):  # or a reference of a hub
        return
    if kind not in KINDS:
        raise ComponentNotFound(f"{text!r}: there is no kind {kind!r}; {nearest_or_all(kind, KINDS)}")
    specs = [spec for record in registry().records if record.manifest for spec in record.manifest.components]
    others = [f"{spec.kind}:{spec.name}" for spec in specs if spec.name == name]
    if others and text not in others:
        raise ComponentNotFound(f"{text!r}: no {kind} is called so, but there is {', '.join(sorted(set(others)))}")


def find(name: str) -> "list[PluginRecord | ComponentSpec]":
    """Return the plugin with this name, or else every component with this name.

    Raises:
        ComponentNotFound: nothing has this name; the message suggests the nearest.
    """
    from twinkle.errors import ComponentNotFound
    from twinkle_registry.naming import canonical, nearest

    check_kind_in(name)
    records = registry().records
    if plugins := [registry().checked(r) for r in records if canonical(name) in (canonical(r.name), canonical(r.dist))]:
        return list(plugins)
    specs = [spec for record in records if record.manifest for spec in record.manifest.components]
    if matching := [spec for spec in specs if name in _names_of(spec)]:
        return list(matching)
    if name in registry().kinds:
        raise ComponentNotFound(f"{name!r} is a kind, not a name; all of that kind: twinkle plugins list {name}")
    known = {*(record.name for record in records), *(spec.name for spec in specs)}
    close = nearest(name, known)
    hint = f"nearest: {', '.join(close)}" if close else "`twinkle plugins list` shows what there is"
    if elsewhere := _elsewhere(name, records):
        hint += f"; {elsewhere}"
    if unreadable := [record.name for record in records if record.manifest is None]:
        hint += f"; {', '.join(unreadable)} may offer it but cannot be read, see: twinkle plugins doctor"
    raise ComponentNotFound(f"no plugin or component is called {name!r}; {hint}")


def _names_of(spec: "ComponentSpec") -> tuple[str, ...]:
    return spec.name, f"{spec.dist}/{spec.name}", f"{spec.kind}:{spec.name}"


def _elsewhere(name: str, records: "list[PluginRecord]") -> str:
    from twinkle_registry.index import where_to_get

    kind, _, bare = name.rpartition(":")
    dist, _, bare = bare.rpartition("/")
    return where_to_get(bare, kind, dist, installed=[record.dist for record in records])


class PublicNames(Sequence[str]):
    """`__all__` of a public module of core: its own names, and those of installed plugins when `import *` reads it.

    Attributes:
        own: the names that the module defines or lists itself.
    """

    def __init__(self, module: str, own: Iterable[str], names: Callable[[], Iterable[str]]) -> None:
        self.own = list(own)
        self._module, self._names = module, names
        self._bound: list[str] | None = None

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> list[str]:
        if self._bound is None:
            others = [name for name in self._names() if name.isidentifier() and name not in self.own]
            self._bound = [*self.own, *(name for name in others if self._is_there(name))]
        return self._bound

    def _is_there(self, name: str) -> bool:
        """Return whether the name can be imported; the log reports the reason if it cannot."""
        import sys

        from twinkle.errors import TwinkleError
        from twinkle.logging import get_logger

        try:
            getattr(sys.modules[self._module], name)
        except (TwinkleError, AttributeError) as error:
            get_logger(__name__).info("from %s import *: %s is left out: %s", self._module, name, error)
            return False
        return True


def lazy_names(
    module: str, kind: str = "", aliases: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a public module of core, and complete its `__all__`.

    An attribute is, in this order: what a plugin's manifest exports to the module (`[[export]]`), the component of that
    name and kind. A name that no plugin offers raises an AttributeError with the registry's explanation. Other errors
    of the registry, such as of a plugin that cannot be imported, are raised as they are.

    Args:
        module: the public module, `__name__`.
        kind: the kind of component whose names the module shows; empty where it shows exports only.
        aliases: further names for `import *`, which the module resolves itself.
    """
    import sys

    namespace = sys.modules[module].__dict__
    defined = (name for name, value in namespace.items() if getattr(value, "__module__", None) == module)
    own = list(namespace.get("__all__") or [name for name in defined if not name.startswith("_")])

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        from twinkle.errors import ComponentNotFound

        try:
            value = registry().attribute(module, name, kind)
        except ComponentNotFound as error:
            raise AttributeError(f"module {module!r}: {error}", name=name) from error
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        names = registry().names(kind) if kind else ()
        return sorted({*own, *registry().exports(module), *names})

    namespace["__all__"] = PublicNames(module, own, lambda: [*__dir__(), *aliases])

    return __getattr__, __dir__
