"""Runs the operations that the scheduler selected, writes checkpoints, and reports results to the service."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import orjson

from twinkle.errors import EngineFault
from twinkle_server.engine import files, messages, queues
from twinkle_server.engine.encryption import Encrypted
from twinkle_server.engine.errors import Lost, failed, is_out_of_memory, is_passing
from twinkle_server.engine.executor import Cost, Executor, Pass
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Composition, Task, TaskQueues, done
from twinkle_server.engine.scheduler import TimeSharing
from twinkle_server.engine.snapshots import Snapshots
from twinkle_server.failpoints import reach
from twinkle_server.operations import PASSES, Create, Load, OptimStep, Save

Background = Callable[[Callable[[], files.Published], Callable[[files.Published | Exception], None]], None]
TOGETHER = 2
"""Copies that may be in memory; who saves while so many are being written waits, and its queue with it."""


class End(Protocol):
    """Reports how an operation ended."""

    def __call__(self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None) -> None:
        """See the class."""


class Saves:
    """Saves models; a queue is held until its checkpoint is on the disk, and the others go on.

    Args:
        executor: has the models.
        sources: knows where checkpoints are.
        waiting: queues.
        background: runs a function on a thread, and then another on this one.
        end: see `End`.
    """

    def __init__(
        self, executor: Executor, sources: "Sources", waiting: TaskQueues, background: Background, end: End
    ) -> None:
        self._executor, self._sources, self._waiting = executor, sources, waiting
        self._background, self._end = background, end
        self._queue: deque[Task] = deque()
        self._writing = 0

    def add(self, task: Task) -> None:
        """Save a model as it is now."""
        self._waiting.hold(task.queue_id)
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
        copy, row = self._executor.save(task.queue_id, save)
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
        self._waiting.release(task.queue_id)
        self._end(task, result, extra)


_REMEMBERED = 4096


class Sources:
    """Folders of checkpoints; each is compared with its manifest once.

    Args:
        data: the data directory, below which they all are.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._sound: dict[str, None] = {}

    def place(self, folder: str) -> Path:
        """Return where a folder of that relative name is, or will be.

        Raises:
            ValueError: it is no relative name below the data directory.
        """
        path = PurePosixPath(folder)
        if not folder or path.is_absolute() or ".." in path.parts:
            raise ValueError("a folder must be inside the data directory")
        return self._data / path

    def __call__(self, folder: str | None) -> Path | None:
        """Return a checkpoint's folder; None is none.

        Raises:
            Damaged: it is not what was published.
        """
        if folder is None:
            return None
        place = self.place(folder)
        if folder not in self._sound:
            files.verify(place)
            self.trust(folder)
        return place

    def trust(self, folder: str) -> None:
        """Say that a folder is what was published; it is not read for that again."""
        self._sound[folder] = None
        if len(self._sound) > _REMEMBERED:
            del self._sound[next(iter(self._sound))]


