"""Lists the entry points of group `twinkle` on sys.path; 15 times cheaper than importing importlib.metadata for it."""

# This runs at every start, and os.path takes a tenth of pathlib's time.
# ruff: noqa: PTH113, PTH119, PTH123, PTH208
from __future__ import annotations

import os
from typing import NamedTuple

from .naming import canonical

GROUP = "twinkle"
_METADATA_FOLDERS = (".dist-info", ".egg-info")


class FoundPlugin(NamedTuple):
    """One entry point: the distribution that has it and the package it names."""

    dist: str
    version: str
    package: str


class PathScan(NamedTuple):
    """What one entry of sys.path holds: all its distributions, and the plugins among them."""

    dists: list[str]
    plugins: list[FoundPlugin]


def scan_path(entry: str) -> PathScan:
    """Look through one entry of sys.path; what cannot be read holds nothing."""
    if os.path.isfile(entry):
        return _scan_archive(entry)
    dists: list[str] = []
    plugins: list[FoundPlugin] = []
    try:
        names = sorted(os.listdir(entry))
    except OSError:
        return PathScan(dists, plugins)
    for name in names:
        # pip leaves `~acme-1.0.dist-info` behind when an uninstall is interrupted.
        if name.endswith(_METADATA_FOLDERS) and not name.startswith("~"):
            dists.append(canonical(name.rsplit(".", 1)[0].split("-", 1)[0]))
            plugins += _plugins_of(f"{entry}/{name}")
    return PathScan(dists, plugins)


def merge(scans: list[PathScan]) -> list[FoundPlugin]:
    """Join the scans of all entries; of one distribution the first on sys.path counts, as for imports."""
    seen: set[str] = set()
    found: list[FoundPlugin] = []
    for scan in scans:
        found += [plugin for plugin in scan.plugins if canonical(plugin.dist) not in seen]
        seen.update(scan.dists)
    return sorted(set(found))


def _plugins_of(folder: str) -> list[FoundPlugin]:
    packages = _packages(_read(f"{folder}/entry_points.txt"))
    if not packages:
        return []
    name, version = _name_and_version(folder)
    return [FoundPlugin(name, version, package) for package in packages]


def _packages(text: str) -> list[str]:
    if GROUP not in text:
        return []
    section, packages = "", []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line.strip("[]").strip()
        elif section == GROUP and "=" in line and line[0] not in "#;":
            packages.append(line.partition("=")[2].strip())
    return packages


def _name_and_version(folder: str) -> tuple[str, str]:
    header = (_read(f"{folder}/METADATA") or _read(f"{folder}/PKG-INFO")).partition("\n\n")[0]
    fields = dict(line.split(": ", 1) for line in header.splitlines() if ": " in line and line[0] not in " \t")
    stem = os.path.basename(folder).rsplit(".", 1)[0]
    name, _, version = stem.partition("-")
    return fields.get("Name", name).strip(), fields.get("Version", version).strip()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _scan_archive(entry: str) -> PathScan:
    from importlib.metadata import distributions

    dists: list[str] = []
    plugins: list[FoundPlugin] = []
    for dist in distributions(path=[entry]):
        name = dist.metadata["Name"] or ""
        dists.append(canonical(name))
        found = [ep.value for ep in dist.entry_points if ep.group == GROUP]
        plugins += [FoundPlugin(name, dist.version, value) for value in found]
    return PathScan(dists, plugins)
