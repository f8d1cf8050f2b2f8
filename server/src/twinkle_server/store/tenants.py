"""Keys (only hashes of their secrets), usage by day, and audit entries of tenants."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.dialects import sqlite

from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.records import AuditEntry, Key, Usage
from twinkle_server.store.tables import audit, keys, tenants, usage


class Keys:
    """The table of keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, key: Key) -> None:
        """Add a key, and its tenant if it is new.

        Raises:
            BadRequest: an active key of this name exists.
        """

        def work(connection: Connection) -> None:
            taken = select(func.count()).where(keys.c.name == key.name, keys.c.revoked.is_(None))
            if connection.execute(taken).scalar_one():
                raise BadRequest(f"key {key.name!r} already exists; choose another name, or revoke it first")
            tenant = sqlite.insert(tenants).values(id=key.tenant, created=key.created)
            connection.execute(tenant.on_conflict_do_nothing())
            connection.execute(insert(keys).values(rows.values(keys, key)))

        await self._database.write(work)

    async def all(self, revoked: bool = False) -> list[Key]:
        """Across tenants: return the keys by age, for the operator."""
        query = select(keys).order_by(keys.c.created, keys.c.id)
        query = query if revoked else query.where(keys.c.revoked.is_(None))
        return await self._database.read(
            lambda connection: [rows.record(Key, row) for row in connection.execute(query)]
        )

    async def change(self, name: str, entry: Callable[[Key, Key], AuditEntry], **quotas: float | None) -> Key:
        """Across tenants: change quotas of a key by its name, and record that in the same transaction.

        Args:
            name: of an active key.
            entry: returns the audit entry, given the key before and after.
            **quotas: values by name; None removes one.

        Raises:
            NotFound: no active key has this name.
        """
        where = (keys.c.name == name, keys.c.revoked.is_(None))

        def work(connection: Connection) -> Key:
            row = connection.execute(select(keys).where(*where)).one_or_none()
            if row is None:
                raise NotFound(f"no active key {name!r}; `twinkle server keys list` shows the keys")
            before = rows.record(Key, row)
            merged = {quota: value for quota, value in {**before.quotas, **quotas}.items() if value is not None}
            after = replace(before, quotas=merged)
            connection.execute(update(keys).where(*where).values(quotas=merged))
            add_entry(connection, entry(before, after))
            return after

        return await self._database.write(work)

    async def revoke(self, name: str, now: float) -> Key:
        """Across tenants: revoke a key by its name, for the operator.

        Raises:
            NotFound: no active key has this name.
        """
        query = update(keys).where(keys.c.name == name, keys.c.revoked.is_(None)).values(revoked=now)

        def work(connection: Connection) -> Key:
            row = connection.execute(query.returning(keys)).one_or_none()
            if row is None:
                raise NotFound(f"no active key {name!r}; `twinkle server keys list` shows the keys")
            return rows.record(Key, row)

        return await self._database.write(work)


def day_of(now: float) -> str:
    """Return the day (`YYYY-MM-DD`, UTC) of a time."""
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def add_usage(connection: Connection, used: Usage) -> None:
    """Add to a tenant's usage of a day."""
    new = sqlite.insert(usage).values(rows.values(usage, used))
    more = {"tokens": usage.c.tokens + new.excluded.tokens, "bytes": usage.c.bytes + new.excluded.bytes}
    key = [usage.c.tenant, usage.c.day, usage.c.kind]
    connection.execute(new.on_conflict_do_update(index_elements=key, set_=more))


class UsageTable:
    """The table of usage."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, used: Usage) -> None:
        """See `add_usage`."""
        await self._database.write(lambda connection: add_usage(connection, used))

    async def add_all(self, rows: Sequence[Usage]) -> None:
        """Add several rows in one transaction."""

        def work(connection: Connection) -> None:
            for used in rows:
                add_usage(connection, used)

        await self._database.write(work)

    async def between(self, tenant: str, first: str, end: str) -> list[Usage]:
        """Return a tenant's usage from the day `first` up to, but not including, the day `end`."""
        query = select(usage).where(usage.c.tenant == tenant, usage.c.day >= first, usage.c.day < end)
        ordered = query.order_by(usage.c.day, usage.c.kind)
        return await self._database.read(
            lambda connection: [rows.record(Usage, row) for row in connection.execute(ordered)]
        )


KINDS: Mapping[str, str] = {
    "forward": "training",
    "forward_backward": "training",
    "native_pass": "training",
    "sample": "sampling_sample",
}
"""Kinds of usage by kind of operation; other operations are not counted."""


REQUESTS = "requests"
"""Kind of usage whose `tokens` are the number of operations that ended, whatever their outcome."""


class UsageLog:
    """Sums tokens and requests of tenants; a crash loses what was added since the last `flush`."""

    def __init__(self, table: UsageTable) -> None:
        self._table = table
        self._tokens: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, tokens: int, tenant: str) -> None:
        """Count a done operation."""
        if tokens and (name := KINDS.get(kind)):
            self._tokens[tenant, day_of(time.time()), name] += tokens

    def count(self, tenant: str) -> None:
        """Count an operation that ended, whatever its outcome."""
        self._tokens[tenant, day_of(time.time()), REQUESTS] += 1

    async def flush(self) -> None:
        """Write the sums; after an error they are kept, except when the write may have succeeded (cancellation)."""
        gathered, self._tokens = self._tokens, Counter()
        if not gathered:
            return
        rows = [Usage(tenant, day, kind, tokens) for (tenant, day, kind), tokens in gathered.items()]
        try:
            await self._table.add_all(rows)
        except Exception:
            self._tokens.update(gathered)
            raise


def add_entry(connection: Connection, entry: AuditEntry) -> None:
    """Add an entry."""
    connection.execute(insert(audit).values(rows.values(audit, entry)))


class Audit:
    """The table of audit entries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, entry: AuditEntry) -> None:
        """Add an entry."""
        await self._database.write(lambda connection: add_entry(connection, entry))

    async def entries(
        self,
        tenant: str,
        since: float = 0.0,
        until: float = float("inf"),
        event: str | None = None,
        limit: int = 1000,
    ) -> list[AuditEntry]:
        """Return a tenant's entries from `since` up to `until`, newest first, optionally of one event."""
        query = select(audit).where(audit.c.tenant == tenant, audit.c.time >= since, audit.c.time < until)
        query = query if event is None else query.where(audit.c.event == event)
        newest = query.order_by(audit.c.time.desc(), audit.c.id.desc()).limit(max(limit, 0))
        return await self._database.read(
            lambda connection: [rows.record(AuditEntry, row) for row in connection.execute(newest)]
        )

    async def forget(self, before: float) -> int:
        """Across tenants: delete entries older than a time, and return their number."""
        query = delete(audit).where(audit.c.time < before)
        return await self._database.write(lambda connection: connection.execute(query).rowcount)
