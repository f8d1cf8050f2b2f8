"""Atomic publication of folders: written beside their place, listed with hashes, synced, and renamed.

A published folder is flat: regular files and `manifest.json`, which lists the SHA-256 and size of each file.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from twinkle_server.failpoints import reach
from twinkle_server.ids import new_id

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished folders, which a sweeper removes."""
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}  # not the fault of a file
_MANIFEST_BYTES = 16 * 2**20


class Damaged(Exception):
    """A folder differs from what was published; the message names the file and the difference."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published folder.

    Attributes:
        digest: SHA-256 of its manifest, which contains the hashes of all files.
        size: bytes of all files without the manifest.
    """

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a manifest: SHA-256 and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a published folder.

    Attributes:
        files: entries by file name.
        facts: additional data of the writer.
        digest: SHA-256 of the manifest file.
    """

    files: Mapping[str, Entry]
    facts: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def publish(folder: Path, write: Callable[[Path], object], facts: Mapping[str, Any] | None = None) -> Published:
    """Write a folder atomically: when this returns, it is on disk as a whole; after an error, it does not exist.

    An existing folder of this name is replaced.

    Args:
        folder: its path; the parent folder is created if needed.
        write: fills an empty folder with regular files.
        facts: additional data for the manifest.

    Raises:
        OSError: the disk is full or failed.
        ValueError: `write` created something other than regular files.
    """
    _make_parent(folder)
    work, aside = (folder.with_name(TEMPORARY + new_id()) for _ in range(2))
    work.mkdir(mode=0o700)
    try:
        reach("files.before_write")
        write(work)
        published = _seal(work, facts or {})
        if os.path.lexists(folder):
            folder.rename(aside)
        _put(work, folder)
    finally:
        for left in (work, aside):
            shutil.rmtree(left, ignore_errors=True)
    reach("files.after_publish")
    return published


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; the files are not read.

    Raises:
        Damaged: the manifest is missing or cannot be read.
        OSError: this process is out of memory or file descriptors.
    """
    try:
        with open_file(folder, MANIFEST) as file:
            data = file.read(_MANIFEST_BYTES)
        content = orjson.loads(data)
        files = {str(name): Entry(str(item["sha256"]), int(item["size"])) for name, item in content["files"].items()}
        version, facts = int(content["format"]), dict(content["facts"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in _PASSING:
            raise
        raise Damaged(f"{folder.name}: {MANIFEST} cannot be read ({type(error).__name__})") from error
    if version != FORMAT:
        raise Damaged(f"{folder.name}: {MANIFEST} must have format {FORMAT}, got {version}")
    return Manifest(files, facts, hashlib.sha256(data).hexdigest())


def verify(folder: Path, digest: str | None = None) -> Manifest:
    """Compare every file of a folder with its manifest.

    Args:
        folder: a published folder.
        digest: expected SHA-256 of the manifest; None skips this check.

    Raises:
        Damaged: a file is missing, changed, unlisted, or not a regular file; the message names it.
        OSError: this process is out of memory or file descriptors.
    """
    manifest = read_manifest(folder)
    if digest is not None and manifest.digest != digest:
        raise Damaged(f"{folder.name}: {MANIFEST} differs from the published one")
    for name, entry in manifest.files.items():
        try:
            with open_file(folder, name) as file:
                size, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            if error.errno in _PASSING:
                raise
            raise Damaged(f"{folder.name}: {name[:200]!r} cannot be read ({type(error).__name__})") from error
        if size != entry.size:
            raise Damaged(f"{folder.name}: {name!r} has {size} bytes, and {entry.size} in {MANIFEST}")
        if sha256 != entry.sha256:
            raise Damaged(f"{folder.name}: the content of {name!r} has changed (same size, other SHA-256)")
    if others := {path.name for path in folder.iterdir()} - {*manifest.files, MANIFEST}:
        raise Damaged(f"{folder.name}: {min(others)[:200]!r} was not published")
    return manifest


def open_file(folder: Path, name: str) -> BufferedReader:
    """Open a file of a folder for reading; neither the folder nor the file may be a symbolic link.

    Raises:
        OSError: the file does not exist, or is not a regular file of this folder.
    """
    if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
        raise FileNotFoundError(f"{name[:200]!r} is not a valid file name")
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)  # a FIFO would block
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(f"{name!r} is not a regular file")
    return os.fdopen(handle, "rb")


def _make_parent(folder: Path) -> None:
    parent = folder.parent
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync_directory(parent.parent)


def _seal(work: Path, facts: Mapping[str, Any]) -> Published:
    """Write the manifest, and sync all files."""
    entries = {name: _entry(work, name) for name in sorted(path.name for path in work.iterdir())}
    content = {
        "format": FORMAT,
        "files": {name: {"sha256": entry.sha256, "size": entry.size} for name, entry in entries.items()},
        "facts": dict(facts),
    }
    data = orjson.dumps(content, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
    reach("files.before_manifest")
    with (work / MANIFEST).open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(work)
    return Published(hashlib.sha256(data).hexdigest(), sum(entry.size for entry in entries.values()))


def _entry(work: Path, name: str) -> Entry:
    if name == MANIFEST:
        raise ValueError(f"{MANIFEST} is written by publish; the callback must not write it")
    if not stat.S_ISREG((work / name).lstat().st_mode):
        raise ValueError(f"{name!r} is not a regular file; a published folder must be flat")
    with open_file(work, name) as file:
        entry = Entry(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)
        os.fsync(file.fileno())
    return entry


def _put(work: Path, folder: Path) -> None:
    """Rename a folder, and undo that if it cannot be synced."""
    reach("files.before_rename")
    work.rename(folder)
    try:
        reach("files.after_rename")
        sync_directory(folder.parent)
    except BaseException:
        folder.rename(work)
        raise


def sync_directory(folder: Path) -> None:
    """Sync a directory to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_checkpoint(source: Path, target: Path, facts: Mapping[str, Any] | None = None) -> Published:
    """Publish a copy of a checkpoint, with hard links where the file system has them.

    Args:
        source: a published folder; its files are verified.
        target: path of the copy; must not exist.
        facts: additional data for the manifest of the copy; None copies those of the source.

    Raises:
        Damaged: the source differs from what was published.
        OSError: the disk is full or failed.
    """
    manifest = verify(source)

    def write(folder: Path) -> None:
        for name in manifest.files:
            _place(source / name, folder / name)

    return publish(target, write, manifest.facts if facts is None else facts)


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target, follow_symlinks=False)
