"""Errors for a name that does not resolve to one component: the request, the alternatives and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .errors import ComponentNotFound, NotTrusted, PluginBroken, PluginIncompatible, TwinkleError
from .manifest import ComponentSpec, PluginRecord
from .naming import canonical, nearest_or_all, quoted
from .settings import Settings

SpecsByName = Mapping[str, Sequence[ComponentSpec]]


def not_found(
    *,
    requested: str,
    dist: str,
    name: str,
    kind: str,
    by_kind: Mapping[str, SpecsByName],
    records: Iterable[PluginRecord],
    elsewhere: str = "",
) -> TwinkleError:
    """Return the error for a name that no usable plugin offers; if an unusable one would, the error gives its reason.

    `elsewhere` says where to get the component, if known.
    """
    records = [record for record in records if not dist or _is(record, dist)] if dist else list(records)
    unusable = [record for record in records if record.status != "ok"]
    for record in unusable:
        offers = _offers(record, name, kind, by_kind)
        if offers or dist:
            return _unusable(record, f"{kind} {requested!r}", offers=offers)
    if dist and not records:
        plugins = {spec.dist for by_name in by_kind.values() for specs in by_name.values() for spec in specs}
        return ComponentNotFound(
            f"{kind} {requested!r}: no plugin {dist!r} is installed; {nearest_or_all(dist, plugins)}; "
            + (elsewhere or "if it is a package that you trust, install it first")
        )
    here = by_kind.get(kind, {})
    names = [n for n, specs in here.items() if not dist or any(canonical(s.dist) == canonical(dist) for s in specs)]
    offered = f"plugin {dist!r} offers no such {kind}" if dist else "no installed plugin offers it"
    hints = [offered, nearest_or_all(name, names), *_hints(requested, name, kind, by_kind)]
    hints += _may_offer([record for record in unusable if record.manifest is None])
    hints += [elsewhere] if elsewhere else []
    return ComponentNotFound(f"{kind} {requested!r}: " + "; ".join(hints))


def export_not_found(module: str, name: str, records: Iterable[PluginRecord], elsewhere: str) -> TwinkleError:
    """Return the error for an attribute of a namespace that no usable plugin exports; see `Registry.export`."""
    for record in records:
        exports = record.manifest.exports if record.manifest and record.status != "ok" else ()
        if any((export.module, export.name) == (module, name) for export in exports):
            return _unusable(record, f"{module}.{name}", offers=True)
    return ComponentNotFound(
        f"{module}.{name}: no installed plugin exports it" + (f"; {elsewhere}" if elsewhere else "")
    )


def unknown_kind(kind: str, kinds: Iterable[str]) -> ComponentNotFound:
    """Return the error for a kind that core does not have."""
    return ComponentNotFound(f"there is no kind {kind!r}; {nearest_or_all(kind, kinds)}")


def unused_settings(
    settings: Settings, records: Sequence[PluginRecord], by_kind: Mapping[str, SpecsByName]
) -> list[str]:
    """Return a notice for each setting that names a plugin or component that does not exist."""
    plugins = sorted({name for record in records for name in (record.name, record.dist)})
    known = {canonical(name) for name in plugins}
    notices = []
    for key, names in (("disable", settings.disabled), ("only", settings.enabled_only or ())):
        notices += [
            f"{settings.source(key)} names {name!r}, which is not an installed plugin; {nearest_or_all(name, plugins)}"
            for name in sorted(names)
            if canonical(name) not in known
        ]
    for component, dist in settings.prefer.items():
        kind, _, name = component.partition(":")
        if any(spec.offered_as(dist) for spec in by_kind.get(kind, {}).get(name, ())):
            continue
        offered = [spec.dist for spec in by_kind.get(kind, {}).get(name, ())]
        fact = f"it is offered by {quoted(offered)}" if offered else "no plugin offers it"
        notices.append(f"{settings.source('prefer')} prefers {dist!r} for {component!r}, but {fact}")
    return notices


def _is(record: PluginRecord, dist: str) -> bool:
    return canonical(dist) in (canonical(record.name), canonical(record.dist))


def _offers(record: PluginRecord, name: str, kind: str, kinds: Iterable[str]) -> bool:
    """Return whether a plugin would offer the name; a component of an unknown kind counts as one of this kind."""
    return record.manifest is not None and any(
        spec.name == name and (spec.kind == kind or spec.kind not in kinds) for spec in record.manifest.components
    )


def _may_offer(unread: Sequence[PluginRecord]) -> list[str]:
    """Return hints to unreadable plugins that may offer a name; `twinkle plugins doctor` prints the full reasons."""
    refused = [record for record in unread if isinstance(record.cause, NotTrusted)]
    hints = [f"{record.dist} may offer it, but {record.reason}" for record in refused[:1]]
    if names := [record.dist for record in unread if record not in refused[:1]]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        hints.append(f"{', '.join(names[:3])}{more} may offer it but cannot be read, see: twinkle plugins doctor")
    return hints


def _unusable(record: PluginRecord, context: str, *, offers: bool) -> TwinkleError:
    text = f"{context}: plugin {record.name} {'offers it but ' if offers else ''}is {record.status}: {record.reason}"
    errors = {"broken": PluginBroken, "incompatible": PluginIncompatible}
    refused = isinstance(record.cause, NotTrusted)
    error: TwinkleError = NotTrusted(text) if refused else errors.get(record.status, ComponentNotFound)(text)
    error.__cause__ = record.cause
    return error


def _hints(requested: str, name: str, kind: str, by_kind: Mapping[str, SpecsByName]) -> list[str]:
    hints = [f"but {name!r} is of kind {other}" for other, specs in by_kind.items() if other != kind and name in specs]
    module, dot, attr = requested.rpartition(".")
    if dot and module and all(part.isidentifier() for part in requested.split(".")):
        hints.append(f"if it is a Python path, write '{module}:{attr}'")
    return hints
