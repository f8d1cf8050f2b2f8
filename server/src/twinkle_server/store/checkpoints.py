"""Checkpoints. The functions run in a caller's transaction (`in_transaction`); the class has its own transactions.

An expired checkpoint does not exist for clients, even before its row is marked as deleted. Rows of deleted or replaced
checkpoints are kept for a while, and their folders until nothing refers to them (see `retention`).
"""

from sqlalchemy import ColumnElement, Connection, Update, and_, func, insert, or_, select, update

from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.ports import Database
from twinkle_server.store import folders, rows
from twinkle_server.store.records import Checkpoint, Page
from twinkle_server.store.tables import checkpoints, models


def add(connection: Connection, checkpoint: Checkpoint, overwrite: bool = False) -> str | None:
    """Add a checkpoint.

    Args:
        connection: of a transaction.
        checkpoint: its `created` is the time at which others are checked for expiry.
        overwrite: whether to replace a checkpoint of the same path.

    Returns:
        Folder of the replaced checkpoint.

    Raises:
        BadRequest: a checkpoint of this path exists, and `overwrite` is False.
    """
    path = checkpoint.path
    query = select(checkpoints).where(checkpoints.c.tenant == checkpoint.tenant, _at(path))
    row = connection.execute(query).one_or_none()
    if row is not None:
        expired = row.expires is not None and row.expires <= checkpoint.created
        if not overwrite and not expired:
            raise BadRequest(f"checkpoint {path} already exists; save under another name, or with overwrite=True")
        _delete(connection, checkpoint.tenant, checkpoints.c.id == row.id, checkpoint.created)
    connection.execute(insert(checkpoints).values({**rows.values(checkpoints, checkpoint), "id": None}))
    folders.name(connection, checkpoint.folder, checkpoint.created)
    return None if row is None else str(row.folder)


def get(connection: Connection, tenant: str, path: CheckpointPath, now: float, public: bool = False) -> Checkpoint:
    """Return a checkpoint.

    Args:
        connection: of a transaction.
        tenant: the caller.
        path: of the checkpoint.
        now: UTC seconds.
        public: whether to find published checkpoints of other tenants, too.

    Raises:
        NotFound: it does not exist for this tenant.
    """
    own = checkpoints.c.tenant == tenant
    visible = or_(own, checkpoints.c.public) if public else own
    row = connection.execute(select(checkpoints).where(visible, _at(path), _exists(now))).one_or_none()
    if row is None:
        raise NotFound(f"checkpoint {path} does not exist")
    return rows.record(Checkpoint, row)


