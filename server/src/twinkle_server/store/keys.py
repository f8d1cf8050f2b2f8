"""API keys: hashes, roles, quotas. The secret itself is never here."""

from typing import Any

from sqlalchemy import Connection, Integer, String, cast, func, insert, select, update
from sqlalchemy.dialects import sqlite

from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.runtime.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.records import Key
from twinkle_server.store.tables import keys, meta, tenants


class Keys:
    """The table of keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, key: Key) -> None:
        """Write a new key, and its tenant if it is new too.

        Raises:
            BadRequest: a key that is not revoked has that name.
        """

        def work(connection: Connection) -> None:
            taken = select(func.count()).where(keys.c.name == key.name, keys.c.revoked.is_(None))
            if connection.execute(taken).scalar_one():
                raise BadRequest(f"there is a key {key.name!r}: choose another name, or revoke it first")
            tenant = sqlite.insert(tenants).values(id=key.tenant, created=key.created)
            connection.execute(tenant.on_conflict_do_nothing())
            connection.execute(insert(keys).values(rows.values(keys, key)))
            _changed(connection)

        await self._database.write(work)

    async def by_prefix(self, prefix: str) -> Key | None:
        """Across tenants: return the key that a caller seems to have; its hash must still be compared."""
        query = select(keys).where(keys.c.prefix == prefix, keys.c.revoked.is_(None))

        def work(connection: Connection) -> Key | None:
            row = connection.execute(query).one_or_none()
            return None if row is None else rows.record(Key, row)

        return await self._database.read(work)

    async def all(self, revoked: bool = False) -> list[Key]:
        """Across tenants: return the keys by age, for the operator."""
        query = select(keys).order_by(keys.c.created, keys.c.id)
        query = query if revoked else query.where(keys.c.revoked.is_(None))
        return await self._database.read(
            lambda connection: [rows.record(Key, row) for row in connection.execute(query)]
        )

    async def revoke(self, name: str, now: float) -> Key:
        """Across tenants: revoke a key by its name, for the operator.

        Raises:
            NotFound: there is none of that name that is not revoked.
        """
        query = update(keys).where(keys.c.name == name, keys.c.revoked.is_(None)).values(revoked=now)

        def work(connection: Connection) -> Key:
            row = connection.execute(query.returning(keys)).one_or_none()
            if row is None:
                raise NotFound(f"no key {name!r} that is not revoked: `twinkle server keys list` shows them")
            _changed(connection)
            return rows.record(Key, row)

        return await self._database.write(work)

    async def set_quotas(self, tenant: str, key: str, quotas: dict[str, Any]) -> None:
        """Set a key's limits.

        Raises:
            NotFound: the tenant has none of that id.
        """
        query = update(keys).where(keys.c.tenant == tenant, keys.c.id == key).values(quotas=quotas)

        def work(connection: Connection) -> None:
            if not connection.execute(query).rowcount:
                raise NotFound(f"no key {key[:80]!r}")
            _changed(connection)

        await self._database.write(work)

    async def generation(self) -> int:
        """Return a number that changes with every change of any key, in whatever process it was made."""
        query = select(meta.c.value).where(meta.c.name == "keys")
        return await self._database.read(lambda connection: int(connection.execute(query).scalar() or 0))


def _changed(connection: Connection) -> None:
    new = sqlite.insert(meta).values(name="keys", value="1")
    more = cast(cast(meta.c.value, Integer) + 1, String)
    connection.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": more}))
