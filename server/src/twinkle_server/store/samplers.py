"""Sampling sessions. Functions run in a caller's transaction (`in_transaction`), the class in its own."""

from sqlalchemy import Connection, func, insert, select, update

from twinkle_server.errors import NotFound, SequenceConflict
from twinkle_server.ports import Database
from twinkle_server.store import folders, rows, sessions
from twinkle_server.store.records import Sampler
from twinkle_server.store.tables import samplers


def add(connection: Connection, sampler: Sampler) -> None:
    """Add a sampling session; an existing one of this id must be equal.

    Raises:
        NotFound: the tenant has no such session.
        Gone: the session has ended.
        SequenceConflict: the number is used by another sampling session.
    """
    sessions.check_active(connection, sampler.tenant, sampler.session)
    query = select(samplers).where(samplers.c.tenant == sampler.tenant, samplers.c.id == sampler.id)
    row = connection.execute(query).one_or_none()
    if row is None:
        connection.execute(insert(samplers).values(rows.values(samplers, sampler)))
        if sampler.folder is not None:
            folders.name(connection, sampler.folder, sampler.created)
    elif (row.base, row.path, row.inflight) != (sampler.base, sampler.path, sampler.inflight):
        raise SequenceConflict(f"sampling session {sampler.number} of this session was created from other weights")


def move_inflight(connection: Connection, tenant: str, model: str, folder: str) -> list[str]:
    """Move a model's inflight sampling sessions to newer weights, and return the folders that they used before."""
    own = (samplers.c.tenant == tenant, samplers.c.inflight == model)
    old = connection.execute(select(samplers.c.folder).where(*own).distinct()).scalars()
    before = [name for name in old if name is not None and name != folder]
    connection.execute(update(samplers).where(*own).values(folder=folder))
    return before


def inflight_folder(connection: Connection, tenant: str, model: str) -> str | None:
    """Return the folder that a model's inflight sampling sessions use; None before the first inflight save."""
    query = select(samplers.c.folder).where(
        samplers.c.tenant == tenant, samplers.c.inflight == model, samplers.c.folder.is_not(None)
    )
    return connection.execute(query.limit(1)).scalar()


def get(connection: Connection, tenant: str, sampler: str) -> Sampler:
    """Return a sampling session.

    Raises:
        NotFound: the tenant has no such sampling session.
    """
    query = select(samplers).where(samplers.c.tenant == tenant, samplers.c.id == sampler)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"sampling session {sampler[:120]!r} does not exist")
    return rows.record(Sampler, row)


class Samplers:
    """The table of sampling sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, sampler: Sampler) -> None:
        """See `add`."""
        await self._database.write(lambda connection: add(connection, sampler))

    async def get(self, tenant: str, sampler: str) -> Sampler:
        """Return a sampling session, active or ended.

        Raises:
            NotFound: the tenant has no such sampling session.
        """
        return await self._database.read(lambda connection: get(connection, tenant, sampler))

    async def of_session(self, tenant: str, session: str) -> list[Sampler]:
        """Return a session's sampling sessions, by number."""
        query = select(samplers).where(samplers.c.tenant == tenant, samplers.c.session == session)
        return await self._database.read(
            lambda connection: [
                rows.record(Sampler, row) for row in connection.execute(query.order_by(samplers.c.number))
            ]
        )

    async def join(self, tenant: str, sampler: str) -> int:
        """Count another client of a sampling session, and return its number, from 1.

        Raises:
            NotFound: the tenant has no such sampling session.
        """
        query = update(samplers).where(samplers.c.tenant == tenant, samplers.c.id == sampler)
        counted = query.values(clones=samplers.c.clones + 1).returning(samplers.c.clones)
        number = await self._database.write(lambda connection: connection.execute(counted).scalar())
        if number is None:
            raise NotFound(f"sampling session {sampler[:120]!r} does not exist")
        return int(number)

    async def end(self, tenant: str, sampler: str, now: float) -> None:
        """End a sampling session, which frees its copy of a checkpoint that was deleted or replaced. Idempotent.

        Raises:
            NotFound: the tenant has no such sampling session.
        """

        def work(connection: Connection) -> None:
            get(connection, tenant, sampler)
            own = (samplers.c.tenant == tenant, samplers.c.id == sampler, samplers.c.ended.is_(None))
            connection.execute(update(samplers).where(*own).values(ended=now))

        await self._database.write(work)

    async def count(self, tenant: str) -> int:
        """Return the number of a tenant's active sampling sessions."""
        query = select(func.count()).where(samplers.c.tenant == tenant, samplers.c.ended.is_(None))
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))
