"""What tenants used, added up by day."""

import time
from collections.abc import Sequence

from sqlalchemy import Connection, select
from sqlalchemy.dialects import sqlite

from twinkle_server.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.records import Usage
from twinkle_server.store.tables import usage


def day_of(now: float) -> str:
    """Return the day (`YYYY-MM-DD`, UTC) of a time."""
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def add(connection: Connection, used: Usage) -> None:
    """Add to what a tenant used in a day."""
    new = sqlite.insert(usage).values(rows.values(usage, used))
    more = {"tokens": usage.c.tokens + new.excluded.tokens, "bytes": usage.c.bytes + new.excluded.bytes}
    key = [usage.c.tenant, usage.c.day, usage.c.kind]
    connection.execute(new.on_conflict_do_update(index_elements=key, set_=more))


class UsageTable:
    """The table of what was used."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, used: Usage) -> None:
        """See the function of this name."""
        await self._database.write(lambda connection: add(connection, used))

    async def add_all(self, rows: Sequence[Usage]) -> None:
        """Add several, in one transaction."""

        def work(connection: Connection) -> None:
            for used in rows:
                add(connection, used)

        await self._database.write(work)

    async def between(self, tenant: str, first: str, end: str) -> list[Usage]:
        """Return what a tenant used from the day `first` up to the day `end`, which is left out."""
        query = select(usage).where(usage.c.tenant == tenant, usage.c.day >= first, usage.c.day < end)
        ordered = query.order_by(usage.c.day, usage.c.kind)
        return await self._database.read(
            lambda connection: [rows.record(Usage, row) for row in connection.execute(ordered)]
        )
