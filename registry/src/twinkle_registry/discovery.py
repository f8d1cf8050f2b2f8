"""Finds plugins, installed ones and those of a Hub that the lock lists; no plugin is imported for it.

Entry points of group `twinkle` on sys.path become records. The scan is 15 times cheaper than importing
`importlib.metadata`. Whatever is wrong with one plugin becomes the status and reason of its record, never an exception.
"""

# This runs at every start, and os.path takes a tenth of pathlib's time.
# ruff: noqa: PTH109, PTH113, PTH116, PTH118, PTH119, PTH123, PTH208
from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from .cache import DiskCache
from .errors import ManifestError, PluginBroken, TwinkleError
from .manifest import (
    MANIFEST_NAME,
    CommandSpec,
    ComponentSpec,
    ExportSpec,
    Manifest,
    PluginRecord,
    manifest_from_rows,
    manifest_to_rows,
)
from .naming import canonical
from .requirements import check_core
from .settings import lock_path

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.resources.abc import Traversable


_SHAPE = repr((ComponentSpec.__slots__, CommandSpec.__slots__, ExportSpec.__slots__, Manifest.__slots__))
GROUP = "twinkle"
_METADATA_FOLDERS = (".dist-info", ".egg-info")


def installed_plugins(core_version: str = "") -> list[PluginRecord]:
    """Return a record of every installed plugin, by name; with `core_version`, incompatible ones are marked."""
    try:
        records = _collect(forget=False)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        # The cache file is valid JSON of another shape; every other error is in a record already.
        records = _collect(forget=True)
    return [check_core(record, core_version) for record in records] if core_version else records


def locked_plugins() -> list[PluginRecord]:
    """Return a record of every Hub plugin that the lock lists; without a lock, return none and import nothing."""
    try:
        with open(lock_path(), "rb") as file:
            content = file.read()
    except OSError:
        # The code that needs the lock reports what is wrong with it; most runs have none.
        return []
    if b"[[hub]]" not in content:
        # Parsing a lock of installed plugins costs a fifth of a start, and lists nothing of a Hub.
        return []
    from .trust.loading import records_of_lock

    return records_of_lock()


def _collect(*, forget: bool) -> list[PluginRecord]:
    path = _path_entries()
    cache = DiskCache(path, _SHAPE, forget=forget)
    records = [_record(plugin, cache) for plugin in _scan(path, cache)]
    cache.save()
    return records


def _path_entries() -> list[str]:
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    entries = (entry or here for entry in sys.path if isinstance(entry, str))
    return [entry for entry in dict.fromkeys(entries) if entry]


def _scan(path: list[str], cache: DiskCache) -> list[FoundPlugin]:
    scans: list[PathScan] = []
    remembered = cache.old_part("scans")
    settled = {}
    stamps = []
    for entry in path:
        mtime = _mtime(entry)
        stamps.append([entry, mtime])
        old = remembered.get(entry)
        if old and old[0] == mtime:
            scan = PathScan(old[1], [FoundPlugin(*plugin) for plugin in old[2]])
        elif mtime:
            scan = scan_path(entry)
        else:
            continue
        scans.append(scan)
        if cache.is_settled(mtime):
            settled[entry] = [mtime, scan.dists, [list(plugin) for plugin in scan.plugins]]
    cache.start(stamps, settled)
    return merge(scans)


