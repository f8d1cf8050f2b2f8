"""Buffers recorded rollouts of the engine, and writes them together: they cost no commit of their own."""

import time
from collections import deque

from twinkle_server.engine.messages import Message
from twinkle_server.settings import Rollouts
from twinkle_server.store.figures import Kept, RolloutTable

_BYTES = 16 * 2**20
"""Maximum size of the rows that wait for the next write; beyond it, the oldest are dropped."""


class RolloutBuffer:
    """Rows that wait to be written; a crash loses those of the last second.

    Args:
        table: where they are written.
        settings: of the service.
    """

    def __init__(self, table: RolloutTable, settings: Rollouts) -> None:
        self._table, self._settings = table, settings
        self._rows: deque[Kept] = deque()
        self._bytes = 0

    def add(self, message: Message) -> None:
        """Add the rows of a message `ROLLOUTS`."""
        if not self._settings.rows:
            return
        head, now, start = message.head, time.time(), 0
        for about in head["rows"]:
            size = 16 * int(about["n"]) + 4
            data, start = message.body[start : start + size], start + size
            self._rows.append(Kept(head["tenant"], head["queue_id"], head["number"], now, about, data))
            self._bytes += len(data)
        while self._bytes > _BYTES:
            self._bytes -= len(self._rows.popleft().data)

    async def flush(self) -> None:
        """Write the rows; after an error they are kept for the next attempt."""
        rows = list(self._rows)
        if not rows:
            return
        self._rows.clear()
        self._bytes = 0
        try:
            await self._table.add(rows, self._settings.rows)
        except Exception:
            self._rows.extendleft(reversed(rows))
            self._bytes += sum(len(row.data) for row in rows)
            raise

    async def trim(self, before: float) -> None:
        """Delete rows older than a time, and the oldest ones beyond the limit of bytes."""
        await self._table.trim(self._settings.bytes, before)
