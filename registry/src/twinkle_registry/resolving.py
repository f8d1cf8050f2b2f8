"""Resolves a string that names a component: a name, a module path, a file or a reference to a hub."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import ComponentConflict, ComponentNotFound
from .importing import attribute, import_object
from .naming import nearest_or_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .manifest import ComponentSpec
    from .registry import Registry
    from .settings import Settings


_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_PATH_STARTS = ("./", "../", "/", "~", ".\\", "..\\")
FORMS = "write a name, 'plugin/Name', 'package.module:Attr', './file.py:Name' or 'hf://org/repo@revision#Name'"
HUB_SCHEMES = ("hf", "ms", "file")


class Reference(NamedTuple):
    """A parsed component string.

    Attributes:
        form: `name` (`Name`, `dist/Name`), `module` (`package.module:Attr`), `file` (`./file.py:Name`) or `hub`
            (`hf://org/repo@revision#Name`).
        place: The plugin, module, file or scheme; empty for a bare name.
        name: The component or attribute; for a hub, the whole text.
    """

    form: Literal["name", "module", "file", "hub"]
    place: str
    name: str


def parse_reference(text: str, kind: str) -> Reference:
    """Parse `text` into its form; `kind` is only for error messages."""
    if scheme := _SCHEME.match(text):
        return Reference("hub", scheme[1], text)
    place, colon, name = text.rpartition(":")
    if text.startswith(_PATH_STARTS) and not text.rstrip(":").endswith(".py") and not (colon and name):
        raise ComponentNotFound(f"{kind} {text!r} is a path; give a file and the name of a component: './file.py:Name'")
    if text.endswith(".py") or (text.startswith(_PATH_STARTS) and not (colon and name)):
        raise ComponentNotFound(f"{kind} {text!r} is a file; add the name of a component: '{text.rstrip(':')}:Name'")
    if colon and (place.endswith(".py") or place.startswith(_PATH_STARTS)):
        return Reference("file", place, name)
    if colon:
        if not place or not all(part.isidentifier() for part in [*place.split("."), *name.split(".")]):
            raise ComponentNotFound(f"{kind} {text!r} is not of the form 'package.module:Attr'")
        return Reference("module", place, name)
    dist, _, name = text.rpartition("/")
    if not name:
        raise ComponentNotFound(f"{kind} {text!r} has no name; {FORMS}")
    return Reference("name", dist, name)


def choose(
    specs: Sequence[ComponentSpec], *, dist: str, name: str, kind: str, settings: Settings
) -> ComponentSpec | None:
    """Return the one component of that name, or None.

    Raises:
        ComponentConflict: Several plugins offer it and none is preferred.
    """
    if dist:
        specs = [spec for spec in specs if spec.offered_as(dist)]
    preferred = settings.prefer.get(f"{kind}:{name}", "")
    preferred_specs = [spec for spec in specs if spec.offered_as(preferred)]
    if len(specs) > 1 and len(preferred_specs) != 1:
        raise _conflict(specs, name, kind, settings)
    return next(iter(preferred_specs or specs), None)


def _conflict(specs: Sequence[ComponentSpec], name: str, kind: str, settings: Settings) -> ComponentConflict:
    dists = [spec.dist for spec in specs]
    preferred = settings.prefer.get(f"{kind}:{name}")
    unmet = f" ({settings.source('prefer')} prefers {preferred!r}, which does not offer it)" if preferred else ""
    return ComponentConflict(
        f"{kind} {name!r} is offered by {' and '.join(dists)}{unmet}; "
        f"write {dists[0] + '/' + name!r}, "
        f'or set [plugins] prefer = {{ "{kind}:{name}" = "{dists[0]}" }} in twinkle.toml, '
        f"or disable one: TWINKLE_PLUGINS_DISABLE={dists[-1]}"
    )


def component_from_reference(reference: Reference, text: str, kind: str, registry: Registry) -> Any:
    """Return the object of a reference into a module, a file or a hub, not yet checked against the contract of `kind`.

    Args:
        reference: `text`, parsed; not the name of a component.
        text: The reference as it was written.
        kind: The kind that is requested.
        registry: Provides the hubs, and the check of a frozen run.
    """
    context = f"{kind} {text!r}"
    if reference.form == "hub":
        return _from_hub(reference.place, text, kind, registry)
    if reference.form == "file":
        from .files import import_file

        source = registry.frozen.source(reference.place, context=context) if registry.frozen else None
        module = import_file(reference.place, context=context, source=source)
        return attribute(module, reference.name, context=context, absent=ComponentNotFound, shown=reference.place)
    if reference.place in registry.kinds and reference.name in registry.specs(reference.place):
        raise ComponentNotFound(f"{context}: remove the kind and write {reference.name!r}")
    if registry.frozen:
        registry.frozen.check_module(reference.place, registry.records, context=context)
    return import_object(text, context=context)


def _from_hub(scheme: str, text: str, kind: str, registry: Registry) -> Any:
    from .trust.loading import component_from_hub

    return component_from_hub(text, kind, registry, lambda: open_hub(scheme, registry, context=f"{kind} {text!r}"))


def open_hub(scheme: str, registry: Registry, *, context: str) -> Any:
    """Return the hub that reads `scheme://`.

    Raises:
        ComponentNotFound: No plugin reads this scheme, or its hub has models and data only.
        TwinkleError: The plugin that reads this scheme cannot be used.
    """
    hubs = registry.names("hub") if "hub" in registry.kinds else []
    if scheme not in hubs and not _offered_by_unusable(scheme, registry):
        way = "run: pip install twinkle-hub" if scheme in HUB_SCHEMES else nearest_or_all(scheme, hubs)
        raise ComponentNotFound(f"{context}: no installed plugin reads {scheme}://; {way}")
    hub = registry.build(scheme, "hub")
    if not hasattr(hub, "commit_of") or not hasattr(hub, "download_code"):
        raise ComponentNotFound(f"{context}: the hub {scheme}:// has models and data only, no components")
    return hub


def _offered_by_unusable(scheme: str, registry: Registry) -> bool:
    """Return whether a disabled or broken plugin reads the scheme; the error then has its reason."""
    manifests = [record.manifest for record in registry.records if record.manifest and record.status != "ok"]
    return any(c.kind == "hub" and c.name == scheme for m in manifests for c in m.components)