def _mtime(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _record(plugin: FoundPlugin, cache: DiskCache) -> PluginRecord:
    location = ""
    try:
        location = cache.location(plugin.package)
        stat = _stat(location) if location else None
        if stat is None:
            source = locate(plugin.package)
            location, stat = str(source), _stat(str(source))
            if stat is None:
                return PluginRecord(*plugin, location, _read(source, plugin))
        manifest = _remembered(location, stat, plugin, cache)
        if cache.path_is_settled:
            cache.new["locations"][plugin.package] = location
        return PluginRecord(*plugin, location, manifest)
    except TwinkleError as error:
        return PluginRecord(*plugin, location, None, "broken", str(error), error)


def _stat(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _remembered(location: str, stat: tuple[int, int], plugin: FoundPlugin, cache: DiskCache) -> Manifest:
    key = [*stat, *plugin]
    old = cache.old_part("manifests").get(location)
    if old and old[0] == key:
        cache.new["manifests"][location] = old
        return manifest_from_rows(old[1])
    manifest = _read(location, plugin)
    if cache.is_settled(stat[0]):
        cache.new["manifests"][location] = [key, manifest_to_rows(manifest)]
    return manifest


def _read(source: str | Traversable, plugin: FoundPlugin) -> Manifest:
    from .reading import read_manifest  # not needed where the cache has every manifest

    return read_manifest(source, plugin.dist, plugin.version, package=plugin.package)


def locate(package: str) -> str | Traversable:
    """Return where the manifest of an importable top-level package is; nothing of the package is executed.

    Raises:
        PluginBroken: There is no such package (a stale entry point), or it is a module or a namespace folder.
        ManifestError: The package has no manifest.
    """
    if not package.isidentifier():
        raise PluginBroken(
            f"its entry point of group 'twinkle' must be the name of a top-level package, got {package!r}"
        )
    spec = _find(package)
    if spec is None:
        raise PluginBroken(
            f"package {package!r} cannot be found, its entry point is stale; reinstall or uninstall the distribution"
        )
    if spec.submodule_search_locations is None:
        raise PluginBroken(
            f"{package!r} is a module ({spec.origin}); a plugin must be a package with a {MANIFEST_NAME}"
        )
    folders = list(spec.submodule_search_locations)
    if spec.origin is None or spec.loader is None:
        raise PluginBroken(f"{package!r} is only a namespace folder without __init__.py at {', '.join(folders)}")
    manifest = os.path.join(folders[0], MANIFEST_NAME)
    if os.path.isfile(manifest):
        return manifest
    inside = _inside_archive(spec, package)
    if inside is None:
        raise ManifestError(f"{manifest} is missing; it must list what the plugin offers")
    return inside


def _find(package: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    try:
        return find_spec(package)
    except Exception as error:
        # A third-party finder on sys.meta_path may raise any exception.
        raise PluginBroken(f"package {package!r} cannot be located: {type(error).__name__}: {error}") from error


def _inside_archive(spec: ModuleSpec, package: str) -> Traversable | None:
    get_reader = getattr(spec.loader, "get_resource_reader", None)
    reader = get_reader(package) if get_reader else None
    if reader is None or not hasattr(reader, "files"):
        return None
    manifest: Traversable = reader.files() / MANIFEST_NAME
    return manifest if manifest.is_file() else None


class FoundPlugin(NamedTuple):
    """One entry point: the distribution that has it and the package it names."""

    dist: str
    version: str
    package: str


class PathScan(NamedTuple):
    """The distributions on one entry of sys.path, and the plugins among them."""

    dists: list[str]
    plugins: list[FoundPlugin]


def scan_path(entry: str) -> PathScan:
    """Scan one entry of sys.path; an unreadable entry has no plugins."""
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
    plugins: list[FoundPlugin] = []
    for scan in scans:
        plugins += [plugin for plugin in scan.plugins if canonical(plugin.dist) not in seen]
        seen.update(scan.dists)
    return sorted(set(plugins))


def _plugins_of(folder: str) -> list[FoundPlugin]:
    packages = _packages(_read_text(f"{folder}/entry_points.txt"))
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
    header = (_read_text(f"{folder}/METADATA") or _read_text(f"{folder}/PKG-INFO")).partition("\n\n")[0]
    fields = dict(line.split(": ", 1) for line in header.splitlines() if ": " in line and line[0] not in " \t")
    stem = os.path.basename(folder).rsplit(".", 1)[0]
    name, _, version = stem.partition("-")
    return fields.get("Name", name).strip(), fields.get("Version", version).strip()


def _read_text(path: str) -> str:
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
        packages = [ep.value for ep in dist.entry_points if ep.group == GROUP]
        plugins += [FoundPlugin(name, dist.version, package) for package in packages]
    return PathScan(dists, plugins)
