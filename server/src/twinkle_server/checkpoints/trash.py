"""The trash of a data folder, with data removed by upkeep or an operator until it expires or is restored.

An entry is `trash/<time>-<place>-<name>`: its expiry (UTC seconds), and its original place. It is moved and restored by
a single rename, so that a crash leaves it complete in one of both places.
"""

import asyncio
import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Row, select, update

from twinkle_server.engine.files import TEMPORARY, sync_directory
from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.failpoints import reach
from twinkle_server.ids import CheckpointPath, new_id
from twinkle_server.store.opening import Store
from twinkle_server.store.tables import checkpoints

FOLDER: Final = "trash"
PLACES: Final = ("checkpoints", "snapshots", "payloads", "results")
_NAME: Final = re.compile(rf"(\d+)-({'|'.join(PLACES)})-(.+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the trash.

    Attributes:
        name: of the entry.
        folder: its original place, relative to the data folder.
        until: its expiry in UTC seconds.
        size: in bytes.
    """

    name: str
    folder: str
    until: float
    size: int


class Trash:
    """The trash of a data folder.

    Args:
        data: the directory.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / FOLDER

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in the order of their expiry."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._folder))
        except FileNotFoundError:
            return
        for name in sorted(names, key=_until):
            match = _NAME.fullmatch(name)
            size = size_of(self._folder / name)
            if match is not None and size is not None:
                yield Entry(name, f"{match[2]}/{match[3]}", float(match[1]), size)

    def put(self, path: Path, until: float) -> int | None:
        """Move a folder or file of the data folder into the trash.

        Args:
            path: `<data>/<place>/<name>`; a symbolic link is moved, not followed.
            until: its expiry in UTC seconds.

        Returns:
            Its size in bytes; None if it no longer exists, or was replaced meanwhile, in which case it stays.
        """
        moment = int(until)
        while os.path.lexists(target := self._folder / f"{moment}-{path.parent.name}-{path.name}"):
            moment += 1
        try:
            before = path.lstat()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            reach("trash.before_put")
            path.rename(target)
            if target.lstat().st_ino != before.st_ino:
                target.rename(path)
                return None
        except FileNotFoundError:
            return None
        self._sync(path.parent)
        return size_of(target)

    def put_back(self, entry: Entry) -> bool:
        """Restore an entry to its original place; return False if the place is taken or the entry no longer exists."""
        place = self._data / entry.folder
        if os.path.lexists(place):
            return False
        reach("trash.before_put_back")
        try:
            os.utime(self._folder / entry.name, follow_symlinks=False)  # a sweep ignores recently changed folders
            (self._folder / entry.name).rename(place)
        except FileNotFoundError:
            return False
        self._sync(place.parent)
        return True

    def remove(self, entry: Entry) -> bool:
        """Remove an entry permanently; return False if it no longer exists."""
        aside = self._folder / (TEMPORARY + new_id())
        reach("trash.before_remove")
        try:
            (self._folder / entry.name).rename(aside)
        except FileNotFoundError:
            return False
        _erase(aside)
        return True

    def finish(self) -> None:
        """Finish removals that a crash interrupted."""
        for path in self._folder.glob(f"{TEMPORARY}*"):
            _erase(path)

    def _sync(self, place: Path) -> None:
        sync_directory(self._folder)
        sync_directory(place)


def size_of(path: Path) -> int | None:
    """Return the size of a file, or of the files of a flat folder; None if it no longer exists."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except FileNotFoundError:
        return None


def _until(name: str) -> tuple[int, str]:
    digits = name.partition("-")[0]
    return (int(digits) if digits.isdecimal() else 0, name)


def _erase(path: Path) -> None:
    """Remove a file or folder; another process may remove it at the same time."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


async def restore(store: Store, what: str) -> str:
    """Restore an entry of the trash.

    After a crash between moving the folder and updating its row, the same call finishes the work.

    Args:
        store: an open data folder.
        what: name of the entry, or its original place (`checkpoints/<id>`).

    Returns:
        The path of the checkpoint, or the folder of other data.

    Raises:
        NotFound: the trash has no such entry.
        BadRequest: a newer checkpoint has the same path, or the original place is taken.
    """
    trash = Trash(store.data)
    entry = await asyncio.to_thread(_find, trash, what)
    folder = entry.folder if entry is not None else what
    row = await store.database.read(lambda connection: _deleted(connection, folder))
    if entry is None and (row is None or not (store.data / folder).is_dir()):
        raise NotFound(f"no entry {what!r} in the trash; `twinkle server trash list` shows the entries")
    if row is not None:
        await store.database.read(lambda connection: _check_free(connection, row))
    if entry is not None and not await asyncio.to_thread(trash.put_back, entry):
        raise BadRequest(f"cannot restore {folder}: the destination exists, or the entry was removed from the trash")
    if row is None:
        return folder
    return await store.database.write(lambda connection: _undelete(connection, row))


def _find(trash: Trash, what: str) -> Entry | None:
    return next((entry for entry in trash.entries() if what in (entry.name, entry.folder)), None)


def _deleted(connection: Connection, folder: str) -> Row[tuple[object, ...]] | None:
    """Across tenants: return the row of a deleted checkpoint."""
    query = select(checkpoints).where(checkpoints.c.folder == folder, checkpoints.c.deleted.is_not(None))
    return connection.execute(query.order_by(checkpoints.c.id.desc()).limit(1)).one_or_none()


def _check_free(connection: Connection, row: Row[tuple[object, ...]]) -> None:
    """Across tenants: refuse to restore a checkpoint whose path is used by another."""
    fields = row._mapping
    query = select(checkpoints.c.id, checkpoints.c.expires).where(
        checkpoints.c.run == fields["run"],
        checkpoints.c.kind == fields["kind"],
        checkpoints.c.name == fields["name"],
        checkpoints.c.deleted.is_(None),
    )
    if connection.execute(query).first() is not None:
        raise BadRequest(f"cannot restore {path_of(row)}: a newer checkpoint has this path; delete it first")


def _undelete(connection: Connection, row: Row[tuple[object, ...]]) -> str:
    """Across tenants: mark a checkpoint as existing again, without expiry."""
    _check_free(connection, row)
    query = update(checkpoints).where(checkpoints.c.id == row._mapping["id"])
    connection.execute(query.values(deleted=None, expires=None))
    return path_of(row)


def path_of(row: Row[tuple[object, ...]]) -> str:
    """Return the path of a checkpoint's row."""
    fields = row._mapping
    return str(CheckpointPath(str(fields["run"]), str(fields["kind"]), str(fields["name"])))


async def describe_entries(store: Store) -> list[dict[str, object]]:
    """Return the entries of the trash with the checkpoints that they belonged to."""
    entries = await asyncio.to_thread(lambda: list(Trash(store.data).entries()))
    now = time.time()
    entries_with_checkpoints = []
    for entry in entries:
        row = await store.database.read(partial(_deleted, folder=entry.folder))
        entries_with_checkpoints.append(
            {
                "name": entry.name,
                "folder": entry.folder,
                "checkpoint": None if row is None else path_of(row),
                "tenant": None if row is None else row._mapping["tenant"],
                "bytes": entry.size,
                "emptied_in_seconds": max(0, round(entry.until - now)),
            }
        )
    return entries_with_checkpoints
