"""Sampling operations whose sequences training may name (`record_stability_info`): whose they are, when last used."""

from collections.abc import Collection, Iterator
from typing import Final

from sqlalchemy import Connection, and_, insert, select, update

from twinkle_server.ports import Database
from twinkle_server.store.tables import operations, recorded

_AT_ONCE: Final = 500
"""Values of one statement."""


def add(connection: Connection, tenant: str, session: str, lane: str, number: int, now: float) -> None:
    """Note that the operation `number` of a sampling session is recorded for its session."""
    row = {"lane": lane, "number": number, "tenant": tenant, "session": session, "used": now}
    connection.execute(insert(recorded).values(row))


class Recorded:
    """The table of recorded sampling operations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def use(self, tenant: str, session: str, requests: Collection[str], since: float, now: float) -> set[str]:
        """Return those requests that are recorded for a session, and note that they are used.

        Args:
            tenant: the caller.
            session: that trains.
            requests: ids of sampling requests.
            since: those that were used last before this time are over.
            now: the time.
        """

        def work(connection: Connection) -> set[str]:
            found: set[str] = set()
            for some in _pieces(sorted(requests)):
                operation = and_(operations.c.lane == recorded.c.lane, operations.c.number == recorded.c.number)
                query = select(operations.c.request, recorded.c.lane, recorded.c.number).join_from(
                    operations, recorded, operation
                )
                own = (operations.c.tenant == tenant, recorded.c.tenant == tenant, recorded.c.session == session)
                rows = connection.execute(
                    query.where(*own, operations.c.request.in_(some), recorded.c.used >= since)
                ).all()
                for request, lane, number in rows:
                    key = (recorded.c.tenant == tenant, recorded.c.lane == lane, recorded.c.number == number)
                    connection.execute(update(recorded).where(*key).values(used=now))
                    found.add(request)
            return found

        return await self._database.write(work)


def _pieces(requests: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(requests), _AT_ONCE):
        yield requests[begin : begin + _AT_ONCE]
