"""Turns a text that names a component into the object: one way for each form of reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ComponentNotFound
from .importing import attribute, import_object
from .naming import nearest_or_all
from .references import parse_reference

if TYPE_CHECKING:
    from .registry import Registry

HUB_SCHEMES = ("hf", "ms", "file")


def component_from_text(text: str, kind: str, registry: Registry) -> Any:
    """Return what `text` names, not yet checked against the contract of `kind`."""
    reference = parse_reference(text, kind)
    asked = f"{kind} {text!r}"
    if reference.form == "hub":
        return _from_hub(reference.place, text, kind, registry)
    if reference.form == "file":
        from .files import import_file

        source = registry.frozen.source(reference.place, asked=asked) if registry.frozen else None
        module = import_file(reference.place, asked=asked, source=source)
        return attribute(module, reference.name, asked=asked, absent=ComponentNotFound, shown=reference.place)
    if reference.form == "module":
        if reference.place in registry.kinds and reference.name in registry.specs(reference.place):
            raise ComponentNotFound(f"{asked}: leave the kind away and write {reference.name!r}")
        if registry.frozen:
            registry.frozen.check_module(reference.place, registry.records, asked=asked)
        return import_object(text, asked=asked)
    return registry.load(registry.find(text, kind))


def _from_hub(scheme: str, text: str, kind: str, registry: Registry) -> Any:
    from .code.loading import component_from_hub

    return component_from_hub(text, kind, registry, lambda: open_hub(scheme, registry, asked=f"{kind} {text!r}"))


def open_hub(scheme: str, registry: Registry, *, asked: str) -> Any:
    """Return the hub that reads `scheme://`.

    Raises:
        ComponentNotFound: No plugin does, or it reads models and data only.
        TwinkleError: The plugin that does cannot be used.
    """
    hubs = registry.names("hub") if "hub" in registry.kinds else []
    if scheme not in hubs and not _offered_by_unusable(scheme, registry):
        way = "run: pip install twinkle-hub" if scheme in HUB_SCHEMES else nearest_or_all(scheme, hubs)
        raise ComponentNotFound(f"{asked}: no installed plugin reads {scheme}://; {way}")
    hub = registry.build(scheme, "hub")
    if not hasattr(hub, "commit_of") or not hasattr(hub, "download_code"):
        raise ComponentNotFound(f"{asked}: the hub {scheme}:// carries models and data, not components")
    return hub


def _offered_by_unusable(scheme: str, registry: Registry) -> bool:
    """Say whether a disabled or broken plugin would read the scheme, so that its reason is the answer."""
    manifests = [record.manifest for record in registry.records if record.manifest and record.status != "ok"]
    return any(c.kind == "hub" and c.name == scheme for m in manifests for c in m.components)
