"""Bytes that may be on their way to the engine: enough to fuse passes from, and shared among tenants in turn."""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

_FRAME = 512


@dataclass(slots=True)
class _Waiting:
    size: int
    granted: asyncio.Future[None]


class Window:
    """A bound on bytes, for which tenants wait in turn, whatever the number of their lanes.

    Args:
        limit: bytes; a single operation that is larger goes when nothing else is under way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()

    def try_take(self, size: int) -> bool:
        """Take room for an operation if there is some and nobody waits for it."""
        if self._waiting or not self._fits(size):
            return False
        self._used += size + _FRAME
        return True

    async def take(self, tenant: str, size: int) -> None:
        """Wait for room for an operation."""
        if self.try_take(size):
            return
        entry = _Waiting(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(entry)
        try:
            await entry.granted
        except asyncio.CancelledError:
            if entry.granted.done() and not entry.granted.cancelled():
                self.give(size)
            else:
                self._forget(tenant, entry)
            raise

    def give(self, size: int) -> None:
        """Give room back."""
        self._used -= size + _FRAME
        self._grant()

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size + _FRAME <= self._limit

    def _forget(self, tenant: str, entry: _Waiting) -> None:
        queue = self._waiting.get(tenant, deque())
        if entry in queue:
            queue.remove(entry)
        if not queue:
            self._waiting.pop(tenant, None)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            if not self._fits(queue[0].size):
                return
            entry = queue.popleft()
            self._waiting.pop(tenant)
            if queue:
                self._waiting[tenant] = queue
            if not entry.granted.done():
                self._used += entry.size + _FRAME
                entry.granted.set_result(None)
