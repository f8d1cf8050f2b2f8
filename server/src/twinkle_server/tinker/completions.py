"""Which requests of a sampling session are over, as a stream that a client reads by cursor.

The cursor is a time in microseconds. Requests that end at almost the same time may become visible in another order, so
each answer looks back a little; a client knows requests by their ids and minds no repetition.
"""

import asyncio
from typing import Any

from sqlalchemy import Connection, select

from twinkle_server.store.records import Sampler
from twinkle_server.store.tables import operations
from twinkle_server.tinker.app_state import AppState

CLONE = 1_000_000_000
"""Numbers of a sampling session's clients begin at multiples of this."""
_LOOK_BACK = 10_000_000  # microseconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds
_MOST = 4096


async def completions(
    state: AppState, sampler: Sampler, clone: int, cursor: int, seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Return requests that are over, and the cursor for those after them.

    Args:
        state: see there.
        sampler: of the caller.
        clone: which of its clients asks.
        cursor: of the answer before; 0 begins at the beginning.
        seconds: to wait for one if there is none.
    """
    ends = asyncio.get_running_loop().time() + seconds
    pause = _FIRST_PAUSE
    while True:
        rows = await state.store.database.read(lambda connection: _ended(connection, sampler, clone, cursor))
        newest = max((when for _, _, when in rows), default=0)
        left = ends - asyncio.get_running_loop().time()
        if newest > cursor or left <= 0:
            break
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    found = [
        {"state": "failed" if status != "done" else "finished", "request_id": request} for request, status, _ in rows
    ]
    return found, max(newest, cursor)


def _ended(connection: Connection, sampler: Sampler, clone: int, cursor: int) -> list[tuple[str, str, int]]:
    query = (
        select(operations.c.request, operations.c.status, operations.c.finished)
        .where(
            operations.c.tenant == sampler.tenant,
            operations.c.lane == sampler.id,
            operations.c.number >= clone * CLONE,
            operations.c.number < (clone + 1) * CLONE,
            operations.c.finished > (cursor - _LOOK_BACK) / 1e6,
        )
        .order_by(operations.c.finished, operations.c.id)
        .limit(_MOST)
    )
    return [(row.request, row.status, round(row.finished * 1e6)) for row in connection.execute(query)]
