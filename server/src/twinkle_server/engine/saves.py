"""Checkpoints on their way to the disk: copied on the engine's own thread, written on others, a few at a time."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from twinkle.errors import EngineFault
from twinkle_server.engine import files
from twinkle_server.engine.encryption import Encrypted
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.queues import Lanes, Task
from twinkle_server.payloads import Save

if TYPE_CHECKING:
    from twinkle_server.engine.runner import Sources

Background = Callable[[Callable[[], files.Published], Callable[[files.Published | Exception], None]], None]
TOGETHER = 2
"""Copies that may be in memory; who saves while so many are being written waits, and its lane with it."""


class End(Protocol):
    """Reports how an operation ended."""

    def __call__(self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None) -> None:
        """See the class."""


class Saves:
    """Saves models; a lane is held until its checkpoint is on the disk, and the others go on.

    Args:
        executor: has the models.
        sources: knows where checkpoints are.
        waiting: lanes.
        background: runs a function on a thread, and then another on this one.
        end: see `End`.
    """

    def __init__(
        self, executor: Executor, sources: "Sources", waiting: Lanes, background: Background, end: End
    ) -> None:
        self._executor, self._sources, self._waiting = executor, sources, waiting
        self._background, self._end = background, end
        self._queue: deque[Task] = deque()
        self._writing = 0

    def add(self, task: Task) -> None:
        """Save a model as it is now."""
        self._waiting.hold(task.lane)
        self._queue.append(task)
        self._begin_what_fits()

    def _begin_what_fits(self) -> None:
        while self._queue and self._writing < TOGETHER:
            task = self._queue.popleft()
            try:
                self._begin(task)
            except EngineFault:
                raise
            except Exception as error:
                self._over(task, error)

    def _begin(self, task: Task) -> None:
        save = Save.parse(task.payload)
        place = self._sources.place(save.folder)
        copy, row = self._executor.save(task.lane, save)
        if save.recipients:
            copy = Encrypted(copy, tuple(save.recipients))

        def saved(published: files.Published | Exception) -> None:
            self._writing -= 1
            if isinstance(published, Exception):
                self._over(task, published)
            else:
                self._sources.trust(save.folder)
                self._over(task, b"{}", {"size_bytes": published.size, **row, "digest": published.digest})
            self._begin_what_fits()

        self._writing += 1
        self._background(lambda: files.publish(place, copy.write, {"kind": save.kind, "number": task.number}), saved)

    def _over(self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None) -> None:
        self._waiting.release(task.lane)
        self._end(task, result, extra)
