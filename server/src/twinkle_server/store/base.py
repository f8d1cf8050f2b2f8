"""Check that a data folder is served with the base model that its adapters were trained on."""

import asyncio
from pathlib import Path

from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import sqlite

from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle_server.errors import StoreError
from twinkle_server.ports import Database
from twinkle_server.store.tables import checkpoints, meta, models


async def check_base(database: Database, name: str, folder: Path, accept: bool = False) -> None:
    """Compare the base model with the one that the adapters under this name were trained on.

    The first start records its fingerprint. If no adapter of this name is left, a new fingerprint replaces it.

    Args:
        database: of the data folder.
        name: name of the model for clients.
        folder: of the model.
        accept: whether to use existing adapters with another model.

    Raises:
        StoreError: the model has changed, and adapters of this name exist.
    """
    now = await asyncio.to_thread(_fingerprint, folder)
    before = await database.read(lambda connection: _recorded(connection, name))
    if before is not None and before.split()[0] != now.split()[0] and not accept:
        count = await database.read(lambda connection: _adapters(connection, name))
        if count:
            raise StoreError(
                f"cannot serve {folder} as {name!r}: the {count} adapters and checkpoints of this directory belong to "
                f"a model with the fingerprint {before}, but this model has {now}; restore the model's files, serve "
                "the changed model under another name (--name), or start with --accept-base to use the adapters with it"
            )
    if before != now:
        await database.write(lambda connection: _record(connection, name, now))


def _fingerprint(folder: Path) -> str:
    commit = commit_of(folder)
    return fingerprint(folder) + (f" (commit {commit})" if commit else "")


def _recorded(connection: Connection, name: str) -> str | None:
    value = connection.execute(select(meta.c.value).where(meta.c.name == f"base {name}")).scalar()
    return None if value is None else str(value)


def _record(connection: Connection, name: str, value: str) -> None:
    new = sqlite.insert(meta).values(name=f"base {name}", value=value)
    connection.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": new.excluded.value}))


def _adapters(connection: Connection, name: str) -> int:
    """Across tenants: count checkpoints, and models that are not gone."""
    saved = select(func.count()).where(checkpoints.c.base == name, checkpoints.c.deleted.is_(None))
    alive = select(func.count()).select_from(models).where(models.c.base == name, models.c.status != "gone")
    return int(connection.execute(saved).scalar_one()) + int(connection.execute(alive).scalar_one())
