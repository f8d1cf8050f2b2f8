"""Check that a data folder is served with the base model that its adapters were trained on."""

import asyncio
from pathlib import Path

import structlog
from sqlalchemy import Connection, delete, func, select, union_all, update
from sqlalchemy.dialects import sqlite

from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle_server.errors import StoreError
from twinkle_server.ports import Database
from twinkle_server.store.tables import checkpoints, meta, models, operations, samplers

_log = structlog.get_logger(__name__)


async def check_base(database: Database, name: str, folder: Path, accept: bool = False) -> None:
    """Compare the base model with the one that the adapters under this name were trained on.

    The first start records its fingerprint. If no adapter of this name is left, a new fingerprint replaces it.

    Args:
        database: of the data folder.
        name: name of the model for clients.
        folder: of the model.
        accept: whether to use existing adapters with another model.

    Raises:
        StoreError: the model has changed, and adapters of this name exist; or operations of another model wait.
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
    if waiting := await database.read(lambda connection: _pending_of_others(connection, (name, str(folder)))):
        raise StoreError(
            f"cannot serve {folder} as {name!r}: {waiting} operations of models of another base model have not ended; "
            "serve that model once more under its name, stop the service, and repeat"
        )
    if before != now:
        await database.write(lambda connection: _record(connection, name, now))


async def rename_base(database: Database, name: str, folder: Path) -> int:
    """Give adapters whose base model was named by its path the name that is derived from the path now.

    Earlier versions showed clients the path of a model folder as its name.

    Args:
        database: of the data folder.
        name: name of the model for clients; nothing is done unless it is the last part of `folder`.
        folder: of the model.

    Returns:
        The number of renamed adapters, sampling sessions and checkpoints.
    """
    if name != folder.name:
        return 0
    recorded = await database.read(_names)
    paths = [old for old in recorded if old != name and "/" in old and Path(old).expanduser().absolute() == folder]
    if not paths:
        return 0
    count = await database.write(lambda connection: sum(_rename(connection, old, name) for old in paths))
    _log.warning("the base model is now called by the name of its folder", name=name, renamed=count)
    return count


def _names(connection: Connection) -> list[str]:
    """Return the names under which base models were served."""
    query = select(meta.c.name).where(meta.c.name.startswith("base ", autoescape=True))
    return [str(name).removeprefix("base ") for name in connection.execute(query).scalars()]


def _rename(connection: Connection, old: str, name: str) -> int:
    """Across tenants: rename a base model."""
    value = _recorded(connection, old)
    if value is not None and _recorded(connection, name) is None:
        _record(connection, name, value)
    connection.execute(delete(meta).where(meta.c.name == f"base {old}"))
    tables = (models, samplers, checkpoints)
    return sum(
        connection.execute(update(table).where(table.c.base == old).values(base=name)).rowcount for table in tables
    )


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


def _pending_of_others(connection: Connection, names: tuple[str, ...]) -> int:
    """Across tenants: count operations that have not ended, of models and samplers of other base models."""
    others = [select(table.c.id).where(table.c.base.not_in(names)) for table in (models, samplers)]
    query = select(func.count()).select_from(operations).where(operations.c.status == "pending")
    return int(connection.execute(query.where(operations.c.lane.in_(union_all(*others)))).scalar_one())
