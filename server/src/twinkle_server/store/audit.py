"""Who did what, for the operator and for the tenant itself."""

from sqlalchemy import Connection, delete, insert, select

from twinkle_server.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.records import AuditEntry
from twinkle_server.store.tables import audit


def add(connection: Connection, entry: AuditEntry) -> None:
    """Write an entry."""
    connection.execute(insert(audit).values(rows.values(audit, entry)))


class Audit:
    """The table of audit entries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, entry: AuditEntry) -> None:
        """Write an entry."""
        await self._database.write(lambda connection: add(connection, entry))

    async def entries(
        self,
        tenant: str,
        since: float = 0.0,
        until: float = float("inf"),
        event: str | None = None,
        limit: int = 1000,
    ) -> list[AuditEntry]:
        """Return a tenant's entries from `since` up to `until`, newest first; of one event if it is given."""
        query = select(audit).where(audit.c.tenant == tenant, audit.c.time >= since, audit.c.time < until)
        query = query if event is None else query.where(audit.c.event == event)
        newest = query.order_by(audit.c.time.desc(), audit.c.id.desc()).limit(max(limit, 0))
        return await self._database.read(
            lambda connection: [rows.record(AuditEntry, row) for row in connection.execute(newest)]
        )

    async def forget(self, before: float) -> int:
        """Across tenants: delete entries that are older than a time; returns how many."""
        query = delete(audit).where(audit.c.time < before)
        return await self._database.write(lambda connection: connection.execute(query).rowcount)
