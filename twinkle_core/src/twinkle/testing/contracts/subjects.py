"""What is to be checked: a component by any form of reference, with the example that its manifest names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_registry import ComponentSpec


@dataclass(frozen=True)
class Subject:
    """A component before it is imported.

    Attributes:
        thing: what was given.
        kind: its kind.
        name: how reports call it.
        spec: its entry in a manifest, if it has one.
    """

    thing: Any
    kind: str
    name: str
    spec: ComponentSpec | None = field(default=None)

    @classmethod
    def of(cls, thing: Any, kind: str) -> "Subject":
        """Read what was given; a text that is a name is looked up, and nothing is imported."""
        spec = _spec(thing, kind)
        if spec is not None:
            return cls(thing, kind, spec.name, spec)
        name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
        return cls(thing, kind, name.rpartition(":")[2] or name)

    @property
    def inputs(self) -> Mapping[str, str]:
        """The per-row arguments that the manifest declares."""
        return self.spec.inputs if self.spec else {}

    def load(self) -> Any:
        """Import the component and check that it fits the contract of its kind."""
        from twinkle._registry import registry

        return registry().resolve(self.spec or self.thing, self.kind)

    def example(self) -> dict[str, Any]:
        """Return what the manifest's `example` gives: a function without arguments, called here.

        Raises:
            ArgumentError: it gives something else than a mapping.
        """
        if self.spec is None or not self.spec.example:
            return {}
        return read_example(replace(self.spec, ref=self.spec.example))


def read_example(source: ComponentSpec) -> dict[str, Any]:
    """Call the function that `source.ref` names, and check that it gives a mapping."""
    from twinkle._registry import registry

    found = registry().load(source)
    given = found() if callable(found) else found
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"the example of {source} ({source.ref}) gives a {type(given).__name__}; it must be a function without "
            "arguments that returns a dict"
        )
    return dict(given)


def _spec(thing: Any, kind: str) -> ComponentSpec | None:
    from twinkle._registry import registry
    from twinkle_registry.references import parse_reference

    if isinstance(thing, ComponentSpec):
        return thing
    if isinstance(thing, str):
        return registry().find(thing, kind) if parse_reference(thing, kind).form == "name" else None
    return None
