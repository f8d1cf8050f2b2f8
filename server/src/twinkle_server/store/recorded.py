"""Sampling operations that training may refer to (`record_stability_info`): their sessions and last use."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Final

from sqlalchemy import Connection, and_, insert, select, update

from twinkle_server.ports import Database
from twinkle_server.store.tables import operations, recorded

_AT_ONCE: Final = 500
"""Maximum number of values in one statement."""


def add(connection: Connection, tenant: str, session: str, queue_id: str, number: int, now: float) -> None:
    """Record operation `number` of a sampling session for its session."""
    row = {"lane": queue_id, "number": number, "tenant": tenant, "session": session, "used": now}
    connection.execute(insert(recorded).values(row))


class Recorded:
    """The table of recorded sampling operations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def use(self, tenant: str, session: str, requests: Collection[str], since: float, now: float) -> set[str]:
        """Return the requests that are recorded for a session, and update their last use.

        They are looked up in order and in batches, up to the first batch with a missing one.

        Args:
            tenant: the caller.
            session: the session that trains.
            requests: ids of sampling requests.
            since: requests last used before this time have expired; UTC seconds.
            now: UTC seconds.
        """
        known: dict[str, tuple[str, int]] = {}
        for batch in _batches(list(requests)):
            rows = await self._database.read(partial(_look_up, tenant, session, batch, since))
            known.update(rows)
            if len(rows) < len(batch):
                break
        if known:
            await self._database.write(partial(_update_use, tenant, list(known.values()), now))
        return set(known)


def _look_up(
    tenant: str, session: str, requests: list[str], since: float, connection: Connection
) -> dict[str, tuple[str, int]]:
    """Return queue and number of the recorded requests."""
    operation = and_(operations.c.lane == recorded.c.lane, operations.c.number == recorded.c.number)
    query = select(operations.c.request, recorded.c.lane, recorded.c.number).join_from(operations, recorded, operation)
    own = (operations.c.tenant == tenant, recorded.c.tenant == tenant, recorded.c.session == session)
    rows = connection.execute(query.where(*own, operations.c.request.in_(requests), recorded.c.used >= since))
    return {request: (queue_id, number) for request, queue_id, number in rows}


def _update_use(tenant: str, keys: list[tuple[str, int]], now: float, connection: Connection) -> None:
    for queue_id, number in keys:
        key = (recorded.c.tenant == tenant, recorded.c.lane == queue_id, recorded.c.number == number)
        connection.execute(update(recorded).where(*key).values(used=now))


def _batches(requests: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(requests), _AT_ONCE):
        yield requests[begin : begin + _AT_ONCE]
