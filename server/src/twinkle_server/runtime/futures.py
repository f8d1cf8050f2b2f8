"""Futures that clients wait for: one event per operation instead of polling, and a cache of recent results."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from twinkle_server.errors import Busy
from twinkle_server.operations import Future, Operation
from twinkle_server.ports import Journal

_RECENT_BYTES = 16 * 2**20
_ENTRY = 1024  # bytes of an entry without its result
_POLLS = 20_000


@dataclass(slots=True)
class _Open:
    operation: Operation
    since: float = field(default_factory=lambda: time.monotonic())
    resolved: asyncio.Event = field(default_factory=asyncio.Event)
    future: Future | None = None


class Futures:
    """The futures of unfinished operations, and a cache of those that finished last.

    Args:
        journal: holds all other futures.
        each: maximum number of waiting requests of one tenant.
    """

    def __init__(self, journal: Journal, each: int = 4096) -> None:
        self._each = each
        self._polls_of: Counter[str] = Counter()
        self._journal = journal
        self._open: dict[str, _Open] = {}
        self._recent: OrderedDict[str, tuple[Operation, Future]] = OrderedDict()
        self._recent_bytes = 0
        self._polls = 0
        self._closed = False
        self.waiting: Counter[str] = Counter()

    def open(self, operation: Operation) -> None:
        """Create the future of an operation."""
        if operation.request not in self._open:
            self._open[operation.request] = _Open(operation)
            self.waiting[operation.tenant] += 1

    def find(self, request: str, tenant: str) -> Operation | None:
        """Return the operation of an open future of a tenant."""
        entry = self._open.get(request)
        return entry.operation if entry is not None and entry.operation.tenant == tenant else None

    def unfinished(self) -> Iterator[tuple[Operation, float]]:
        """Yield the operations of open futures, oldest first, and the seconds since each was opened."""
        now = time.monotonic()
        for entry in self._open.values():
            yield entry.operation, now - entry.since

    def resolve(self, operation: Operation, future: Future) -> float:
        """Resolve a future, after its outcome is durable, and wake all waiting requests.

        Returns:
            Seconds since it was opened.
        """
        entry = self._open.pop(operation.request, None)
        if entry is None:
            return 0.0
        self.waiting[operation.tenant] -= 1
        if self.waiting[operation.tenant] <= 0:
            del self.waiting[operation.tenant]
        entry.future = future
        entry.resolved.set()
        self._remember(operation, future)
        return time.monotonic() - entry.since

    async def wait(self, request: str, tenant: str, seconds: float) -> Future:
        """Return a future when it is resolved, or its current state after `seconds`.

        Raises:
            NotFound: the tenant has no such request.
            Gone: its result is no longer kept.
            Busy: too many requests of the tenant, or of all tenants, are waiting.
        """
        entry = self._open.get(request)
        if entry is None or entry.operation.tenant != tenant:
            operation, recent = self._recent.get(request, (None, None))
            if operation is None or recent is None or operation.tenant != tenant:
                return await self._journal.future(request, tenant)
            return self._read(operation, recent)
        if (polls := self._polls_of[tenant]) >= self._each or self._polls >= _POLLS:
            raise Busy(
                f"too many pending result requests: you have {polls}, the service has {self._polls}", retry_after=2.0
            )
        if not self._closed and seconds > 0:
            await self._hold(entry, seconds)
        operation = entry.operation
        if entry.future is None:
            return Future(operation.kind, "pending", operation.queue_id)
        return self._read(operation, entry.future)

    def _read(self, operation: Operation, future: Future) -> Future:
        self._journal.reads.setdefault(operation.id, time.time())
        return future

    async def _hold(self, entry: _Open, seconds: float) -> None:
        tenant = entry.operation.tenant
        self._polls += 1
        self._polls_of[tenant] += 1
        try:
            async with asyncio.timeout(seconds):
                await entry.resolved.wait()
        except TimeoutError:
            pass
        finally:
            self._polls -= 1
            self._polls_of[tenant] -= 1
            if not self._polls_of[tenant]:
                del self._polls_of[tenant]

    def close(self) -> None:
        """Release all waiting requests with the current state, and let no new ones wait."""
        self._closed = True
        for entry in self._open.values():
            entry.resolved.set()

    def forget_recent(self) -> None:
        """Clear the cache of results; called after the journal was purged."""
        self._recent.clear()
        self._recent_bytes = 0

    @property
    def polls(self) -> int:
        """Number of waiting requests."""
        return self._polls

    def oldest(self) -> float:
        """Return the age of the oldest open future in seconds."""
        first = next(iter(self._open.values()), None)
        return 0.0 if first is None else time.monotonic() - first.since

    def __len__(self) -> int:
        return len(self._open)

    def _remember(self, operation: Operation, future: Future) -> None:
        self._recent[operation.request] = (operation, future)
        self._recent_bytes += _size(future)
        while self._recent_bytes > _RECENT_BYTES:
            _, (_, dropped) = self._recent.popitem(last=False)
            self._recent_bytes -= _size(dropped)


def _size(future: Future) -> int:
    return len(future.result or b"") + _ENTRY
