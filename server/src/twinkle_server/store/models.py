"""Models. The functions run in a caller's transaction (`in_transaction`); the class has its own transactions."""

from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update

from twinkle_server.errors import NotFound, SequenceConflict
from twinkle_server.operations import Snapshot
from twinkle_server.ports import Database
from twinkle_server.store import rows, sessions
from twinkle_server.store.records import EMBEDS, Model, ModelStatus, Page
from twinkle_server.store.tables import models, operations

_GET = select(models).where(models.c.tenant == bindparam("owner"), models.c.id == bindparam("name"))
"""Built once: every request that submits an operation runs it."""


def add(connection: Connection, model: Model) -> None:
    """Add a model.

    Raises:
        NotFound: the tenant has no such session.
        Gone: the session has ended.
        SequenceConflict: the number is used by another model.
    """
    sessions.check_active(connection, model.tenant, model.session)
    taken = select(models.c.id).where(models.c.tenant == model.tenant, models.c.id == model.id)
    if connection.execute(taken).scalar() is not None:
        raise SequenceConflict(f"model {model.number} of this session already exists; use the next number")
    connection.execute(insert(models).values(rows.values(models, model)))


def set_status(
    connection: Connection, tenant: str, model: str, status: ModelStatus, now: float, reason: str | None = None
) -> None:
    """Set the status of a model; "detached" and "corrupted" record the time, and "gone" drops its snapshot.

    The number of the snapshot is kept, because it tells which operations have ended.

    Raises:
        NotFound: the tenant has no such model.
    """
    changes: dict[str, Any] = {"status": status, "reason": reason, "detached": None}
    if status in ("detached", "corrupted"):
        changes["detached"] = now
    if status == "gone":
        changes |= {"snapshot_folder": None, "snapshot_digest": None, "snapshot_size": None}
    query = update(models).where(models.c.tenant == tenant, models.c.id == model)
    if not connection.execute(query.values(changes)).rowcount:
        raise NotFound(f"model {model[:120]!r} does not exist")


def mark_embedding(connection: Connection, tenant: str, model: str) -> None:
    """Note in the metadata of a model that it was trained for embeddings; a `task` that its client has set stays.

    Raises:
        NotFound: the tenant has no such model.
    """
    metadata = get(connection, tenant, model).metadata or {}
    if not metadata.keys() & EMBEDS.keys():
        query = update(models).where(models.c.tenant == tenant, models.c.id == model)
        connection.execute(query.values(metadata={**metadata, **EMBEDS}))


def get(connection: Connection, tenant: str, model: str) -> Model:
    """Return a model of any status.

    Raises:
        NotFound: the tenant has no such model.
    """
    row = connection.execute(_GET, {"owner": tenant, "name": model}).one_or_none()
    if row is None:
        raise NotFound(f"model {model[:120]!r} does not exist")
    return record_of(row)


class Models:
    """The table of models."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, tenant: str, model: str) -> Model:
        """Return a model of any status.

        Raises:
            NotFound: the tenant has no such model.
        """
        return await self._database.read(lambda connection: get(connection, tenant, model))

    async def set_status(
        self, tenant: str, model: str, status: ModelStatus, now: float, reason: str | None = None
    ) -> None:
        """See the function of this name."""
        await self._database.write(lambda connection: set_status(connection, tenant, model, status, now, reason))

    async def of_session(self, tenant: str, session: str) -> list[Model]:
        """Return a session's models, by number."""
        query = select(models).where(models.c.tenant == tenant, models.c.session == session)
        return await self._database.read(
            lambda connection: [record_of(row) for row in connection.execute(query.order_by(models.c.number))]
        )

    async def page(self, tenant: str, limit: int, offset: int, project: str | None = None) -> Page[Model]:
        """Return a tenant's models, newest first."""
        where = [models.c.tenant == tenant] + ([models.c.project == project] if project is not None else [])

        def work(connection: Connection) -> Page[Model]:
            total = connection.execute(select(func.count()).select_from(models).where(*where)).scalar_one()
            query = rows.newest_first(select(models).where(*where), models)
            page = connection.execute(query.limit(max(limit, 0)).offset(max(offset, 0)))
            return Page([record_of(row) for row in page], total)

        return await self._database.read(work)

    async def count(self, tenant: str) -> int:
        """Return the number of a tenant's models that use memory or are being created."""
        query = select(func.count()).where(models.c.tenant == tenant, models.c.status.in_(("creating", "live")))
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))

    async def with_status(self, *statuses: ModelStatus, before: float | None = None) -> list[Model]:
        """Across tenants: return models by status, optionally only those detached before a time."""
        query = select(models).where(models.c.status.in_(statuses))
        query = query if before is None else query.where(models.c.detached < before)
        return await self._database.read(
            lambda connection: [record_of(row) for row in connection.execute(query.order_by(models.c.created))]
        )

    async def retry_corrupted(self, now: float) -> int:
        """Across tenants: mark corrupted models as detached, to restore them again; return their number."""
        query = update(models).where(models.c.status == "corrupted")
        since = func.coalesce(models.c.detached, now)
        changed = query.values(status="detached", reason=None, detached=since)
        return await self._database.write(lambda connection: connection.execute(changed).rowcount)

    async def end_failed_creations(self) -> int:
        """Across tenants: mark models whose creation failed as gone; return their number."""
        failed = operations.c.status.in_(("failed", "cancelled"))
        creation = select(operations.c.id).where(operations.c.lane == models.c.id, operations.c.number == 0, failed)
        query = update(models).where(models.c.status == "creating", creation.exists())
        changed = query.values(status="gone", reason="its creation failed")
        return await self._database.write(lambda connection: connection.execute(changed).rowcount)

    async def gone(self, tenant: str, model: str, now: float, reason: str) -> list[str]:
        """Mark a model as gone, and return the folder of its snapshot, which is no longer needed.

        Raises:
            NotFound: the tenant has no such model.
        """

        def work(connection: Connection) -> list[str]:
            snapshot = get(connection, tenant, model).snapshot
            set_status(connection, tenant, model, "gone", now, reason)
            return [snapshot.folder] if snapshot else []

        return await self._database.write(work)


def record_of(row: Row[Any]) -> Model:
    """Return the model of a row."""
    model = rows.record(Model, row)
    if row.snapshot_folder is not None:
        model.snapshot = Snapshot(
            row.id, row.snapshot_number, row.snapshot_folder, row.snapshot_digest, row.snapshot_size
        )
    return model
