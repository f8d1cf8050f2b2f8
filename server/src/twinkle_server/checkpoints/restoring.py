"""Brings a removed checkpoint back: its folder out of the trash, and its row."""

import asyncio
import time
from functools import partial

from sqlalchemy import Connection, Row, select, update

from twinkle_server.checkpoints.trash import Entry, Trash
from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.store.opening import Store
from twinkle_server.store.tables import checkpoints


async def restore(store: Store, what: str) -> str:
    """Restore an entry of the trash.

    A crash on the way leaves the folder in its place without its row; the same call finishes the work.

    Args:
        store: an open data directory.
        what: name of the entry, or where it was (`checkpoints/<id>`).

    Returns:
        The path of the checkpoint, or the folder of something that was none.

    Raises:
        NotFound: the trash has no such entry.
        BadRequest: a checkpoint of the same path was saved since, or something is in the folder's place.
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
    """Across tenants: return the row of a checkpoint that was deleted."""
    query = select(checkpoints).where(checkpoints.c.folder == folder, checkpoints.c.deleted.is_not(None))
    return connection.execute(query.order_by(checkpoints.c.id.desc()).limit(1)).one_or_none()


def _check_free(connection: Connection, row: Row[tuple[object, ...]]) -> None:
    """Across tenants: refuse to restore a checkpoint whose path another one has."""
    found = row._mapping
    query = select(checkpoints.c.id, checkpoints.c.expires).where(
        checkpoints.c.run == found["run"],
        checkpoints.c.kind == found["kind"],
        checkpoints.c.name == found["name"],
        checkpoints.c.deleted.is_(None),
    )
    if connection.execute(query).first() is not None:
        raise BadRequest(f"cannot restore {path_of(row)}: a newer checkpoint has this path; delete it first")


def _undelete(connection: Connection, row: Row[tuple[object, ...]]) -> str:
    """Across tenants: let a checkpoint be there again, without a time at which it expires."""
    _check_free(connection, row)
    query = update(checkpoints).where(checkpoints.c.id == row._mapping["id"])
    connection.execute(query.values(deleted=None, expires=None))
    return path_of(row)


def path_of(row: Row[tuple[object, ...]]) -> str:
    """Return the path of a checkpoint's row."""
    found = row._mapping
    return str(CheckpointPath(str(found["run"]), str(found["kind"]), str(found["name"])))


async def described(store: Store) -> list[dict[str, object]]:
    """Return the entries of the trash, each with the checkpoint that it was."""
    entries = await asyncio.to_thread(lambda: list(Trash(store.data).entries()))
    now = time.time()
    said = []
    for entry in entries:
        row = await store.database.read(partial(_deleted, folder=entry.folder))
        said.append(
            {
                "name": entry.name,
                "folder": entry.folder,
                "checkpoint": None if row is None else path_of(row),
                "tenant": None if row is None else row._mapping["tenant"],
                "bytes": entry.size,
                "emptied_in_seconds": max(0, round(entry.until - now)),
            }
        )
    return said
