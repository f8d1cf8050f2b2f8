"""Decides whether a plugin may be used (settings, name, core version, kinds, hooks) and a component (its packages)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ManifestError, PluginBroken, PluginIncompatible, RequirementMissing
from .manifest import ComponentSpec, Manifest, PluginRecord
from .naming import PROJECT, canonical, nearest_or_all
from .settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packaging.requirements import Requirement


_PLAIN_VERSION = re.compile(r"\d+(\.\d+)*")
_PLAIN_BOUND = re.compile(r"\s*(>=|<)\s*(\d+(?:\.\d+)*)\s*")


class MissingRequirement(NamedTuple):
    """One requirement that is not met: `installed` is the installed version, or None."""

    requirement: str
    installed: str | None

    def __str__(self) -> str:
        """Return `torch>=9 (installed: 2.6)`."""
        return f"{self.requirement} ({f'installed: {self.installed}' if self.installed else 'not installed'})"


def missing_requirements(spec: ComponentSpec) -> list[MissingRequirement]:
    """Return the requirements of a component that the environment does not meet; markers and extras are evaluated."""
    missing: list[MissingRequirement] = []
    for text in spec.requires:
        unmet = _unmet(_requirement(text, spec), seen=set())
        missing += [m for m in unmet if m not in missing]
    return missing


def check_requirements(spec: ComponentSpec) -> None:
    """Raise `RequirementMissing` with the command to run, unless everything that `spec` needs is installed."""
    if missing := missing_requirements(spec):
        needs = ", ".join(str(m) for m in missing)
        specifiers = [with_extra(m.requirement, (spec.dist,)) or m.requirement for m in missing]
        command = " ".join(f"'{text}'" for text in dict.fromkeys(specifiers))
        raise RequirementMissing(f"{spec} needs {needs}; run: pip install {command}")


def with_extra(requirement: str, dists: Iterable[str]) -> str:
    """Return `dist[extra]` for the smallest extra with the requirement, or an empty string.

    Args:
        requirement: The missing requirement.
        dists: Distributions to search, in this order; one that is not installed is skipped.
    """
    from importlib.metadata import PackageNotFoundError, metadata, requires

    from packaging.requirements import Requirement

    package = canonical(Requirement(requirement).name)
    for dist in dists:
        try:
            dependencies = [Requirement(text) for text in requires(dist) or ()]
            extras = metadata(dist).get_all("Provides-Extra") or []
        except (PackageNotFoundError, ValueError):
            continue
        optional = [d for d in dependencies if d.marker is not None and not d.marker.evaluate({"extra": ""})]
        packages = {
            extra: {canonical(d.name) for d in optional if d.marker and d.marker.evaluate({"extra": extra})}
            for extra in extras
        }
        if suitable := [extra for extra in extras if package in packages[extra]]:
            return f"{dist}[{min(suitable, key=lambda extra: len(packages[extra]))}]"
    return ""


def check_core(record: PluginRecord, core_version: str) -> PluginRecord:
    """Return `record`, as `incompatible` if its manifest requires another version of twinkle-core."""
    if record.status != "ok" or record.manifest is None or satisfies(core_version, record.manifest.core):
        return record
    needs = record.manifest.core
    renew = f"twinkle plugins add {record.dist}" if "://" in record.dist else f"pip install -U '{record.dist}'"
    reason = (
        f"plugin {record.name} {record.version} needs twinkle-core {needs}, but {core_version} is installed; "
        f"run: {renew} or pip install 'twinkle-core{needs}'"
    )
    return replace(record, status="incompatible", reason=reason, cause=PluginIncompatible(reason))


@lru_cache(maxsize=256)
def satisfies(version: str, specifier: str) -> bool:
    """Return whether a version satisfies a specifier; pre-releases are accepted."""
    bounds = [_PLAIN_BOUND.fullmatch(part) for part in specifier.split(",")]
    if _PLAIN_VERSION.fullmatch(version) and all(bounds):
        # `>=a.b,<c` of plain numbers is in nearly every manifest; `packaging` costs 20 ms to import.
        return all((_release(version) >= _release(b[2])) == (b[1] == ">=") for b in bounds if b)
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _requirement(text: str, spec: ComponentSpec) -> Requirement:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise ManifestError(f"{spec}: requires {text!r}, which is not a requirement ({error})") from error


def _unmet(requirement: Requirement, *, seen: set[str], extra: str = "") -> list[MissingRequirement]:
    from importlib.metadata import PackageNotFoundError, distribution

    if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
        return []
    bare = str(requirement).partition(";")[0].strip()
    if bare in seen:
        return []
    seen.add(bare)
    try:
        dist = distribution(requirement.name)
    except PackageNotFoundError:
        return [MissingRequirement(bare, None)]
    if not requirement.specifier.contains(dist.version, prereleases=True):
        return [MissingRequirement(bare, dist.version)]
    return [m for name in sorted(requirement.extras) for m in _unmet_of_extra(dist.requires or [], name, seen)]


def _unmet_of_extra(requires: list[str], extra: str, seen: set[str]) -> list[MissingRequirement]:
    from packaging.requirements import Requirement

    missing = []
    for requirement in map(Requirement, requires):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            missing += _unmet(requirement, seen=seen, extra=extra)
    return missing


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
        # Core itself: `only = ["acme"]` restricts plugins, not the core that they need.
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
        return self.settings.why_disabled(record.name, record.dist, self.essential)

    def _with_unknown(self, record: PluginRecord) -> PluginRecord:
        """Add the problems that only the registry can find to those of the manifest, to report all of them at once."""
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
    """Return the usable plugins that lose their name to `record`, because only its distribution has that name."""
    if record.status != "ok" or not _is_named_like_its_distribution(record):
        return []
    return [twin for twin in _namesakes(record, others) if not _is_named_like_its_distribution(twin)]


def name_is_taken(record: PluginRecord, owner: PluginRecord) -> str:
    """Return the error text for a plugin whose name is taken by another plugin."""
    return (
        f"the name {record.name!r} of this plugin (distribution {record.dist} {record.version}) is taken by "
        f"{owner.dist} {owner.version} at {owner.location}"
    )


def broken(record: PluginRecord, error: PluginBroken) -> PluginRecord:
    """Return the record as broken, with the text of the error as the reason."""
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


def _is_named_like_its_distribution(record: PluginRecord) -> bool:
    return canonical(record.name) == canonical(record.dist)
