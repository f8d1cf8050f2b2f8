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

        module = import_file(reference.place, asked=asked)
        return attribute(module, reference.name, asked=asked, absent=ComponentNotFound, shown=reference.place)
    if reference.form == "module":
        if reference.place in registry.kinds and reference.name in registry.specs(reference.place):
            raise ComponentNotFound(f"{asked}: leave the kind away and write {reference.name!r}")
        return import_object(text, asked=asked)
    return registry.load(registry.find(text, kind))


def _from_hub(scheme: str, text: str, kind: str, registry: Registry) -> Any:
    hubs = registry.names("hub") if "hub" in registry.kinds else []
    if scheme not in hubs and not _offered_by_unusable(scheme, registry):
        if scheme in HUB_SCHEMES:
            raise ComponentNotFound(
                f"{kind} {text!r}: no installed plugin reads {scheme}://, and no hub is shipped yet; fetch the file, "
                "then write './file.py:Name'"
            )
        raise ComponentNotFound(f"{kind} {text!r}: no plugin reads {scheme}://; {nearest_or_all(scheme, hubs)}")
    return registry.build(scheme, "hub").load_component(text, kind, registry)


def _offered_by_unusable(scheme: str, registry: Registry) -> bool:
    """Say whether a disabled or broken plugin would read the scheme, so that its reason is the answer."""
    manifests = [record.manifest for record in registry.records if record.manifest and record.status != "ok"]
    return any(c.kind == "hub" and c.name == scheme for m in manifests for c in m.components)
