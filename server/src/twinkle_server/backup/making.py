"""Makes a backup of a data folder, also while its service runs.

The database is copied with SQLite's own backup, which gives the state of one moment. Files that its rows name never
change; only their removal must be prevented: they are linked into a folder of the backup's own first. What the previous
generation has is linked from there.
"""

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from twinkle_server.backup.generations import (
    PARTIAL,
    Listing,
    copy,
    digest_of,
    generations,
    link_or_copy,
    locked,
    name_of,
    remove,
    tidy,
)
from twinkle_server.engine.files import MANIFEST, Damaged, read_manifest, sync_directory
from twinkle_server.errors import StoreError
from twinkle_server.failpoints import reach
from twinkle_server.ids import new_id
from twinkle_server.store import schema
from twinkle_server.store.inspection import DATABASE, PLACES, check_database, damage
from twinkle_server.store.retention import named_paths

KEPT_PLACES: Final = tuple(place for place in PLACES if place != "trash")
_HOLD: Final = ".tmp-backup-"
_BUSY: Final = 30.0  # seconds
Known = tuple[str, int]
"""SHA-256 and size of a file."""


@dataclass(frozen=True, slots=True)
class Made:
    """A finished backup.

    Attributes:
        folder: of the generation.
        listing: its content.
        copied: files that were copied.
        copied_bytes: their size.
        linked: files that the previous generation or an interrupted backup had.
    """

    folder: Path
    listing: Listing
    copied: int
    copied_bytes: int
    linked: int


def backup(data: Path, to: Path, keep: int | None = None, *, compare: bool = False) -> Made:
    """Back up a data folder.

    After a crash, the next call continues with the files that were copied.

    Args:
        data: the data folder; a service may run on it.
        to: the backup folder; it is created if needed.
        keep: number of generations that are kept; None keeps all.
        compare: whether to compare files with those of the previous generation, instead of trusting its list.

    Raises:
        StoreError: the data folder cannot be used, another backup runs, or the disk of the backup is full or failed.
    """
    try:
        return _backup(data, to, keep, compare)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot back up {data} to {to}: {error}; repeat the command, which continues") from error


def _backup(data: Path, to: Path, keep: int | None, compare: bool) -> Made:
    check_database(data)
    if not (data / DATABASE).exists():
        raise StoreError(f"{data} has no {DATABASE}: no service has used it; give the folder of `twinkle serve --data`")
    if to.resolve().is_relative_to(data.resolve()):
        raise StoreError(f"{to} is inside the data folder; choose a folder on another disk for --to")
    with locked(to):
        tidy(to)
        work = to / PARTIAL
        work.mkdir(mode=0o700, exist_ok=True)
        previous = generations(to)[-1:]
        with _held(data) as hold:
            created, paths, missing = _consistent(data, hold, work)
            instance = _instance(work / DATABASE)
            if previous and Listing.read(previous[0]).instance != instance:
                raise StoreError(f"{to} contains backups of another service; choose another folder for --to")
            made = _fill(_Run(hold, work, created, instance), [*paths, "secret"], missing, previous, compare)
        target = name_of(to, created)
        reach("backup.before_rename")
        work.rename(target)
        sync_directory(to)
        for old in generations(to)[: -max(1, keep)] if keep is not None else []:
            remove(old)
    return Made(target, *made)


@contextmanager
def _held(data: Path) -> Iterator[Path]:
    """Make the folder with links that keep files from removal, and remove those of interrupted backups."""
    hold = data / f"{_HOLD}{new_id()}"
    handle = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a service locks the file `lock`, not the folder
        except BlockingIOError as error:
            raise StoreError(f"another backup of {data} is running; wait for it to end") from error
        for left in data.glob(f"{_HOLD}*"):
            shutil.rmtree(left, ignore_errors=True)
        hold.mkdir(mode=0o700)
        yield hold
    finally:
        shutil.rmtree(hold, ignore_errors=True)
        os.close(handle)


def _consistent(data: Path, hold: Path, work: Path) -> tuple[float, list[str], list[str]]:
    """Copy the database, with links to all files that the copy names.

    A file that is created and removed between the links is missing, then everything is repeated for a newer state. A
    file that is missing twice is lost: rows stop naming a file before the service removes it.

    Returns:
        UTC seconds of the copy, the linked paths that it names, and those that are lost.
    """
    lost: set[str] | None = None
    while True:
        _link_all(data, hold)
        reach("backup.before_database")
        created = time.time()
        _copy_database(data / DATABASE, work / DATABASE)
        _link_all(data, hold)
        needed, optional = _named(work / DATABASE)
        missing = {path for path in needed if not (hold / path).exists()}
        if missing <= (lost or set()):
            found = {path for path in needed | optional if (hold / path).exists()}
            return created, sorted(found), sorted(missing)
        lost = missing


def _link_all(data: Path, hold: Path) -> None:
    """Link all files of a data folder that are not linked yet; checkpoints of the trash take their former places."""
    _link(data / "secret", hold / "secret")
    for place in KEPT_PLACES:
        for path in (data / place).iterdir():
            if not path.name.startswith("."):
                _link(path, hold / place / path.name)
    for path in (data / "trash").iterdir():
        _, _, original = path.name.partition("-")
        place, _, name = original.partition("-")
        if place in KEPT_PLACES and name:
            _link(path, hold / place / name)


