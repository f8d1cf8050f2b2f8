"""Sampling sessions. The functions are for transactions of others (`also`); the class has transactions of its own."""

from sqlalchemy import Connection, func, insert, select, update

from twinkle_server.errors import NotFound, SequenceConflict
from twinkle_server.ports import Database
from twinkle_server.store import folders, rows, sessions
from twinkle_server.store.records import Sampler
from twinkle_server.store.tables import samplers


def add(connection: Connection, sampler: Sampler) -> None:
    """Write a new sampling session; one that is there already must be the same.

    Raises:
        NotFound: its session is not the tenant's.
        Gone: its session has ended.
        SequenceConflict: another one has its number.
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
    """Let a model's inflight sampling sessions use newer weights; returns the folders that they used before."""
    mine = (samplers.c.tenant == tenant, samplers.c.inflight == model)
    old = connection.execute(select(samplers.c.folder).where(*mine).distinct()).scalars()
    before = [name for name in old if name is not None and name != folder]
    connection.execute(update(samplers).where(*mine).values(folder=folder))
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
        NotFound: the tenant has none of that id.
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
        """Return a sampling session, whether or not it has ended.

        Raises:
            NotFound: the tenant has none of that id.
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
        """Count one more client of a sampling session; returns its number, from 1.

        Raises:
            NotFound: the tenant has none of that id.
        """
        query = update(samplers).where(samplers.c.tenant == tenant, samplers.c.id == sampler)
        counted = query.values(clones=samplers.c.clones + 1).returning(samplers.c.clones)
        number = await self._database.write(lambda connection: connection.execute(counted).scalar())
        if number is None:
            raise NotFound(f"sampling session {sampler[:120]!r} does not exist")
        return int(number)

    async def count(self, tenant: str) -> int:
        """Return how many sampling sessions a tenant has that have not ended."""
        query = select(func.count()).where(samplers.c.tenant == tenant, samplers.c.ended.is_(None))
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))
