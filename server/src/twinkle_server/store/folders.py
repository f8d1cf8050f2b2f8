"""Folders that rows name or have named; upkeep removes no other folder without an operator's command."""

from collections.abc import Collection
from functools import partial
from typing import Final

from sqlalchemy import Connection, Delete, delete, select
from sqlalchemy.dialects import sqlite

from twinkle_server.ports import Database
from twinkle_server.store.tables import folders

_BATCH: Final = 500


def name(connection: Connection, folder: str, now: float) -> None:
    """Record that a row of this transaction names a folder.

    Args:
        connection: of a transaction.
        folder: path relative to the data folder.
        now: UTC seconds.
    """
    connection.execute(sqlite.insert(folders).values(folder=folder, named=now).on_conflict_do_nothing())


async def all_named(database: Database) -> set[str]:
    """Return every recorded folder."""
    return await database.read(lambda connection: set(connection.execute(select(folders.c.folder)).scalars()))


async def forget(database: Database, gone: Collection[str]) -> None:
    """Remove the records of folders that no longer exist."""
    order = sorted(gone)
    for begin in range(0, len(order), _BATCH):
        query = delete(folders).where(folders.c.folder.in_(order[begin : begin + _BATCH]))
        await database.write(partial(_execute, query))


def _execute(query: Delete, connection: Connection) -> None:
    connection.execute(query)
