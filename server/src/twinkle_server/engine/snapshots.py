"""Copies of models' states on the disk, so that a crash costs seconds; a thread writes them one at a time."""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from twinkle.engine import SavedAdapter
from twinkle.errors import EngineFault
from twinkle_server.engine import files, messages
from twinkle_server.engine.executor import Executor as OperationExecutor
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task
from twinkle_server.ids import new_id

FOLDER = "snapshots"
UNCHANGING = frozenset({"forward", "save"})
"""Kinds of operations after which a model is what it was before."""
_MUCH = 64 * 2**20  # bytes of payloads that a replay would have to read
_PAUSE = 5.0  # seconds after a disk that took nothing
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _SnapshotState:
    number: int  # of the last operation that was applied
    steps: int = 0  # since the last snapshot, like the next three
    payload: int = 0
    changed: float | None = None  # when it first did
    wanted: bool = False
    leaving: bool = False
    not_before: float = 0.0


class Snapshots:
    """Keeps a snapshot of each model that is not much older than the model.

    Args:
        executor: has the models; called on the caller's thread alone.
        data: the data directory.
        later: runs a function on the caller's thread; called by the writing thread.
        report: sends a message to the service.
        left: called for a model that may go, now that its snapshot is on the disk.
        begins: called before a model is copied: if the process dies of that, no operation is to blame.
        steps: optimizer steps after which a snapshot is due.
        seconds: after which one is due for a model that changed.
        thread: writes one snapshot after another; by default a thread of its own.
    """

    def __init__(
        self,
        executor: OperationExecutor,
        data: Path,
        later: Callable[[Callable[[], None]], None],
        report: Callable[[Message], None],
        left: Callable[[str], None],
        steps: int,
        seconds: float,
        begins: Callable[[], None] = lambda: None,
        thread: Executor | None = None,
    ) -> None:
        self._begins = begins
        self._executor, self._data, self._later, self._report, self._left = executor, data, later, report, left
        self._steps, self._seconds = steps, seconds
        self._queues: dict[str, _SnapshotState] = {}
        self._thread = thread or ThreadPoolExecutor(1, "snapshots")
        self._writing: str | None = None
        self._draining = False
        self._alarm = math.inf  # no snapshot is due before

    def applied(self, task: Task) -> None:
        """Say that an operation of a model is over, whether it failed or not."""
        state = self._queues.get(task.queue_id)
        if state is None:
            return
        state.number = task.number
        state.steps += task.kind == "optim_step"
        state.payload += len(task.payload)
        if state.changed is None and task.kind not in UNCHANGING:
            state.changed = time.monotonic()
        self._alarm = min(self._alarm, self._due(state))

    def there(self, queue_id: str, number: int) -> None:
        """Say that a model is there, as it was after an operation."""
        self._queues[queue_id] = _SnapshotState(number)

    def forget(self, queue_id: str) -> None:
        """Say that a model is gone; a snapshot that is being written is still reported."""
        self._queues.pop(queue_id, None)

    def want(self, queue_id: str) -> None:
        """Ask for a snapshot as soon as the one that is being written is done."""
        if queue_id in self._queues:
            self._queues[queue_id].wanted = True
            self._alarm = 0.0

    def leave(self, queue_id: str) -> bool:
        """Ask for a snapshot after which a model may go; False if that is the case already."""
        state = self._queues.get(queue_id)
        if state is None or (state.changed is None and self._writing != queue_id):
            return False
        state.leaving = True
        self._alarm = 0.0
        return True

    def drain(self) -> None:
        """Ask for a snapshot of each model that changed, tried once."""
        self._draining = True
        self._alarm = 0.0

    @property
    def drained(self) -> bool:
        """Whether there is nothing to be written after `drain`."""
        return self._writing is None and not any(state.changed is not None for state in self._queues.values())

    def next(self) -> float | None:
        """Return the seconds until `tend` may have something to do; None if that will not come by itself."""
        if self._writing is not None or self._alarm == math.inf:
            return None
        return max(0.0, self._alarm - time.monotonic())

    def tend(self) -> None:
        """Begin to write the snapshot that is due, if one is."""
        now = time.monotonic()
        if self._writing is not None or now < self._alarm:
            return
        due = ((self._due(state), queue_id) for queue_id, state in self._queues.items())
        self._alarm, queue_id = min(due, default=(math.inf, ""))
        if self._alarm <= now:
            self._begin(queue_id)

    def _due(self, state: _SnapshotState) -> float:
        much = state.payload >= _MUCH or state.wanted
        if state.changed is None and not much:
            return math.inf
        if state.changed is None or much or state.leaving or self._draining or state.steps >= self._steps:
            return max(state.not_before, state.changed or 0.0)  # it is past, and the model that waits longest is first
        return max(state.not_before, state.changed + self._seconds)

    def _begin(self, queue_id: str) -> None:
        state = self._queues[queue_id]
        changed, state.changed = state.changed, None
        state.steps = state.payload = 0
        state.wanted = False
        number = state.number
        self._writing = queue_id
        try:
            self._begins()
            copy = self._executor.snapshot(queue_id)
        except EngineFault:
            raise
        except Exception:
            _log.exception("cannot copy a model for a snapshot")
            self._end(queue_id, state, changed, None)
            return
        self._thread.submit(self._write, queue_id, number, copy, state, changed)

    def _write(
        self, queue_id: str, number: int, copy: SavedAdapter, state: _SnapshotState, changed: float | None
    ) -> None:
        folder = f"{FOLDER}/{new_id()}"
        message = None
        try:
            done = files.publish(self._data / folder, copy.write, {"lane": queue_id, "number": number})
            head = {"queue_id": queue_id, "number": number, "folder": folder, "digest": done.digest, "size": done.size}
            message = Message(messages.SNAPSHOTTED, head)
        except Exception:
            _log.exception("cannot write a snapshot")
        self._later(lambda: self._end(queue_id, state, changed, message))

    def _end(self, queue_id: str, state: _SnapshotState, changed: float | None, message: Message | None) -> None:
        self._writing = None
        self._alarm = 0.0
        if message is not None:
            self._report(message)
        elif self._draining:
            state.changed = None  # what is not on the disk is replayed; nobody waits for another attempt
        else:
            state.changed, state.not_before = changed or time.monotonic(), time.monotonic() + min(_PAUSE, self._seconds)
        if state.leaving and state.changed is None and self._queues.get(queue_id) is state:
            self.forget(queue_id)
            self._left(queue_id)