def _link(source: Path, target: Path) -> None:
    """Link a file, or the files of a flat folder; a source that is removed at this moment is left out."""
    if target.exists():
        return
    target.parent.mkdir(mode=0o700, exist_ok=True)
    part = target.with_name(f".part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if not source.is_dir():
            link_or_copy(source, target)
            return
        part.mkdir(mode=0o700)
        for path in source.iterdir():
            link_or_copy(path, part / path.name)
    except FileNotFoundError:
        return
    if (part / MANIFEST).exists():
        reach("backup.before_hold")
        part.rename(target)  # within the folder of links, which no crash outlives


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database with SQLite's backup, as a file of its own that no service has leased.

    Raises:
        StoreError: the copy is damaged, or of another version than this program's.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    for left in temporary.parent.glob(f"{temporary.name}*"):
        left.unlink()
    address = f"file:{quote(str(source))}?mode=ro"
    with (
        closing(sqlite3.connect(address, uri=True, timeout=_BUSY)) as reader,
        closing(sqlite3.connect(temporary, isolation_level=None)) as writer,
    ):
        reader.backup(writer)  # all pages in one step: writers of the service do not make it begin again
        writer.execute("PRAGMA journal_mode = DELETE").fetchall()
        version = writer.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        if version != schema.VERSIONS[-1]:
            raise StoreError(
                f"the database has version {version!r}, but this program has {schema.VERSIONS[-1]!r}; "
                "use the twinkle-server that serves it"
            )
        writer.execute("UPDATE lease SET released = 1")
    if lines := damage(temporary):
        raise StoreError(f"the copy of {source} is damaged: {lines[0]}; see `twinkle server check`")
    temporary.chmod(0o600)
    temporary.replace(target)  # within a generation that is not complete


def _named(database: Path) -> tuple[set[str], set[str]]:
    with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as raw:
        return named_paths(raw)


@dataclass(frozen=True, slots=True)
class _Run:
    hold: Path
    work: Path
    created: float
    instance: str


def _fill(
    run: _Run, paths: list[str], missing: list[str], previous: list[Path], compare: bool
) -> tuple[Listing, int, int, int]:
    """Copy files into an unfinished generation; return its list, and the numbers of `Made`."""
    hold, work = run.hold, run.work
    before = Listing.read(previous[0]).files if previous else {}
    files = {DATABASE: digest_of(work / DATABASE)}
    damaged = [f"{path}: missing" for path in missing]
    copied = size = linked = 0
    for path in paths:
        source = hold / path
        names = sorted(file.name for file in source.iterdir()) if source.is_dir() else [""]
        for name in names:
            relative, origin = (f"{path}/{name}", source / name) if name else (path, source)
            target = work / relative
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            known = before.get(relative)
            earlier = previous[0] / relative if known else None
            entry = _present(target, origin, earlier, None if compare or path == "secret" else known)
            if entry:
                linked += 1
            else:
                reach("backup.before_copy")
                entry = copy(origin, target)
                copied, size = copied + 1, size + entry[1]
            files[relative] = entry
        damaged += _differences(path, source, {name: files[f"{path}/{name}" if name else path] for name in names})
    _drop_others(work, files)
    listing = Listing(run.created, schema.VERSIONS[-1], run.instance, files, tuple(damaged))
    for folder in {parent for relative in files for parent in (work / relative).parents if parent.is_relative_to(work)}:
        sync_directory(folder)
    reach("backup.before_list")
    listing.write(work)
    return listing, copied, size, linked


def _present(target: Path, origin: Path, earlier: Path | None, known: Known | None) -> Known | None:
    """Return digest and size of a file that an interrupted backup or the previous generation has; None without one.

    Args:
        target: its place in the unfinished generation.
        origin: the file that is backed up.
        earlier: its place in the previous generation.
        known: its digest and size there, which are trusted; None compares the files.
    """
    for path in (target, earlier):
        if path is None or not path.is_file() or path.stat().st_size != origin.stat().st_size:
            continue
        trusted = known if path == earlier else None
        entry = trusted or digest_of(path)
        if trusted or entry == digest_of(origin):
            if path == earlier:
                link_or_copy(path, target)
            return entry
        if path == target:
            target.unlink()
    return None


def _differences(path: str, folder: Path, found: dict[str, tuple[str, int]]) -> list[str]:
    """Compare copied files with their manifest, or with the digest in the name of a payload or result."""
    if "" in found:
        place, _, name = path.partition("/")
        wrong = place in ("payloads", "results") and not name.startswith(found[""][0])
        return [f"{path}: differs from the digest in its name"] if wrong else []
    try:
        manifest = read_manifest(folder)
    except Damaged as error:
        return [str(error)]
    expected = {name: (entry.sha256, entry.size) for name, entry in manifest.files.items()}
    return [
        f"{path}: {name!r} differs from its manifest" for name in sorted(expected) if found.get(name) != expected[name]
    ]


def _drop_others(work: Path, files: dict[str, tuple[str, int]]) -> None:
    """Remove files of an interrupted backup that are not needed any more."""
    for path in sorted(work.rglob("*"), reverse=True):
        relative = path.relative_to(work).as_posix()
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and relative not in files:
            path.unlink()


def _instance(database: Path) -> str:
    with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as raw:
        return str(raw.execute("SELECT value FROM meta WHERE name = 'instance'").fetchone()[0])
