"""What must be looked after from time to time; each chore fails for itself, and is done again in its turn."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Chore:
    """Something to be done.

    Attributes:
        name: for the log.
        every: seconds from one time to the next.
        work: does it.
        due: when it is next due, on the monotonic clock.
    """

    name: str
    every: float
    work: Callable[[], Awaitable[object]]
    due: float = 0.0


class Janitor:
    """Does chores, one after another."""

    def __init__(self) -> None:
        self._chores: list[Chore] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, every: float, work: Callable[[], Awaitable[object]]) -> None:
        """Take on a chore."""
        self._chores.append(Chore(name, every, work, time.monotonic() + every))

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="janitor")

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._chores:
            chore = min(self._chores, key=lambda entry: entry.due)
            await asyncio.sleep(max(0.0, chore.due - time.monotonic()))
            try:
                await chore.work()
            except Exception:
                _log.exception("%s failed; it will be retried", chore.name)
            chore.due = time.monotonic() + chore.every
