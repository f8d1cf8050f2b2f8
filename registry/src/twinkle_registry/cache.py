"""Caches the result of a scan on disk, so that the next process reads one JSON file instead of every manifest.

No function fails: an absent, corrupt, foreign or unwritable cache file is ignored.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from typing import Any

# This runs at every start, and os.path takes a tenth of pathlib's time.
# ruff: noqa: PTH103, PTH105, PTH108, PTH111, PTH120, PTH123


FORMAT = 1
DIRECTORY_VARIABLE = "TWINKLE_CACHE_DIR"
HOME_VARIABLE = "XDG_CACHE_HOME"
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
        """Return where the manifest of a package was; any change of sys.path may have moved it."""
        return self.old_part("locations").get(package, "") if self._same_path else ""

    def old_part(self, name: str) -> dict[str, Any]:
        """Return one part of the result of the last process."""
        part: dict[str, Any] = self.old.get(name, {})
        return part

    def is_settled(self, mtime_ns: int) -> bool:
        """Return whether a later change would show in the mtime, so that the mtime identifies the content."""
        return mtime_ns < self._now - RACY_NS

    def save(self) -> None:
        """Write the result atomically; of two processes that race, the file of one remains."""
        if self.file and self.new != self.old:
            _store(self.file, self.new)


def _file_for(path: list[str], shape: str) -> str:
    if os.environ.get(SWITCH_VARIABLE) == "0":
        return ""
    folder = os.environ.get(DIRECTORY_VARIABLE) or f"{os.environ.get(HOME_VARIABLE) or '~/.cache'}/twinkle"
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
