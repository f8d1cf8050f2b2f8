"""Decides whether a plugin may be used: settings, name, core version, kinds and hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .errors import ManifestError, PluginBroken
from .manifest import Manifest, PluginRecord
from .naming import PROJECT, canonical, nearest_or_all
from .requirements import check_core
from .settings import Settings


class Validator:
    """Validates plugins against the kinds, lifecycle hooks and version of core, and against the settings."""

    def __init__(
        self,
        *,
        kinds: Collection[str],
        lifecycle: Collection[str],
        core_version: str,
        settings: Settings,
        essential: Collection[str],
    ) -> None:
        self.kinds, self.lifecycle, self.core_version = kinds, lifecycle, core_version
        self.settings = settings
        # Core itself: `only = ["acme"]` means plugins, not the core that they need.
        self.essential = {canonical(name) for name in essential}

    def validate(self, record: PluginRecord, others: Sequence[PluginRecord]) -> PluginRecord:
        """Return the record with its status, given the plugins that were added before."""
        if record.status != "ok":
            return self._with_unknown(record)
        if why := self._why_disabled(record):
            return replace(record, status="disabled", reason=why)
        validated = check_core(record, self.core_version)
        # A manifest for another core may name kinds that this one does not have.
        problems = [*_twins(record, others), *self._unknown(record.manifest)] if validated.status == "ok" else []
        if problems:
            return unusable(record, *problems)
        return validated

    def _why_disabled(self, record: PluginRecord) -> str:
        formerly = record.manifest.formerly if record.manifest else ()
        return self.settings.why_disabled((record.name, record.dist), formerly, self.essential)

    def _with_unknown(self, record: PluginRecord) -> PluginRecord:
        """Add to the problems of a manifest those that need the registry, so that its author sees all at once."""
        read = record.cause.manifest if isinstance(record.cause, ManifestError) else None
        problems = self._unknown(read) if isinstance(read, Manifest) else []
        if not problems:
            return record
        from .reading import with_problems

        return replace(record, reason=with_problems(record.reason, problems))

    def _unknown(self, manifest: Manifest | None) -> list[str]:
        if manifest is None:
            return []
        problems = [
            f"component {c.name!r} is of the unknown kind {c.kind!r}, {nearest_or_all(c.kind, self.kinds)}"
            for c in manifest.components
            if c.kind and c.kind not in self.kinds
        ]
        declared = manifest.hooks.implements if manifest.hooks else ()
        return problems + [
            f"hooks: there is no hook {hook!r}, {nearest_or_all(hook, self.lifecycle)}"
            for hook in declared
            if hook not in self.lifecycle
        ]


def name_losers(record: PluginRecord, others: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Return the usable plugins that lose their name to `record`: it is that of its distribution, and not of theirs."""
    if record.status != "ok" or not _bears_own_name(record):
        return []
    return [twin for twin in _namesakes(record, others) if not _bears_own_name(twin)]


def name_is_taken(record: PluginRecord, owner: PluginRecord) -> str:
    """Return the text for a plugin whose name another one has; it names both."""
    return (
        f"the name {record.name!r} of this plugin (distribution {record.dist} {record.version}) is taken by "
        f"{owner.dist} {owner.version} at {owner.location}"
    )


def broken(record: PluginRecord, error: PluginBroken) -> PluginRecord:
    """Return the record as one that cannot be used, for the reason that the error gives."""
    return replace(record, status="broken", reason=str(error), cause=error)


def lifecycle_hooks(hookspecs: Any, kinds: Iterable[str]) -> list[str]:
    """Return the hook specs that do not belong to a kind; `hookspec` marks hook specs."""
    of_kinds = {f"twinkle_{kind}" for kind in kinds}
    # Not `getattr` over `dir`: a module may have lazy attributes, which must not be loaded here.
    marked = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec")]
    return sorted(set(marked) - of_kinds)


def unusable(record: PluginRecord, *problems: str) -> PluginRecord:
    """Return the record as broken by these problems of its manifest."""
    return broken(record, PluginBroken(f"{record.location or record.name}: {'; '.join(problems)}"))


def _twins(record: PluginRecord, others: Sequence[PluginRecord]) -> list[str]:
    yielding = name_losers(record, others)
    return [name_is_taken(record, twin) for twin in _namesakes(record, others) if twin not in yielding]


def _namesakes(record: PluginRecord, others: Sequence[PluginRecord]) -> list[PluginRecord]:
    return [twin for twin in others if twin.status == "ok" and canonical(twin.name) == canonical(record.name)]


def _bears_own_name(record: PluginRecord) -> bool:
    return canonical(record.name) == canonical(record.dist)
