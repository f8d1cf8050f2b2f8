"""The components of a repository on a hub: those in its manifest, or the classes of its `__init__.py`."""

import importlib
import inspect
from types import ModuleType
from typing import Any

from twinkle.errors import ComponentNotFound
from twinkle_registry import MANIFEST_NAME
from twinkle_registry.naming import nearest_or_all
from twinkle_testing.contracts.guessing import kind_of, kinds_of


def components_on_hub(text: str, kind: str = "") -> list[tuple[Any, str]]:
    """Return the components that a reference names, as pairs (component, kind).

    Args:
        text: `scheme://repo`, with `@revision` and `#Name` or without.
        kind: its kind, if the repository has no manifest.

    Raises:
        NotTrusted: the code is not trusted.
        ComponentNotFound: the repository has no component, or none of that name.
        ArgumentError: it has no manifest, and the base classes of the named object do not determine its kind.
    """
    from twinkle._registry import registry
    from twinkle_registry.importing import import_object
    from twinkle_registry.resolving import open_hub
    from twinkle_registry.trust.loading import Load, record_of, usable
    from twinkle_registry.trust.reference import HubReference

    reference = HubReference.parse(text, context=repr(text))
    tree, origin = Load().tree_of(
        reference, lambda: open_hub(reference.scheme, registry(), context=repr(text)), context=repr(text)
    )
    record = usable(registry().validate(record_of(tree, origin)), context=repr(text))
    if MANIFEST_NAME in tree.files:
        listed = record.manifest.components if record.manifest else ()
        chosen = [spec for spec in listed if reference.name in ("", spec.name)]
        if not chosen:
            near = nearest_or_all(reference.name, [spec.name for spec in listed])
            raise ComponentNotFound(f"{text!r}: its manifest lists no {reference.name!r}; {near}")
        return [(spec, spec.kind) for spec in chosen]
    if reference.name and kind:
        return [(text, kind)]
    if reference.name:
        return [(text, kind_of(import_object(f"{record.package}:{reference.name}", context=repr(text)), text))]
    import_object(f"{record.package}:__name__", context=repr(text))
    found = _own_components(importlib.import_module(record.package))
    if not found:
        raise ComponentNotFound(
            f"{text!r} has no {MANIFEST_NAME}, nor a class with a base class of a contract in its __init__.py; "
            f"name the component and its kind: '{reference}#Name' --kind loss"
        )
    return [(f"{reference}#{name}", of) for name, of in found]


def _own_components(module: ModuleType) -> list[tuple[str, str]]:
    """Return name and kind of each concrete class that the repository defines."""
    return [
        (name, kinds_of(value)[0])
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
        and not inspect.isabstract(value)
        and kinds_of(value)
    ]
