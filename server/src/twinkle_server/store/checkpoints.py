"""Checkpoints. The functions are for transactions of others (`also`); the class has transactions of its own.

One that has expired is not there, whether or not anybody has cleared it away; one that was deleted or replaced is not
there at once. Their rows stay a while, and their folders until nothing refers to them (see `retention`).
"""

from sqlalchemy import ColumnElement, Connection, Update, and_, func, insert, or_, select, update

from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.ports import Database
from twinkle_server.store import folders, rows
from twinkle_server.store.records import Checkpoint, Page
from twinkle_server.store.tables import checkpoints, models


def add(connection: Connection, checkpoint: Checkpoint, overwrite: bool = False) -> str | None:
    """Write a new checkpoint.

    Args:
        connection: of a transaction.
        checkpoint: `created` is the time by which others are taken to have expired.
        overwrite: replace one of the same path.

    Returns:
        Folder of the one that it replaced.

    Raises:
        BadRequest: there is one of that path, and `overwrite` is False.
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
        tenant: who asks.
        path: of the checkpoint.
        now: the time.
        public: others' published ones are found as well.

    Raises:
        NotFound: there is none for this tenant.
    """
    mine = checkpoints.c.tenant == tenant
    whose = or_(mine, checkpoints.c.public) if public else mine
    row = connection.execute(select(checkpoints).where(whose, _at(path), _there(now))).one_or_none()
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
            NotFound: it has none of that path.
        """
        return await self._database.read(lambda connection: get(connection, tenant, path, now))

    async def find(self, tenant: str, path: CheckpointPath, now: float) -> Checkpoint:
        """Return a checkpoint that a tenant may load: its own, or a published one.

        Raises:
            NotFound: there is none.
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
        """Return a tenant's checkpoints, newest first; of one run or project if it is given."""
        where = [checkpoints.c.tenant == tenant, _there(now)]
        where += [checkpoints.c.run == run] if run is not None else []
        where += [checkpoints.c.project == project] if project is not None else []
        return await self._database.read(
            lambda connection: rows.page(connection, Checkpoint, checkpoints, where, limit, offset)
        )

    async def latest(self, tenant: str, runs: list[str], now: float) -> dict[tuple[str, str], Checkpoint]:
        """Return the newest checkpoint of each kind of runs, by (run, kind)."""
        query = select(checkpoints).where(checkpoints.c.tenant == tenant, checkpoints.c.run.in_(runs), _there(now))
        ordered = query.order_by(checkpoints.c.created, checkpoints.c.id)
        return await self._database.read(
            lambda connection: {
                (row.run, row.kind): rows.record(Checkpoint, row) for row in connection.execute(ordered)
            }
        )

    async def delete(self, tenant: str, path: CheckpointPath, now: float) -> str:
        """Delete a checkpoint; returns its folder.

        Raises:
            NotFound: the tenant has none of that path.
        """

        def work(connection: Connection) -> str:
            found = get(connection, tenant, path, now)
            _delete(connection, tenant, checkpoints.c.id == found.id, now)
            return found.folder

        return await self._database.write(work)

    async def set_expiry(self, tenant: str, path: CheckpointPath, now: float, expires: float | None) -> None:
        """Say when a checkpoint goes; None is never.

        Raises:
            NotFound: the tenant has none of that path.
        """
        await self._change(path, now, _of(tenant).values(expires=expires))

    async def publish(self, tenant: str, path: CheckpointPath, now: float, public: bool) -> None:
        """Let everybody load a checkpoint, or its owner alone.

        Raises:
            NotFound: the tenant has none of that path.
        """
        await self._change(path, now, _of(tenant).values(public=public))

    async def _change(self, path: CheckpointPath, now: float, query: Update) -> None:
        """Change a row; the tenant is in the query (`_of`)."""
        where = query.where(_at(path), _there(now))
        if not await self._database.write(lambda connection: connection.execute(where).rowcount):
            raise NotFound(f"checkpoint {path} does not exist")

    async def bytes(self, tenant: str, now: float, project: str | None = None) -> int:
        """Return the bytes of a tenant's checkpoints; of one project if it is given."""
        query = select(func.coalesce(func.sum(checkpoints.c.size), 0)).where(
            checkpoints.c.tenant == tenant, _there(now)
        )
        if project is not None:
            query = query.where(checkpoints.c.project == project)
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))

    async def of_sessions(self, tenant: str, sessions: list[str], now: float) -> dict[str, tuple[int, int]]:
        """Return number and bytes of sessions' checkpoints; sessions without any are left out."""
        query = (
            select(models.c.session, func.count(), func.sum(checkpoints.c.size))
            .join(models, and_(models.c.id == checkpoints.c.run, models.c.tenant == checkpoints.c.tenant))
            .where(checkpoints.c.tenant == tenant, models.c.session.in_(sessions), _there(now))
            .group_by(models.c.session)
        )
        return await self._database.read(
            lambda connection: {row[0]: (int(row[1]), int(row[2])) for row in connection.execute(query)}
        )

    async def surplus(self, tenant: str, run: str, kind: str, keep: int, now: float) -> list[Checkpoint]:
        """Delete all but a run's newest checkpoints of a kind; returns those that are no longer there."""
        query = select(checkpoints).where(
            checkpoints.c.tenant == tenant, checkpoints.c.run == run, checkpoints.c.kind == kind, _there(now)
        )

        def work(connection: Connection) -> list[Checkpoint]:
            old = connection.execute(rows.newest_first(query, checkpoints).offset(max(keep, 0)).limit(-1))
            found = [rows.record(Checkpoint, row) for row in old]
            _delete(connection, tenant, checkpoints.c.id.in_([row.id for row in found]), now)
            return found

        return await self._database.write(work)

    async def expire(self, now: float) -> list[Checkpoint]:
        """Across tenants: clear away checkpoints whose time is over; returns those that went."""
        due = (checkpoints.c.deleted.is_(None), checkpoints.c.expires <= now)

        def work(connection: Connection) -> list[Checkpoint]:
            found = [rows.record(Checkpoint, row) for row in connection.execute(select(checkpoints).where(*due))]
            connection.execute(update(checkpoints).where(*due).values(deleted=now))
            return found

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


def _there(now: float) -> ColumnElement[bool]:
    return and_(checkpoints.c.deleted.is_(None), or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now))
