"""Versions: whether a plugin fits this core, and which packages that a component needs are not installed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from .errors import ManifestError, PluginIncompatible, RequirementMissing
from .manifest import ComponentSpec, PluginRecord
from .naming import canonical

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
    """Return what `spec.requires` asks for and the environment lacks; markers and extras count."""
    missing: list[MissingRequirement] = []
    for text in spec.requires:
        unmet = _unmet(_requirement(text, spec), seen=set())
        missing += [m for m in unmet if m not in missing]
    return missing


def check_requirements(spec: ComponentSpec) -> None:
    """Raise `RequirementMissing` with the command to run, unless everything that `spec` needs is installed."""
    if missing := missing_requirements(spec):
        needs = ", ".join(str(m) for m in missing)
        wanted = [with_extra(m.requirement, (spec.dist,)) or m.requirement for m in missing]
        command = " ".join(f"'{text}'" for text in dict.fromkeys(wanted))
        raise RequirementMissing(f"{spec} needs {needs}; run: pip install {command}")


def with_extra(requirement: str, dists: Iterable[str]) -> str:
    """Return `dist[extra]` for the first extra of these distributions with the requirement, or an empty string.

    Args:
        requirement: The missing requirement.
        dists: Distributions to search, in this order; one that is not installed is skipped.
    """
    from importlib.metadata import PackageNotFoundError, metadata, requires

    from packaging.requirements import Requirement

    wanted = canonical(Requirement(requirement).name)
    for dist in dists:
        try:
            brought = [Requirement(text) for text in requires(dist) or ()]
            extras = metadata(dist).get_all("Provides-Extra") or []
        except (PackageNotFoundError, ValueError):
            continue
        for each in brought:
            if canonical(each.name) != wanted or each.marker is None or each.marker.evaluate({"extra": ""}):
                continue
            for extra in extras:
                if each.marker.evaluate({"extra": extra}):
                    return f"{dist}[{extra}]"
    return ""


def check_core(record: PluginRecord, core_version: str) -> PluginRecord:
    """Return `record`, as `incompatible` if its manifest asks for another version of twinkle-core."""
    if record.status != "ok" or record.manifest is None or satisfies(core_version, record.manifest.core):
        return record
    needs = record.manifest.core
    renew = f"twinkle plugins add {record.dist}" if "://" in record.dist else f"pip install -U '{record.dist}'"
    reason = (
        f"plugin {record.name} {record.version} needs twinkle-core {needs}, installed is {core_version}; "
        f"run: {renew} or pip install 'twinkle-core{needs}'"
    )
    return replace(record, status="incompatible", reason=reason, cause=PluginIncompatible(reason))


@lru_cache(maxsize=256)
def satisfies(version: str, specifier: str) -> bool:
    """Return whether a version fits a specifier; pre-releases of it count as installed versions do."""
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
