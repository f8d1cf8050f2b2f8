"""Buffers recorded rollouts of the engine, and writes them together: they cost no commit of their own."""

import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from twinkle_server.engine.messages import Message
from twinkle_server.errors import NotFound
from twinkle_server.settings import Rollouts
from twinkle_server.store.figures import Kept, RolloutTable
from twinkle_server.store.sessions import Sessions

FIELD: Final = "record_rollouts"
"""Metadata of a session: `false` records none of its rows."""
_NO: Final = frozenset({"false", "no", "0"})
_BYTES = 16 * 2**20
"""Maximum size of the rows that wait for the next write; beyond it, the oldest are dropped."""
_KNOWN = 4096
"""Maximum number of sessions whose choice is kept in memory."""


class RolloutBuffer:
    """Rows that wait to be written; a crash loses those of the last second.

    Nothing is written of a session that declines it in its metadata, and of a tenant whose limit is 0.

    Args:
        table: where they are written.
        settings: of the service.
        sessions: their metadata.
        limits: returns the maximum number of rows of a run of each tenant that has a limit of its own.
    """

    def __init__(
        self, table: RolloutTable, settings: Rollouts, sessions: Sessions,
        limits: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> None:  # fmt: skip
        self._table, self._settings, self._sessions, self._limits = table, settings, sessions, limits
        self._rows: deque[Kept] = deque()
        self._bytes = 0
        self._declined: OrderedDict[tuple[str, str], bool] = OrderedDict()

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
            limits = await self._limits()
            keep = {row.run: min(self._settings.rows, limits.get(row.tenant, self._settings.rows)) for row in rows}
            wanted = [row for row in rows if keep[row.run] and not await self._declines(row.tenant, row.run)]
            await self._table.add(wanted, keep)
        except Exception:
            self._rows.extendleft(reversed(rows))
            self._bytes += sum(len(row.data) for row in rows)
            raise

    async def _declines(self, tenant: str, run: str) -> bool:
        """Return whether the session of a run declines to be recorded; its metadata never changes."""
        key = tenant, run.partition(":")[0]
        if key not in self._declined:
            try:
                metadata = (await self._sessions.get(*key)).metadata
            except NotFound:
                return False
            self._declined[key] = metadata.get(FIELD, "").strip().lower() in _NO
            while len(self._declined) > _KNOWN:
                self._declined.popitem(last=False)
        return self._declined[key]

    async def trim(self, before: float) -> None:
        """Delete rows older than a time, and the oldest ones beyond the limit of bytes."""
        await self._table.trim(self._settings.bytes, before)
