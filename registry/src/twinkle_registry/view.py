"""A tenant's view of the registry: an allow list, computed again at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from . import explain
from .errors import ComponentTypeError, NotTrusted
from .manifest import ComponentSpec
from .naming import quoted
from .resolving import choose, parse_reference

if TYPE_CHECKING:
    from .registry import Registry


class RegistryView:
    """The part of a registry that an allow list names, by `kind:Name`, `plugin/Name`, `kind:*` or `plugin/*`.

    A component outside the list cannot be found here. Code by path, from a hub or as an object is refused: a
    tenant with a view runs only what the operator installed.
    """

    def __init__(self, registry: Registry, allow: Iterable[str] | Callable[[], Iterable[str]]) -> None:
        if isinstance(allow, str):
            raise ComponentTypeError(f"allow must be a list such as ['loss:GRPOLoss'], got {allow!r}")
        self._registry = registry
        self._allow = list(allow) if isinstance(allow, Iterator) else allow

    def specs(self, kind: str) -> dict[str, list[ComponentSpec]]:
        """Return the allowed components of one kind by name."""
        allowed = set(self._allow() if callable(self._allow) else self._allow)
        allowed_specs = {
            name: [s for s in specs if _names_of(s) & allowed] for name, specs in self._registry.specs(kind).items()
        }
        return {name: specs for name, specs in allowed_specs.items() if specs}

    def names(self, kind: str) -> list[str]:
        """Return the allowed names of one kind, sorted."""
        return sorted(self.specs(kind))

    def find(self, name: str, kind: str) -> ComponentSpec:
        """Return an allowed component by `Name` or `plugin/Name`; errors name allowed ones only."""
        dist, _, bare = name.rpartition("/")
        specs = self.specs(kind)
        settings = self._registry.settings
        spec = choose(specs.get(bare, []), dist=dist, name=bare, kind=kind, settings=settings)
        if spec is not None:
            return spec
        by_kind = {k: self.specs(k) for k in self._registry.kinds}
        raise explain.not_found(requested=name, dist="", name=bare, kind=kind, by_kind=by_kind, records=[])

    def resolve(self, x: str, kind: str) -> Any:
        """Return an allowed component by name.

        Raises:
            NotTrusted: `x` is not a name, but a path, a reference or an object.
        """
        return self._registry.resolve(self._allowed(x, kind), kind)

    def build(self, x: str, kind: str, /, *args: Any, **init_args: Any) -> Any:
        """Resolve and instantiate an allowed component; see `Registry.build`."""
        return self._registry.build(self._allowed(x, kind), kind, *args, **init_args)

    def _allowed(self, x: str, kind: str) -> ComponentSpec:
        if isinstance(x, str) and parse_reference(x, kind).form == "name":
            return self.find(x, kind)
        names = self.names(kind)
        offer = f"there are {quoted(names)}" if names else f"there is no {kind}"
        raise NotTrusted(f"{kind} {x!r}: only names of installed components are allowed here; {offer}")


def _names_of(spec: ComponentSpec) -> set[str]:
    return {f"{spec.kind}:{spec.name}", f"{spec.dist}/{spec.name}", f"{spec.kind}:*", f"{spec.dist}/*"}
