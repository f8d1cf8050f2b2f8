"""Finds installed plugins, and plugins of a hub that the lock lists, without importing them.

Entry points of group `twinkle` on sys.path become records. The scan is 15 times cheaper than importing
`importlib.metadata`, and its result is cached on disk, so that the next process reads one JSON file instead of every
manifest. A problem of one plugin is stored as the status and reason of its record and never raised.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

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
from .settings import CACHE_VARIABLE, HOME_VARIABLE, lock_path
from .validation import check_core

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.resources.abc import Traversable


# This runs at every start, and os.path is ten times faster than pathlib.
# ruff: noqa: PTH103, PTH105, PTH108, PTH111, PTH120, PTH123


FORMAT = 1
SWITCH_VARIABLE = "TWINKLE_CACHE"
MAX_FILES = 64
# A file that was written twice within one tick of the file system's clock shows one mtime; FAT ticks every 2 s.
RACY_NS = 2_000_000_000


class DiskCache:
    """The cached scan of this interpreter and this sys.path.

    `old` is the result of the last process, `new` that of this one; `save` writes `new` if it differs. Both have the
    keys `path` (entries with mtimes), `scans`, `locations` and `manifests`.
    """

    def __init__(self, path: list[str], shape: str, *, forget: bool = False) -> None:
        """Read the result of the last process; `shape` changes with the cached classes, `forget` reads nothing."""
        self.file = _file_for(path, shape)
        self.old = _load(self.file) if self.file and not forget else {}
        self.new: dict[str, Any] = {}
        self.path_is_settled = False
        self._same_path = False
        self._now = time.time_ns()

    def start(self, path: list[list[Any]], scans: dict[str, Any]) -> None:
        """Record the entries of sys.path with their mtimes, and the scans of those with a reliable mtime."""
        self.new = {"path": path, "scans": scans, "locations": {}, "manifests": {}}
        self.path_is_settled = all(self.is_settled(mtime) for _, mtime in path)
        self._same_path = self.old.get("path") == path

    def location(self, package: str) -> str:
        """Return the cached location of a package's manifest, or "" if sys.path has changed since."""
        return self.old_part("locations").get(package, "") if self._same_path else ""

    def old_part(self, name: str) -> dict[str, Any]:
        """Return one part of the result of the last process."""
        part: dict[str, Any] = self.old.get(name, {})
        return part

    def is_settled(self, mtime_ns: int) -> bool:
        """Return whether a later change would show in the mtime, so that the mtime identifies the content."""
        return mtime_ns < self._now - RACY_NS

    def save(self) -> None:
        """Write the result atomically; if two processes race, the last one wins."""
        if self.file and self.new != self.old:
            _store(self.file, self.new)


def _file_for(path: list[str], shape: str) -> str:
    if os.environ.get(SWITCH_VARIABLE) == "0":
        return ""
    folder = os.environ.get(CACHE_VARIABLE) or f"{os.environ.get(HOME_VARIABLE) or '~/.cache'}/twinkle"
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):
        return ""
    key = repr((FORMAT, shape, sys.version, sys.prefix, path))
    return f"{folder}/plugins-{zlib.crc32(key.encode('utf-8', 'replace')):08x}.json"


def _load(file: str) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            # In a shared cache folder another user could plant manifests, and with them code to import.
            if hasattr(os, "getuid") and os.fstat(stream.fileno()).st_uid != os.getuid():
                return {}
            checksum, _, body = stream.read().partition(b"\n")
        if checksum.decode("ascii", "replace") != f"twinkle {FORMAT} {zlib.crc32(body):08x}":
            return {}
        loaded: dict[str, Any] = json.loads(body)
        return loaded
    except (OSError, ValueError):
        return {}


def _store(file: str, content: dict[str, Any]) -> None:
    body = json.dumps(content, separators=(",", ":")).encode()
    folder = os.path.dirname(file)
    temporary = f"{file}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(temporary, "wb") as stream:
            stream.write(f"twinkle {FORMAT} {zlib.crc32(body):08x}\n".encode() + body)
        os.replace(temporary, file)
        _prune(folder)
    except OSError:
        _remove(temporary)


def _prune(folder: str) -> None:
    """Delete all but the newest files: every folder that scripts are started from has its own sys.path."""
    with os.scandir(folder) as entries:
        files = [(e.stat().st_mtime_ns, e.path) for e in entries if e.name.startswith("plugins-")]
    for _, path in sorted(files)[:-MAX_FILES]:
        _remove(path)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        # Another process was faster, or the folder became read-only.
        return


# This runs at every start, and os.path is ten times faster than pathlib.
# ruff: noqa: PTH109, PTH113, PTH116, PTH118, PTH119, PTH123, PTH208


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
    """Return a record of every hub plugin that the lock lists; without a lock, return none and import nothing."""
    try:
        with open(lock_path(), "rb") as file:
            content = file.read()
    except OSError:
        # An invalid lock is reported by the code that needs it; most runs have no lock.
        return []
    if b"[[hub]]" not in content:
        # Parsing a lock takes a fifth of the start-up time; skip it if the lock lists no code of a hub.
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
    from .reading import read_manifest  # deferred: not needed if the cache has every manifest

    return read_manifest(source, plugin.dist, plugin.version, package=plugin.package)


def locate(package: str) -> str | Traversable:
    """Return the location of the manifest of an importable top-level package, without executing the package.

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
    """One entry point: its distribution and the package that it names."""

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
    """Join the scans of all entries. If a distribution occurs twice, the first on sys.path is used, as for imports."""
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
