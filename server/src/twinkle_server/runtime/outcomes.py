"""The one writer of what the engine did: outcomes and snapshots reach the journal in the order they happened in."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

from twinkle_server.errors import Busy
from twinkle_server.failpoints import reach
from twinkle_server.operations import Operation, Outcome
from twinkle_server.ports import Journal
from twinkle_server.store.faults import LeaseLost

_log = logging.getLogger(__name__)
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 5.0

Entry = tuple[Operation, Outcome]
Job = Callable[[], Awaitable[None]]


class Outcomes:
    """Writes outcomes, as many in one commit as came while the last was written; keeps them while the disk is full.

    Args:
        journal: where to.
        written: is told of each when it is durable.
        lost: called when the journal may not be written any more (another process owns it).
        unwritten: called with an operation that was done and is failed in the log, because its outcome cannot be
            written; before `written`.

    Attributes:
        trouble: why nothing can be written at the moment.
    """

    def __init__(
        self,
        journal: Journal,
        written: Callable[[Operation, Outcome], None],
        lost: Callable[[str], None],
        unwritten: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self._unwritten = unwritten
        self._journal = journal
        self._written = written
        self._lost = lost
        self._queue: deque[Entry | Job] = deque()
        self._batch: deque[Entry] = deque()  # what is being written one by one
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.trouble: str | None = None

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run(), name="outcomes")

    def put(self, operation: Operation, outcome: Outcome) -> None:
        """Write how an operation ended, soon."""
        self._queue.append((operation, outcome))
        self._wake.set()

    def then(self, job: Job) -> None:
        """Do something when all that came before is durable."""
        self._queue.append(job)
        self._wake.set()

    def withdraw(self, queue: str) -> list[Operation]:
        """Remove the results of a queue that are not written yet, and return their operations; failures stay."""
        withdrawn: list[Operation] = []
        for entries in (self._batch, self._queue):
            for entry in list(entries):
                if isinstance(entry, tuple) and entry[0].queue_id == queue and entry[1].error is None:
                    entries.remove(entry)
                    withdrawn.append(entry[0])
        return withdrawn

    async def flush(self) -> None:
        """Wait until all that was put so far is durable."""
        if self._task is None or self._task.done():
            return
        reached = asyncio.get_running_loop().create_future()

        async def mark() -> None:
            if not reached.done():
                reached.set_result(None)

        self.then(mark)
        await asyncio.wait([reached, self._task], return_when=asyncio.FIRST_COMPLETED)

    async def stop(self, seconds: float) -> None:
        """Write what is left, for at most so long, and end."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await self.flush()
        except TimeoutError:
            _log.error(
                "the outcomes of %d operations were not written; the operations run again after the next start",
                len(self._queue),
            )
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._write()

    async def _write(self) -> None:
        while self._queue:
            batch: list[Entry] = []
            while self._queue and isinstance(entry := self._queue[0], tuple):
                batch.append(entry)
                self._queue.popleft()
            await self._finish(batch)
            if self._queue and not isinstance(job := self._queue[0], tuple):
                self._queue.popleft()
                await self._job(job)

    async def _finish(self, batch: list[Entry]) -> None:
        if not batch:
            return
        written = await self._persist(lambda: self._journal.finish([outcome for _, outcome in batch]))
        if written is None:
            await self._one_by_one(batch)
            return
        reach("outcomes.before_told")
        for (operation, _), outcome in zip(batch, written, strict=True):
            self._tell(operation, outcome)
        reach("outcomes.after_told")

    async def _one_by_one(self, batch: list[Entry]) -> None:
        self._batch.extend(batch)
        while self._batch:
            operation, outcome = self._batch.popleft()
            written = await self._persist(lambda outcome=outcome: self._journal.finish([outcome]))  # type: ignore[misc]
            if written is None:
                await self._fail(operation, outcome)
            else:
                self._tell(operation, written[0])

    async def _fail(self, operation: Operation, outcome: Outcome) -> None:
        """Let an operation fail whose outcome is nothing that can be written; at the worst, only who waits is told."""
        failed = replace(outcome, result=None, error="the result could not be written", category="server", also=None)
        written = await self._persist(lambda: self._journal.finish([failed]))
        if outcome.error is None:
            self._unwritten(operation)
        self._tell(operation, failed if written is None else written[0])

    def _tell(self, operation: Operation, outcome: Outcome) -> None:
        try:
            self._written(operation, outcome)
        except Exception:
            _log.exception("the outcome of operation %d was written, but notifying its listeners failed", operation.id)

    async def _job(self, job: Job) -> None:
        async def run() -> list[Outcome]:
            await job()
            return []

        await self._persist(run)

    async def _persist(self, write: Callable[[], Awaitable[list[Outcome]]]) -> list[Outcome] | None:
        """Write until the store takes it; None says that what is written is at fault, and not the store."""
        pause = _FIRST_WAIT
        while True:
            try:
                written = await write()
            except LeaseLost as error:
                self.trouble = str(error)
                self._lost(str(error))
                raise asyncio.CancelledError from error  # nothing of this process may be written any more
            except (Busy, OSError) as error:
                if self.trouble is None:
                    _log.error("cannot write outcomes to the store; retrying: %s", error)
                self.trouble = str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_WAIT)
            except Exception:
                _log.exception("cannot write an outcome")
                return None
            else:
                self.trouble = None
                return written
