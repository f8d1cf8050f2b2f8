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
    """Conditions of a search; None and empty values match every session.

    Attributes:
        session: its id.
        projects: it is in one of these.
        metadata: it has all of these entries.
        display_name: substring of its name, ignoring case.
        statuses: it has one of these.
        limit: rows of a page.
        cursor: of the previous page.
    """

    session: str | None = None
    projects: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    statuses: list[str] = field(default_factory=list)
    limit: int = 50
    cursor: str | None = None


def check_active(connection: Connection, tenant: str, session: str) -> None:
    """Check within a transaction that a session exists and is active.

    Raises:
        NotFound: the tenant has no such session.
        Gone: the session has ended.
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
        """Add a session; an existing one of this id is not changed."""
        query = insert(sessions).values(rows.values(sessions, session)).on_conflict_do_nothing()
        await self._database.write(lambda connection: connection.execute(query))

    async def get(self, tenant: str, session: str) -> Session:
        """Return a session, active or ended.

        Raises:
            NotFound: the tenant has no such session.
        """
        return await self._database.read(lambda connection: _get(connection, tenant, session))

    async def heartbeat(self, tenant: str, session: str, now: float) -> None:
        """Record a heartbeat.

        Raises:
            Gone: the tenant has no such session, or it has ended; the client stops in both cases.
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
        """Record heartbeats of several sessions; ended sessions are not changed.

        Args:
            heard: (tenant, session, UTC seconds) of each heartbeat.
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
        """End a session together with its sampling sessions.

        Args:
            tenant: its owner.
            session: its id.
            status: "finished" or "expired".
            now: UTC seconds.
            reason: why it ended.
            detail: additional text of the client.

        Returns:
            Whether it was active.

        Raises:
            NotFound: the tenant has no such session.
        """

        def work(connection: Connection) -> bool:
            _get(connection, tenant, session)
            query = update(sessions).where(
                sessions.c.tenant == tenant, sessions.c.id == session, sessions.c.status == "active"
            )
            ended = connection.execute(query.values(status=status, ended=now, reason=reason, detail=detail))
            own = (samplers.c.tenant == tenant, samplers.c.session == session, samplers.c.ended.is_(None))
            connection.execute(update(samplers).where(*own).values(ended=now))
            return ended.rowcount > 0

        return await self._database.write(work)

    async def set_project(self, tenant: str, session: str, project: str | None) -> None:
        """Set the project of a session.

        Raises:
            NotFound: the tenant has no such session.
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

    async def search(self, tenant: str, search: SessionSearch) -> Page[Session]:
        """Return a tenant's matching sessions, newest first.

        Raises:
            BadRequest: the cursor is invalid.
        """
        where = _conditions(tenant, search)
        after = [_after_cursor(*read_cursor(search.cursor))] if search.cursor else []
        limit = max(search.limit, 1)

        def work(connection: Connection) -> Page[Session]:
            total = connection.execute(select(func.count()).select_from(sessions).where(*where)).scalar_one()
            query = rows.newest_first(select(sessions).where(*where, *after), sessions).limit(limit + 1)
            page = [rows.record(Session, row) for row in connection.execute(query)]
            last = page[limit - 1] if len(page) > limit else None
            return Page(page[:limit], total, write_cursor(last.created, last.id) if last else None)

        return await self._database.read(work)

    async def silent(self, before: float) -> list[Session]:
        """Across tenants: return active sessions whose last heartbeat was before a time."""
        query = select(sessions).where(sessions.c.status == "active", sessions.c.last_heartbeat < before)
        return await self._database.read(
            lambda connection: [rows.record(Session, row) for row in connection.execute(query)]
        )

    async def all_active(self) -> list[Session]:
        """Across tenants: return the active sessions."""
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


def _conditions(tenant: str, search: SessionSearch) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = [sessions.c.tenant == tenant]
    if search.session is not None:
        where.append(sessions.c.id == search.session)
    if search.projects:
        where.append(sessions.c.project.in_(search.projects))
    if search.statuses:
        where.append(sessions.c.status.in_(search.statuses))
    if search.display_name is not None:
        where.append(sessions.c.display_name.icontains(search.display_name, autoescape=True))
    return where + [_has_metadata(key, value) for key, value in search.metadata.items()]


def _has_metadata(key: str, value: str) -> ColumnElement[bool]:
    pairs = func.json_each(sessions.c.metadata).table_valued("key", "value")
    return exists(select(literal(1)).select_from(pairs).where(pairs.c.key == key, pairs.c.value == value))


def _after_cursor(created: float, key: str) -> ColumnElement[bool]:
    return or_(sessions.c.created < created, and_(sessions.c.created == created, sessions.c.id < key))