class OperationRunner:
    """Executes the operations that the scheduler selected.

    Args:
        executor: computes.
        sources: finds checkpoints.
        snapshots: is told what was applied.
        waiting: queues; one whose checkpoint is on its way to the disk is held.
        background: runs a function on a thread, and then another on this one.
        interleaving: is told what is under way; its clock stands still while others work.
        report: sends a message to the service.
    """

    def __init__(
        self,
        executor: Executor,
        sources: Sources,
        snapshots: Snapshots,
        waiting: TaskQueues,
        background: Background,
        interleaving: TimeSharing,
        report: Callable[[Message], None],
    ) -> None:
        self._executor, self._sources, self._snapshots = executor, sources, snapshots
        self._report = report
        self._interleaving = interleaving
        self._saves = Saves(executor, sources, waiting, background, self._end)
        self._broken: set[str] = set()

    def run(self, tasks: Sequence[Task]) -> None:
        """Do the tasks of a turn.

        Raises:
            EngineFault: the process must end; what was done was reported.
        """
        tasks = [task for task in tasks if not self._skips(task)]
        if not tasks:
            return
        kind = tasks[0].kind
        if kind in queues.ORDERS:
            raise RuntimeError(f"unknown kind of turn {kind}")
        self._interleaving.begin([task.id for task in tasks])
        begin = self._interleaving.clock()
        if kind in PASSES:
            cost = self._passes(tasks)
        elif kind == "optim_step":
            cost = self._steps(tasks)
        else:
            self._barrier(tasks[0])
            cost = Cost()
        reach("engine.after_turn")
        self._passed("pass" if kind in PASSES else kind, tasks, self._interleaving.clock() - begin, cost)

    def restore(self, task: Task) -> None:
        """Do a RESTORE; where memory or descriptors are lacking, the service asks for it again later."""
        error: Exception | None = None
        try:
            self._executor.remove(task.queue_id)
            self._snapshots.forget(task.queue_id)
            self._broken.discard(task.queue_id)
            if folder := task.payload.decode():
                self._snapshots.there(task.queue_id, self._restored(task.queue_id, folder))
        except EngineFault:
            raise
        except Exception as caught:
            error = caught
            self._lose(task.queue_id)
        words = None if error is None else f"{type(error).__name__}: {error}"
        later = {"later": True} if is_passing(error) else {}
        self._report(Message(messages.RESTORED, {"queue_id": task.queue_id, "error": words} | later))

    def forget(self, queue_id: str) -> None:
        """Free a model's memory."""
        self._executor.remove(queue_id)
        self._broken.discard(queue_id)

    def _lose(self, queue_id: str) -> None:
        """Let nothing run on a model that is not what it was, and keep no snapshot of it."""
        self._snapshots.forget(queue_id)
        self._broken.add(queue_id)

    def _restored(self, queue_id: str, folder: str) -> int:
        place = self._sources.place(folder)
        facts = files.verify(place).facts
        if facts.get("lane") != queue_id or not isinstance(facts.get("number"), int):
            raise files.Damaged(f"{place.name} is no snapshot of this model")
        self._executor.restore(queue_id, place)
        return int(facts["number"])

    def _skips(self, task: Task) -> bool:
        """End a task that needs no turn."""
        if task.queue_id in self._broken:
            self._end(task, Lost())
            return True
        if task.replay and task.kind in ("forward", "save"):  # they change nothing, and their results are known
            self._end(task, b"")
            return True
        return False

    def _end(
        self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None,
        composition: Composition | None = None,
    ) -> None:  # fmt: skip
        """Report how a task ended, and that its number is used."""
        if isinstance(result, EngineFault):
            raise result
        if task.replay and isinstance(result, Exception):
            self._lose(task.queue_id)
        self._snapshots.applied(task)
        self._report(failed(task, result) if isinstance(result, Exception) else done(task, result, extra, composition))

    def _passes(self, tasks: Sequence[Task], again: bool = False) -> Cost:
        passes = [Pass(task.queue_id, task.payload, task.number, task.composition) for task in tasks]
        try:
            results, cost = self._executor.run(passes)
        except EngineFault:
            raise
        except Exception as error:
            if len(tasks) > 1:
                return self._halves(tasks)
            if is_out_of_memory(error) and not again:  # what others held a moment ago may be free
                return self._passes(tasks, again=True)
            results, cost = [error], Cost()
        reach("engine.after_pass")
        for place, (task, result) in enumerate(zip(tasks, results, strict=True)):
            trains = task.kind == "forward_backward" and not task.replay
            self._end(task, result, composition=cost.compositions.get(place) if trains else None)
        return cost

    def _halves(self, tasks: Sequence[Task]) -> Cost:
        """Do a pass in two: for want of memory, or to find the operation that it cannot be done with."""
        middle = len(tasks) // 2
        first, second = self._passes(tasks[:middle]), self._passes(tasks[middle:])
        return Cost(first.tokens + second.tokens, first.padded + second.padded, first.flops + second.flops)

    def _steps(self, tasks: Sequence[Task]) -> Cost:
        readable: list[tuple[Task, OptimStep]] = []
        for task in tasks:
            try:
                readable.append((task, OptimStep.parse(task.payload)))
            except (TypeError, ValueError) as error:
                self._end(task, error)
        self._step(readable)
        return Cost()

    def _step(self, steps: Sequence[tuple[Task, OptimStep]], again: bool = False) -> None:
        if not steps:
            return
        try:
            results = self._executor.step([(task.queue_id, step) for task, step in steps])
        except EngineFault:
            raise
        except Exception as error:
            if len(steps) > 1:
                middle = len(steps) // 2
                self._step(steps[:middle])
                self._step(steps[middle:])
                return
            if is_out_of_memory(error) and not again:
                self._step(steps, again=True)
                return
            results = [error]
        reach("engine.after_step")
        for (task, _), result in zip(steps, results, strict=True):
            self._end(task, result if isinstance(result, Exception) else _metrics(result))

    def _barrier(self, task: Task) -> None:
        try:
            if task.kind == "save":
                self._saves.add(task)
                return
            self._do(task)
        except EngineFault:
            raise
        except Exception as error:
            self._end(task, error)
        else:
            self._end(task, b"{}")

    def _do(self, task: Task) -> None:
        if task.kind == "create":
            create = Create.parse(task.payload)
            self._executor.create(task.queue_id, create, self._sources(create.source))
            self._snapshots.there(task.queue_id, task.number)
        elif task.kind == "load":
            load = Load.parse(task.payload)
            source = self._sources(load.source)
            if source is None:
                raise ValueError("the load operation has no checkpoint")
            self._executor.load(task.queue_id, load, source)
        elif task.kind == "unload":
            self._snapshots.forget(task.queue_id)
            self._executor.remove(task.queue_id)
        else:
            raise ValueError(f"unknown operation {task.kind!r}")

    def _passed(self, kind: str, tasks: Sequence[Task], seconds: float, cost: Cost) -> None:
        head = {
            "kind": kind,
            "seconds": seconds,
            "tokens": cost.tokens,
            "padded": cost.padded,
            "flops": cost.flops,
            "tenants": len({task.tenant for task in tasks}),
            "operations": len(tasks),
        }
        self._report(Message(messages.PASSED, head))


def _metrics(found: Mapping[str, float]) -> bytes:
    """Write an optimizer step's metrics; JSON has no word for those that are not finite, and clients expect numbers."""
    return orjson.dumps({"metrics": {name: value for name, value in found.items() if math.isfinite(value)}})