class Checkpoints:
    """The table of checkpoints."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, checkpoint: Checkpoint, overwrite: bool = False) -> str | None:
        """See `add`."""
        return await self._database.write(lambda connection: add(connection, checkpoint, overwrite))

    async def get(self, tenant: str, path: CheckpointPath, now: float) -> Checkpoint:
        """Return a tenant's checkpoint.

        Raises:
            NotFound: the tenant has no such checkpoint.
        """
        return await self._database.read(lambda connection: get(connection, tenant, path, now))

    async def any_tenant(self, path: CheckpointPath) -> Checkpoint:
        """Across tenants: return a checkpoint by its path, for the operator.

        Raises:
            NotFound: it does not exist.
        """

        def work(connection: Connection) -> Checkpoint:
            row = connection.execute(
                select(checkpoints).where(_at(path), checkpoints.c.deleted.is_(None))
            ).one_or_none()
            if row is None:
                raise NotFound(f"checkpoint {path} does not exist")
            return rows.record(Checkpoint, row)

        return await self._database.read(work)

    async def find(self, tenant: str, path: CheckpointPath, now: float) -> Checkpoint:
        """Return a checkpoint that a tenant may load: its own, or a published one.

        Raises:
            NotFound: it does not exist for this tenant.
        """
        return await self._database.read(lambda connection: get(connection, tenant, path, now, public=True))

    async def page(
        self,
        tenant: str,
        now: float,
        limit: int = 100,
        offset: int = 0,
        run: str | None = None,
        project: str | None = None,
    ) -> Page[Checkpoint]:
        """Return a tenant's checkpoints, newest first, optionally of one run or project."""
        where = [checkpoints.c.tenant == tenant, _exists(now)]
        where += [checkpoints.c.run == run] if run is not None else []
        where += [checkpoints.c.project == project] if project is not None else []
        return await self._database.read(
            lambda connection: rows.page(connection, Checkpoint, checkpoints, where, limit, offset)
        )

    async def latest(self, tenant: str, runs: list[str], now: float) -> dict[tuple[str, str], Checkpoint]:
        """Return the newest checkpoint of each kind of the given runs, by (run, kind)."""
        query = select(checkpoints).where(checkpoints.c.tenant == tenant, checkpoints.c.run.in_(runs), _exists(now))
        ordered = query.order_by(checkpoints.c.created, checkpoints.c.id)
        return await self._database.read(
            lambda connection: {
                (row.run, row.kind): rows.record(Checkpoint, row) for row in connection.execute(ordered)
            }
        )

    async def delete(self, tenant: str, path: CheckpointPath, now: float) -> str:
        """Delete a checkpoint, and return its folder.

        Raises:
            NotFound: the tenant has no such checkpoint.
        """

        def work(connection: Connection) -> str:
            checkpoint = get(connection, tenant, path, now)
            _delete(connection, tenant, checkpoints.c.id == checkpoint.id, now)
            return checkpoint.folder

        return await self._database.write(work)

    async def set_expiry(self, tenant: str, path: CheckpointPath, now: float, expires: float | None) -> None:
        """Set the time at which a checkpoint expires; None is never.

        Raises:
            NotFound: the tenant has no such checkpoint.
        """
        await self._change(path, now, _of(tenant).values(expires=expires))

    async def publish(self, tenant: str, path: CheckpointPath, now: float, public: bool) -> None:
        """Publish a checkpoint for all tenants, or make it private again.

        Raises:
            NotFound: the tenant has no such checkpoint.
        """
        await self._change(path, now, _of(tenant).values(public=public))

    async def _change(self, path: CheckpointPath, now: float, query: Update) -> None:
        """Update a row; the query contains the tenant (`_of`)."""
        where = query.where(_at(path), _exists(now))
        if not await self._database.write(lambda connection: connection.execute(where).rowcount):
            raise NotFound(f"checkpoint {path} does not exist")

    async def bytes(self, tenant: str, now: float, project: str | None = None) -> int:
        """Return the size of a tenant's checkpoints in bytes, optionally of one project."""
        query = select(func.coalesce(func.sum(checkpoints.c.size), 0)).where(
            checkpoints.c.tenant == tenant, _exists(now)
        )
        if project is not None:
            query = query.where(checkpoints.c.project == project)
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))

    async def of_sessions(self, tenant: str, sessions: list[str], now: float) -> dict[str, tuple[int, int]]:
        """Return number and bytes of the checkpoints of sessions; sessions without checkpoints are omitted."""
        query = (
            select(models.c.session, func.count(), func.sum(checkpoints.c.size))
            .join(models, and_(models.c.id == checkpoints.c.run, models.c.tenant == checkpoints.c.tenant))
            .where(checkpoints.c.tenant == tenant, models.c.session.in_(sessions), _exists(now))
            .group_by(models.c.session)
        )
        return await self._database.read(
            lambda connection: {row[0]: (int(row[1]), int(row[2])) for row in connection.execute(query)}
        )

    async def surplus(self, tenant: str, run: str, kind: str, keep: int, now: float) -> list[Checkpoint]:
        """Delete all but the `keep` newest checkpoints of a run and kind, and return those deleted."""
        query = select(checkpoints).where(
            checkpoints.c.tenant == tenant, checkpoints.c.run == run, checkpoints.c.kind == kind, _exists(now)
        )

        def work(connection: Connection) -> list[Checkpoint]:
            old = connection.execute(rows.newest_first(query, checkpoints).offset(max(keep, 0)).limit(-1))
            deleted = [rows.record(Checkpoint, row) for row in old]
            _delete(connection, tenant, checkpoints.c.id.in_([row.id for row in deleted]), now)
            return deleted

        return await self._database.write(work)

    async def expire(self, now: float) -> list[Checkpoint]:
        """Across tenants: mark expired checkpoints as deleted, and return them."""
        due = (checkpoints.c.deleted.is_(None), checkpoints.c.expires <= now)

        def work(connection: Connection) -> list[Checkpoint]:
            expired = [rows.record(Checkpoint, row) for row in connection.execute(select(checkpoints).where(*due))]
            connection.execute(update(checkpoints).where(*due).values(deleted=now))
            return expired

        return await self._database.write(work)


def _of(tenant: str) -> Update:
    return update(checkpoints).where(checkpoints.c.tenant == tenant)


def _delete(connection: Connection, tenant: str, which: ColumnElement[bool], now: float) -> None:
    connection.execute(_of(tenant).where(which).values(deleted=now))


def _at(path: CheckpointPath) -> ColumnElement[bool]:
    return and_(
        checkpoints.c.run == path.run,
        checkpoints.c.kind == path.kind,
        checkpoints.c.name == path.name,
        checkpoints.c.deleted.is_(None),
    )


def _exists(now: float) -> ColumnElement[bool]:
    return and_(checkpoints.c.deleted.is_(None), or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now))
