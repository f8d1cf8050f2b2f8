"""API keys: hashes, roles, quotas. The secret itself is never here."""

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.dialects import sqlite

from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ports import Database
from twinkle_server.store import rows
from twinkle_server.store.records import Key
from twinkle_server.store.tables import keys, tenants


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

    async def revoke(self, name: str, now: float) -> Key:
        """Across tenants: revoke a key by its name, for the operator.

        Raises:
            NotFound: there is none of that name that is not revoked.
        """
        query = update(keys).where(keys.c.name == name, keys.c.revoked.is_(None)).values(revoked=now)

        def work(connection: Connection) -> Key:
            row = connection.execute(query.returning(keys)).one_or_none()
            if row is None:
                raise NotFound(f"no active key {name!r}; `twinkle server keys list` shows the keys")
            return rows.record(Key, row)

        return await self._database.write(work)
