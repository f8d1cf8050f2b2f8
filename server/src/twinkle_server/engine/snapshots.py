"""Snapshots of models on disk, which limit the work lost in a crash; one thread writes them one at a time."""

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
from twinkle_server.operations import STEPS

FOLDER = "snapshots"
UNCHANGING = frozenset({"forward", "save"})
"""Kinds of operations that do not change a model."""
_MUCH = 64 * 2**20  # bytes of payloads that a replay would have to read
_PAUSE = 5.0  # seconds between attempts after a failed write
_LONG, _SHARE = 1.0, 0.1
"""A snapshot that took longer (seconds) is due again only when writing would take this share of the time."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _SnapshotState:
    number: int  # of the last applied operation
    steps: int = 0  # since the last snapshot, like the next three
    payload: int = 0
    changed: float | None = None  # time of the first change
    wanted: bool = False
    leaving: bool = False
    rests: float = 0.0  # until this time, after a long write
    not_before: float = 0.0


class Snapshots:
    """Keeps a recent snapshot of each model.

    Args:
        executor: holds the models; called only on the caller's thread.
        data: the data folder.
        later: runs a function on the caller's thread; called by the writing thread.
        report: sends a message to the service.
        detached: called for a model that may be freed, now that its snapshot is on disk.
        before_copy: called before a model is copied: if the process dies of that, no operation is to blame.
        steps: optimizer steps after which a snapshot is due.
        seconds: time after a change at which a snapshot is due.
        thread: writes one snapshot after another; the default is a new thread.
    """

    def __init__(
        self,
        executor: OperationExecutor,
        data: Path,
        later: Callable[[Callable[[], None]], None],
        report: Callable[[Message], None],
        detached: Callable[[str], None],
        steps: int,
        seconds: float,
        before_copy: Callable[[], None] = lambda: None,
        thread: Executor | None = None,
    ) -> None:
        self._before_copy = before_copy
        self._executor, self._data, self._later, self._report, self._detached = executor, data, later, report, detached
        self._steps, self._seconds = steps, seconds
        self._queues: dict[str, _SnapshotState] = {}
        self._thread = thread or ThreadPoolExecutor(1, "snapshots")
        self._writing: str | None = None
        self._draining = False
        self._alarm = math.inf  # no snapshot is due before

    def applied(self, task: Task) -> None:
        """Record the end of an operation, whether it failed or not."""
        state = self._queues.get(task.queue_id)
        if state is None:
            return
        state.number = task.number
        state.steps += task.kind in STEPS
        state.payload += len(task.payload)
        if state.changed is None and task.kind not in UNCHANGING:
            state.changed = time.monotonic()
        self._alarm = min(self._alarm, self._due(state))

    def register(self, queue_id: str, number: int) -> None:
        """Register a model in the state after operation `number`."""
        self._queues[queue_id] = _SnapshotState(number)

    def forget(self, queue_id: str) -> None:
        """Unregister a removed model; a snapshot that is being written is still reported."""
        self._queues.pop(queue_id, None)

    def want(self, queue_id: str) -> None:
        """Request a snapshot, to be written after the current one."""
        if queue_id in self._queues:
            self._queues[queue_id].wanted = True
            self._alarm = 0.0

    def leave(self, queue_id: str) -> bool:
        """Request a snapshot after which the model may be freed; return False if it may be freed now."""
        state = self._queues.get(queue_id)
        if state is None or (state.changed is None and self._writing != queue_id):
            return False
        state.leaving = True
        self._alarm = 0.0
        return True

    def drain(self) -> None:
        """Request a snapshot of each changed model, with one attempt."""
        self._draining = True
        self._alarm = 0.0

    @property
    def drained(self) -> bool:
        """Whether no snapshot remains to be written after `drain`."""
        return self._writing is None and not any(state.changed is not None for state in self._queues.values())

    def next(self) -> float | None:
        """Return the seconds until a snapshot is due; None if none will be without a further event."""
        if self._writing is not None or self._alarm == math.inf:
            return None
        return max(0.0, self._alarm - time.monotonic())

    def write_due(self) -> None:
        """Start writing a snapshot if one is due."""
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
        if state.changed is None or state.wanted or state.leaving or self._draining:
            return max(state.not_before, state.changed or 0.0)  # in the past; the oldest change comes first
        if much or state.steps >= self._steps:
            return max(state.not_before, state.rests, state.changed)
        return max(state.not_before, state.rests, state.changed + self._seconds)

    def _begin(self, queue_id: str) -> None:
        state = self._queues[queue_id]
        changed, state.changed = state.changed, None
        state.steps = state.payload = 0
        state.wanted = False
        number = state.number
        self._writing = queue_id
        began = time.monotonic()
        try:
            self._before_copy()
            copy = self._executor.snapshot(queue_id)
        except EngineFault:
            raise
        except Exception:
            _log.exception("cannot copy a model for a snapshot")
            self._end(queue_id, state, changed, None)
            return
        self._thread.submit(self._write, queue_id, number, copy, state, changed, began)

    def _write(
        self, queue_id: str, number: int, copy: SavedAdapter, state: _SnapshotState, changed: float | None, began: float
    ) -> None:
        folder = f"{FOLDER}/{new_id()}"
        message = None
        try:
            published = files.publish(self._data / folder, copy.write, {"lane": queue_id, "number": number})
            head = {
                "queue_id": queue_id,
                "number": number,
                "folder": folder,
                "digest": published.digest,
                "size": published.size,
            }
            message = Message(messages.SNAPSHOTTED, head)
            taken = time.monotonic() - began
            state.rests = time.monotonic() + taken / _SHARE if taken > _LONG else 0.0
        except Exception:
            _log.exception("cannot write a snapshot")
        self._later(lambda: self._end(queue_id, state, changed, message))

    def _end(self, queue_id: str, state: _SnapshotState, changed: float | None, message: Message | None) -> None:
        self._writing = None
        self._alarm = 0.0
        if message is not None:
            self._report(message)
        elif self._draining:
            state.changed = None  # the change will be replayed; there is no second attempt
        else:
            state.changed, state.not_before = changed or time.monotonic(), time.monotonic() + min(_PAUSE, self._seconds)
        if state.leaving and state.changed is None and self._queues.get(queue_id) is state:
            self.forget(queue_id)
            self._detached(queue_id)
