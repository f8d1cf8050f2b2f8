"""Selects the components to check, by name, plugin, folder or file, with their examples."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from twinkle.errors import ArgumentError, ComponentNotFound
from twinkle_registry import ComponentSpec
from twinkle_registry.naming import canonical
from twinkle_testing.contracts.guessing import kind_of


@dataclass(frozen=True)
class Subject:
    """A component before it is imported.

    Attributes:
        thing: the argument of `check_component`.
        kind: its kind.
        name: its name in reports.
        spec: its entry in a manifest, if it has one.
    """

    thing: Any
    kind: str
    name: str
    spec: ComponentSpec | None = field(default=None)

    @classmethod
    def of(cls, thing: Any, kind: str) -> "Subject":
        """Resolve the argument; names are looked up in the registry, and nothing is imported."""
        spec = _spec(thing, kind)
        if spec is not None:
            return cls(thing, kind, spec.name, spec)
        name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
        return cls(thing, kind, re.split("[:#]", name)[-1] or name)

    @property
    def inputs(self) -> Mapping[str, str]:
        """The per-row arguments that the manifest declares."""
        return self.spec.inputs if self.spec else {}

    def load(self) -> Any:
        """Import the component and check that it fits the contract of its kind."""
        from twinkle._registry import registry

        return registry().resolve(self.spec or self.thing, self.kind)

    def example(self) -> dict[str, Any]:
        """Return the example of the manifest.

        Raises:
            ArgumentError: the manifest's `example` is not a mapping.
        """
        if self.spec is None:
            return {}
        found = read_example(replace(self.spec, ref=self.spec.example)) if self.spec.example else {}
        return {"config": self.spec.config, **found} if self.spec.config and self.kind == "recipe" else found


def read_example(source: ComponentSpec) -> dict[str, Any]:
    """Return the mapping that `source.ref` names, or that the function of this name returns."""
    from twinkle._registry import registry

    found = registry().load(source)
    given = found() if callable(found) else found
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"the example of {source} ({source.ref}) gives a {type(given).__name__}; it must be a dict, or a function "
            "without arguments that returns one"
        )
    return dict(given)


def subjects_of(text: str, kind: str = "") -> list[tuple[Any, str]]:
    """Return the components that `text` names, as pairs (component, kind).

    Args:
        text: a plugin, `Name`, `plugin/Name`, `kind:Name`; a folder that holds a plugin; `./file.py:Name`; or a
            reference to a hub, `hf://org/repo#Name`.
        kind: only components of this kind; for a file or code of a hub without a manifest, its kind.

    Raises:
        ComponentNotFound: the name is unknown, or the plugin has no component of that kind.
        ArgumentError: the kind of a component in a file or on a hub cannot be determined.
        NotTrusted: it is code of a hub that is not trusted.
    """
    found = _found(text, kind)
    chosen = [(thing, of) for thing, of in found if not kind or of == kind]
    if not chosen:
        kinds = ", ".join(sorted({of for _, of in found})) or "nothing"
        raise ComponentNotFound(f"{text} offers no {kind or 'component'}; it has {kinds}")
    return chosen


def _found(text: str, kind: str) -> list[tuple[Any, str]]:
    if "://" in text:
        from twinkle_testing.contracts.hub_code import components_on_hub

        return components_on_hub(text, kind)
    if text.endswith(".py"):
        raise ComponentNotFound(f"{text!r} is a file; add the name of a component: '{text}:Name'")
    return _in_file(text, kind) if text.rpartition(":")[0].endswith(".py") else list(_listed(text))


def _listed(text: str) -> Iterator[tuple[ComponentSpec, str]]:
    from twinkle._registry import find
    from twinkle_testing.contracts.folders import plugin_in

    folder = _is_folder(text)
    records = [plugin_in(Path(text))] if folder else find(text)
    for found in records:
        if isinstance(found, ComponentSpec):
            yield found, found.kind
            continue
        if found.manifest is None or found.status != "ok":
            raise ComponentNotFound(f"plugin {found.name} is {found.status}: {found.reason}")
        for spec in found.manifest.components:
            yield spec, spec.kind


def uninstalled_folder(text: str) -> Path | None:
    """Return the folder that `text` names, resolved, unless the plugin in it is installed from there; else None."""
    from twinkle._registry import registry
    from twinkle_testing.contracts.folders import manifest_in

    if "://" in text or text.endswith(".py") or text.rpartition(":")[0].endswith(".py") or not _is_folder(text):
        return None
    manifest = manifest_in(Path(text))
    known = [record.location for record in registry().records if record.location]
    return None if manifest in [Path(location).resolve() for location in known] else Path(text).resolve()


def _is_folder(text: str) -> bool:
    """Return whether `text` names a folder: it exists, and no installed component has this bare name."""
    from twinkle._registry import registry

    if not Path(text).is_dir():
        return False
    records = registry().records
    names = {canonical(name) for record in records for name in (record.name, record.dist)}
    components = {spec.name for record in records if record.manifest for spec in record.manifest.components}
    return canonical(text) not in names and text not in components


def _in_file(text: str, kind: str) -> list[tuple[Any, str]]:
    if kind:
        return [(text, kind)]
    from twinkle_registry.importing import attribute

    place, _, name = text.rpartition(":")
    module = file_module(place, context=repr(text))
    component = attribute(module, name, context=repr(text), absent=ComponentNotFound, shown=place)
    return [(text, kind_of(component, text))]


def file_module(place: str, *, context: str) -> ModuleType:
    """Import a Python file; in a frozen run it must be unchanged since it was locked.

    Raises:
        NotTrusted: the run is frozen, and the lock does not list the file or it was changed.
    """
    from twinkle._registry import registry
    from twinkle_registry.files import import_file

    frozen = registry().frozen
    return import_file(place, context=context, source=frozen.source(place, context=context) if frozen else None)


def _spec(thing: Any, kind: str) -> ComponentSpec | None:
    from twinkle._registry import registry
    from twinkle_registry.resolving import parse_reference

    if isinstance(thing, ComponentSpec):
        return thing
    if isinstance(thing, str):
        return registry().find(thing, kind) if parse_reference(thing, kind).form == "name" else None
    return None
