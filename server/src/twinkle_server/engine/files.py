"""Folders that are there whole or not at all: written beside their place, listed with hashes, synced, renamed.

A published folder is flat: regular files and `manifest.json`, which names each with its SHA-256 and size.
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
"""How names of folders begin that nobody finished; a sweeper removes them."""
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}  # these say nothing about a file
_MANIFEST_BYTES = 16 * 2**20


class Damaged(Exception):
    """A folder is not what was published there; the message says which file differs and how."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a folder.

    Attributes:
        digest: SHA-256 of its manifest, which has those of all files.
        size: bytes of all files, the manifest not counted.
    """

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a manifest: its SHA-256 and bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a published folder says of itself.

    Attributes:
        files: by name.
        facts: whatever its writer said.
        digest: SHA-256 of the manifest as it was read.
    """

    files: Mapping[str, Entry]
    facts: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def publish(folder: Path, write: Callable[[Path], object], facts: Mapping[str, Any] | None = None) -> Published:
    """Write a folder so that it is on the disk whole when this returns, and else not there.

    A folder that an earlier attempt left under the name is replaced.

    Args:
        folder: its place; the folder above is made if needed.
        write: fills an empty folder with regular files, flat.
        facts: what the manifest says beside the files.

    Raises:
        OSError: the disk took no more, or failed; nothing is left under the name.
        ValueError: `write` left something else than regular files.
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
    """Return what a folder says of itself; its files are not read.

    Raises:
        Damaged: there is no manifest, or it cannot be read.
        OSError: this process has no more memory or descriptors.
    """
    try:
        with open_file(folder, MANIFEST) as file:
            data = file.read(_MANIFEST_BYTES)
        said = orjson.loads(data)
        files = {str(name): Entry(str(item["sha256"]), int(item["size"])) for name, item in said["files"].items()}
        version, facts = int(said["format"]), dict(said["facts"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in _PASSING:
            raise
        raise Damaged(f"{folder.name}: {MANIFEST} cannot be read ({type(error).__name__})") from error
    if version != FORMAT:
        raise Damaged(f"{folder.name}: {MANIFEST} has format {version}, and this version reads {FORMAT}")
    return Manifest(files, facts, hashlib.sha256(data).hexdigest())


def verify(folder: Path, digest: str | None = None) -> Manifest:
    """Compare every file of a folder with its manifest.

    Args:
        folder: a published one.
        digest: of its manifest, where that is known.

    Raises:
        Damaged: a file is missing, is no regular file, has other bytes, or is one too many; the message says which.
        OSError: this process has no more memory or descriptors.
    """
    manifest = read_manifest(folder)
    if digest is not None and manifest.digest != digest:
        raise Damaged(f"{folder.name}: {MANIFEST} is not the one that was published")
    for name, entry in manifest.files.items():
        try:
            with open_file(folder, name) as file:
                size, found = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            if error.errno in _PASSING:
                raise
            raise Damaged(f"{folder.name}: {name[:200]!r} cannot be read ({type(error).__name__})") from error
        if (found, size) != (entry.sha256, entry.size):
            raise Damaged(f"{folder.name}: {name!r} has {size} bytes that differ from the {entry.size} published ones")
    if others := {path.name for path in folder.iterdir()} - {*manifest.files, MANIFEST}:
        raise Damaged(f"{folder.name}: {min(others)[:200]!r} is there, and was never published")
    return manifest


def open_file(folder: Path, name: str) -> BufferedReader:
    """Open a file of a folder for reading; neither the folder nor the file may be a symbolic link.

    Raises:
        OSError: it is not there, or is no regular file of this folder.
    """
    if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
        raise FileNotFoundError(f"{name[:200]!r} is not a valid file name")
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)  # a pipe would wait
    finally:
        os.close(above)
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
    """List and sync what was written."""
    entries = {name: _entry(work, name) for name in sorted(path.name for path in work.iterdir())}
    said = {
        "format": FORMAT,
        "files": {name: {"sha256": entry.sha256, "size": entry.size} for name, entry in entries.items()},
        "facts": dict(facts),
    }
    data = orjson.dumps(said, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
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
    """Rename, and undo it if the disk does not take that."""
    reach("files.before_rename")
    work.rename(folder)
    try:
        reach("files.after_rename")
        sync_directory(folder.parent)
    except BaseException:
        folder.rename(work)
        raise


def sync_directory(folder: Path) -> None:
    """Put a directory's names on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_checkpoint(source: Path, target: Path, facts: Mapping[str, Any] | None = None) -> Published:
    """Publish a checkpoint's files a second time, without a second place on the disk where links can be made.

    Args:
        source: a published folder; its files are compared with their hashes.
        target: where the copy goes; not there yet.
        facts: said in the copy's manifest; None takes the source's.

    Raises:
        Damaged: the source is not what was published.
        OSError: the disk took no more.
    """
    manifest = verify(source)

    def write(folder: Path) -> None:
        for name in manifest.files:
            _place(source / name, folder / name)

    return publish(target, write, manifest.facts if facts is None else facts)


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target, follow_symlinks=False)
