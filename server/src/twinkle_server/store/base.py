"""Which base model the adapters of a data directory belong to, so that a changed one is noticed before it is served."""

import asyncio
from pathlib import Path

from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import sqlite

from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle_server.errors import StoreError
from twinkle_server.ports import Database
from twinkle_server.store.tables import checkpoints, meta, models


async def check_base(database: Database, name: str, folder: Path, accept: bool = False) -> None:
    """Compare the model that is about to be served with the one that adapters of this name were trained on.

    The first start records its fingerprint. Where no adapter of the name is left, a new one takes its place.

    Args:
        database: of the data directory.
        name: by which clients call the model.
        folder: of the model.
        accept: serve another model than before with the same adapters.

    Raises:
        StoreError: the model is another one, and adapters of the name are there.
    """
    now = await asyncio.to_thread(_described, folder)
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


def _described(folder: Path) -> str:
    commit = commit_of(folder)
    return fingerprint(folder) + (f" (commit {commit})" if commit else "")


def _recorded(connection: Connection, name: str) -> str | None:
    found = connection.execute(select(meta.c.value).where(meta.c.name == f"base {name}")).scalar()
    return None if found is None else str(found)


def _record(connection: Connection, name: str, value: str) -> None:
    new = sqlite.insert(meta).values(name=f"base {name}", value=value)
    connection.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": new.excluded.value}))


def _adapters(connection: Connection, name: str) -> int:
    """Across tenants: count models that can be trained on, and checkpoints."""
    saved = select(func.count()).where(checkpoints.c.base == name, checkpoints.c.deleted.is_(None))
    alive = select(func.count()).select_from(models).where(models.c.base == name, models.c.status != "gone")
    return int(connection.execute(saved).scalar_one()) + int(connection.execute(alive).scalar_one())
