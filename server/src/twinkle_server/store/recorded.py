"""Sampling operations whose sequences training may name (`record_stability_info`): whose they are, when last used."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Final

from sqlalchemy import Connection, and_, insert, select, update

from twinkle_server.ports import Database
from twinkle_server.store.tables import operations, recorded

_AT_ONCE: Final = 500
"""Values of one statement."""


def add(connection: Connection, tenant: str, session: str, queue_id: str, number: int, now: float) -> None:
    """Note that the operation `number` of a sampling session is recorded for its session."""
    row = {"lane": queue_id, "number": number, "tenant": tenant, "session": session, "used": now}
    connection.execute(insert(recorded).values(row))


class Recorded:
    """The table of recorded sampling operations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def use(self, tenant: str, session: str, requests: Collection[str], since: float, now: float) -> set[str]:
        """Return those requests that are recorded for a session, and note that they are used.

        They are looked up in order and in pieces; behind a piece with one that is not recorded, none is looked up.

        Args:
            tenant: the caller.
            session: that trains.
            requests: ids of sampling requests.
            since: those that were used last before this time are over.
            now: the time.
        """
        found: dict[str, tuple[str, int]] = {}
        for some in _pieces(list(requests)):
            rows = await self._database.read(partial(_look_up, tenant, session, some, since))
            found.update(rows)
            if len(rows) < len(some):
                break
        if found:
            await self._database.write(partial(_note_use, tenant, list(found.values()), now))
        return set(found)


def _look_up(
    tenant: str, session: str, requests: list[str], since: float, connection: Connection
) -> dict[str, tuple[str, int]]:
    """Return queue and number of those requests that are recorded."""
    operation = and_(operations.c.lane == recorded.c.lane, operations.c.number == recorded.c.number)
    query = select(operations.c.request, recorded.c.lane, recorded.c.number).join_from(operations, recorded, operation)
    own = (operations.c.tenant == tenant, recorded.c.tenant == tenant, recorded.c.session == session)
    rows = connection.execute(query.where(*own, operations.c.request.in_(requests), recorded.c.used >= since))
    return {request: (queue_id, number) for request, queue_id, number in rows}


def _note_use(tenant: str, keys: list[tuple[str, int]], now: float, connection: Connection) -> None:
    for queue_id, number in keys:
        key = (recorded.c.tenant == tenant, recorded.c.lane == queue_id, recorded.c.number == number)
        connection.execute(update(recorded).where(*key).values(used=now))


def _pieces(requests: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(requests), _AT_ONCE):
        yield requests[begin : begin + _AT_ONCE]
