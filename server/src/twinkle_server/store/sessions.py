"""Sessions of clients."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, and_, bindparam, exists, func, literal, or_, select, update
from sqlalchemy.dialects.sqlite import insert

from twinkle_server.errors import Gone, NotFound
from twinkle_server.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.records import Page, Session, read_cursor, write_cursor
from twinkle_server.store.tables import samplers, sessions


@dataclass(slots=True)
class SessionSearch:
    """What a session must be to be found; None and empty ask for nothing.

    Attributes:
        session: its id.
        projects: one of these.
        metadata: it has all of these.
        display_name: a part of its name, without regard to case.
        statuses: one of these.
        limit: rows of a page.
        cursor: of the page before.
    """

    session: str | None = None
    projects: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    statuses: list[str] = field(default_factory=list)
    limit: int = 50
    cursor: str | None = None


def check_active(connection: Connection, tenant: str, session: str) -> None:
    """Check, within a transaction, that a session can have something new.

    Raises:
        NotFound: the tenant has none of that id.
        Gone: it has ended.
    """
    status = connection.execute(
        select(sessions.c.status).where(sessions.c.tenant == tenant, sessions.c.id == session)
    ).scalar()
    if status is None:
        raise NotFound(f"session {session[:80]!r} does not exist")
    if status != "active":
        raise Gone(f"session {session!r} has {status}; create a new one")


class Sessions:
    """The table of sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, session: Session) -> None:
        """Write a new session; one that is there already stays as it is."""
        query = insert(sessions).values(rows.values(sessions, session)).on_conflict_do_nothing()
        await self._database.write(lambda connection: connection.execute(query))

    async def get(self, tenant: str, session: str) -> Session:
        """Return a session, whether or not it has ended.

        Raises:
            NotFound: the tenant has none of that id.
        """
        return await self._database.read(lambda connection: _get(connection, tenant, session))

    async def heartbeat(self, tenant: str, session: str, now: float) -> None:
        """Note that a session lives.

        Raises:
            Gone: the tenant has none of that id, or it has ended; the client cannot tell which, and stops.
        """
        query = update(sessions).where(
            sessions.c.tenant == tenant, sessions.c.id == session, sessions.c.status == "active"
        )
        changed = await self._database.write(
            lambda connection: connection.execute(query.values(last_heartbeat=now)).rowcount
        )
        if not changed:
            raise Gone(f"session {session[:80]!r} is not active; create a new one")

    async def heard(self, heard: Iterable[tuple[str, str, float]]) -> None:
        """Note when sessions were last heard of; those that have ended stay as they are.

        Args:
            heard: tenant, session and time of each.
        """
        query = update(sessions).where(
            sessions.c.tenant == bindparam("of"), sessions.c.id == bindparam("session"), sessions.c.status == "active"
        )
        values = [{"of": tenant, "session": session, "at": at} for tenant, session, at in heard]
        await self._database.write(
            lambda connection: connection.execute(query.values(last_heartbeat=bindparam("at")), values)
        )

    async def end(
        self, tenant: str, session: str, status: str, now: float, reason: str | None = None, detail: str | None = None
    ) -> bool:
        """End a session and its sampling sessions, together.

        Args:
            tenant: whose it is.
            session: its id.
            status: "finished" or "expired".
            now: the time.
            reason: why.
            detail: of the client.

        Returns:
            Whether it was active.

        Raises:
            NotFound: the tenant has none of that id.
        """

        def work(connection: Connection) -> bool:
            _get(connection, tenant, session)
            query = update(sessions).where(
                sessions.c.tenant == tenant, sessions.c.id == session, sessions.c.status == "active"
            )
            ended = connection.execute(query.values(status=status, ended=now, reason=reason, detail=detail))
            mine = (samplers.c.tenant == tenant, samplers.c.session == session, samplers.c.ended.is_(None))
            connection.execute(update(samplers).where(*mine).values(ended=now))
            return ended.rowcount > 0

        return await self._database.write(work)

    async def set_project(self, tenant: str, session: str, project: str | None) -> None:
        """Put a session into a project.

        Raises:
            NotFound: the tenant has none of that id.
        """
        query = update(sessions).where(sessions.c.tenant == tenant, sessions.c.id == session)
        changed = await self._database.write(
            lambda connection: connection.execute(query.values(project=project)).rowcount
        )
        if not changed:
            raise NotFound(f"session {session[:80]!r} does not exist")

    async def page(self, tenant: str, limit: int, offset: int) -> Page[Session]:
        """Return a tenant's sessions, newest first."""
        return await self._database.read(
            lambda connection: rows.page(connection, Session, sessions, [sessions.c.tenant == tenant], limit, offset)
        )

    async def search(self, tenant: str, wanted: SessionSearch) -> Page[Session]:
        """Return a tenant's sessions that fit, newest first.

        Raises:
            BadRequest: the cursor is none.
        """
        where = _conditions(tenant, wanted)
        after = [_behind(*read_cursor(wanted.cursor))] if wanted.cursor else []
        limit = max(wanted.limit, 1)

        def work(connection: Connection) -> Page[Session]:
            total = connection.execute(select(func.count()).select_from(sessions).where(*where)).scalar_one()
            query = rows.newest_first(select(sessions).where(*where, *after), sessions).limit(limit + 1)
            found = [rows.record(Session, row) for row in connection.execute(query)]
            last = found[limit - 1] if len(found) > limit else None
            return Page(found[:limit], total, write_cursor(last.created, last.id) if last else None)

        return await self._database.read(work)

    async def silent(self, before: float) -> list[Session]:
        """Across tenants: return active sessions that were last heard of before a time (the janitor's)."""
        query = select(sessions).where(sessions.c.status == "active", sessions.c.last_heartbeat < before)
        return await self._database.read(
            lambda connection: [rows.record(Session, row) for row in connection.execute(query)]
        )

    async def all_active(self) -> list[Session]:
        """Across tenants: return the active sessions (for the start of the service)."""
        query = select(sessions).where(sessions.c.status == "active")
        return await self._database.read(
            lambda connection: [rows.record(Session, row) for row in connection.execute(query)]
        )


def _get(connection: Connection, tenant: str, session: str) -> Session:
    row = connection.execute(
        select(sessions).where(sessions.c.tenant == tenant, sessions.c.id == session)
    ).one_or_none()
    if row is None:
        raise NotFound(f"session {session[:80]!r} does not exist")
    return rows.record(Session, row)


def _conditions(tenant: str, wanted: SessionSearch) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = [sessions.c.tenant == tenant]
    if wanted.session is not None:
        where.append(sessions.c.id == wanted.session)
    if wanted.projects:
        where.append(sessions.c.project.in_(wanted.projects))
    if wanted.statuses:
        where.append(sessions.c.status.in_(wanted.statuses))
    if wanted.display_name is not None:
        where.append(sessions.c.display_name.icontains(wanted.display_name, autoescape=True))
    return where + [_has_metadata(key, value) for key, value in wanted.metadata.items()]


def _has_metadata(key: str, value: str) -> ColumnElement[bool]:
    pairs = func.json_each(sessions.c.metadata).table_valued("key", "value")
    return exists(select(literal(1)).select_from(pairs).where(pairs.c.key == key, pairs.c.value == value))


def _behind(created: float, key: str) -> ColumnElement[bool]:
    return or_(sessions.c.created < created, and_(sessions.c.created == created, sessions.c.id < key))
