"""Runs the operations selected by the scheduler, writes checkpoints, and reports results to the service."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import orjson

from twinkle.errors import EngineFault
from twinkle_server.engine import files, messages, queues
from twinkle_server.engine.encryption import Encrypted
from twinkle_server.engine.errors import Lost, NotInMemory, failed, is_out_of_memory, is_passing
from twinkle_server.engine.executor import Cost, Executor, Pass
from twinkle_server.engine.messages import Message
from twinkle_server.engine.native.models import Noted
from twinkle_server.engine.progress import Progress
from twinkle_server.engine.queues import Composition, Task, TaskQueues, done, rollouts
from twinkle_server.engine.scheduler import TimeSharing
from twinkle_server.engine.snapshots import Snapshots
from twinkle_server.failpoints import reach
from twinkle_server.operations import NATIVE, PASSES, STEPS, Create, Embed, Load, OptimStep, Save, turn_name

Background = Callable[[Callable[[], files.Published], Callable[[files.Published | Exception], None]], None]
TOGETHER = 2
"""Maximum number of copies in memory; further saves wait, together with their queues."""


class End(Protocol):
    """Reports the end of an operation."""

    def __call__(self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None) -> None:
        """Report the result or the error of a task."""


class Saves:
    """Saves models; a queue is held until its checkpoint is on disk, while other queues continue.

    Args:
        executor: holds the models.
        sources: locates checkpoints.
        waiting: the queues.
        background: runs a function on a thread, and then a second one on the main thread.
        end: reports the end of a save.
    """

    def __init__(
        self, executor: Executor, sources: "Sources", waiting: TaskQueues, background: Background, end: End
    ) -> None:
        self._executor, self._sources, self._waiting = executor, sources, waiting
        self._background, self._end = background, end
        self._queue: deque[Task] = deque()
        self._writing = 0

    def add(self, task: Task) -> None:
        """Save the current state of a model."""
        self._waiting.hold(task.queue_id)
        self._queue.append(task)
        self._start_saves()

    def _start_saves(self) -> None:
        while self._queue and self._writing < TOGETHER:
            task = self._queue.popleft()
            try:
                self._begin(task)
            except EngineFault:
                raise
            except Exception as error:
                self._finish(task, error)

    def _begin(self, task: Task) -> None:
        save = Save.parse(task.payload)
        place = self._sources.place(save.folder)
        copy, row = self._executor.save(task.queue_id, save)
        if save.recipients:
            copy = Encrypted(copy, tuple(save.recipients))

        def saved(published: files.Published | Exception) -> None:
            self._writing -= 1
            if isinstance(published, Exception):
                self._finish(task, published)
            else:
                self._sources.trust(save.folder)
                self._finish(task, b"{}", {"size_bytes": published.size, **row, "digest": published.digest})
            self._start_saves()

        self._writing += 1
        self._background(lambda: files.publish(place, copy.write, {"kind": save.kind, "number": task.number}), saved)

    def _finish(self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None) -> None:
        self._waiting.release(task.queue_id)
        self._end(task, result, extra)


_REMEMBERED = 4096


class Sources:
    """Folders of checkpoints; each is verified once.

    Args:
        data: the data folder.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._verified: dict[str, None] = {}

    def place(self, folder: str) -> Path:
        """Return the path of a folder, whether or not it exists.

        Raises:
            ValueError: `folder` is not a relative path inside the data folder.
        """
        path = PurePosixPath(folder)
        if not folder or path.is_absolute() or ".." in path.parts:
            raise ValueError("a folder must be inside the data folder")
        return self._data / path

    def __call__(self, folder: str | None) -> Path | None:
        """Return the path of a checkpoint after verifying it; None stays None.

        Raises:
            Damaged: it differs from what was published.
        """
        if folder is None:
            return None
        place = self.place(folder)
        if folder not in self._verified:
            files.verify(place)
            self.trust(folder)
        return place

    def trust(self, folder: str) -> None:
        """Mark a folder as verified."""
        self._verified[folder] = None
        if len(self._verified) > _REMEMBERED:
            del self._verified[next(iter(self._verified))]


class Unreported:
    """Results of passes that run together, reported in the order of their numbers.

    Args:
        tasks: the tasks, those of one queue in order.
        end: reports the end of a task: its result, its place among the tasks, and the cost of the call.
    """

    def __init__(self, tasks: Sequence[Task], end: Callable[[Task, bytes | Exception, int, Cost], None]) -> None:
        self._tasks, self._end = tasks, end
        self._results: dict[int, tuple[bytes | Exception, Cost]] = {}
        self._waiting: dict[str, deque[int]] = {}
        for place, task in enumerate(tasks):
            self._waiting.setdefault(task.queue_id, deque()).append(place)
        self.some_reported = False

    def put(self, place: int, result: bytes | Exception, cost: Cost) -> None:
        """Add the result of a task, and report it if all earlier ones of its queue were.

        Raises:
            EngineFault: a result could not be reported.
        """
        self._results[place] = result, cost
        waiting = self._waiting[self._tasks[place].queue_id]
        while waiting and waiting[0] in self._results:
            first = waiting.popleft()
            self.some_reported = True
            try:
                self._end(self._tasks[first], *self._place(first))
            except EngineFault:
                raise
            except Exception as error:  # it has trained: a further run, or a snapshot that does not count it, is wrong
                raise EngineFault(f"the end of operation {self._tasks[first].number} cannot be reported") from error

    def _place(self, place: int) -> tuple[bytes | Exception, int, Cost]:
        result, cost = self._results[place]
        return result, place, cost

    def close(self) -> None:
        """Forget results that wait for an earlier task: only errors found before the call have such."""
        self._results.clear()

    def tasks(self) -> list[Task]:
        """Return the tasks that were not reported, in order."""
        return [self._tasks[place] for place in sorted(place for places in self._waiting.values() for place in places)]


class OperationRunner:
    """Executes the operations selected by the scheduler.

    Args:
        executor: computes.
        sources: locates checkpoints.
        snapshots: follows the state of the models.
        waiting: the queues; a queue is held while its checkpoint is written.
        background: runs a function on a thread, and then a second one on the main thread.
        interleaving: reports which operations run, and measures their time without sampling.
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
        self._progress = Progress(interleaving.clock, report, executor.pass_tokens)
        self._broken: set[str] = set()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run the tasks of a turn.

        Raises:
            EngineFault: the process must end; finished tasks were reported.
        """
        if tasks[0].kind == queues.EMBED:
            self._embed(tasks[0])
            return
        tasks = [task for task in tasks if not self._end_without_turn(task)]
        if not tasks:
            return
        kind = tasks[0].kind
        if kind in queues.ORDERS:
            raise RuntimeError(f"unknown kind of turn {kind}")
        self._interleaving.begin([task.id for task in tasks])
        begin = self._interleaving.clock()
        if kind in PASSES:
            self._progress.begin(tasks)
            cost = self._passes(tasks)
        elif kind in STEPS:
            cost = self._steps(tasks)
        else:
            self._barrier(tasks[0])
            cost = Cost()
        reach("engine.after_turn")
        self._passed(turn_name(kind), tasks, self._interleaving.clock() - begin, cost)

    def between(self) -> None:
        """Note that the engine has ended a pass of a turn, and goes on with another."""
        self._progress.between()

    def _embed(self, task: Task) -> None:
        self._interleaving.begin([task.id])
        try:
            embed = Embed.parse(task.payload)
            if self.is_broken(task.queue_id):
                raise NotInMemory(task.queue_id)
            self._report(done(task, self._executor.embed(embed, self._sources(embed.source))))
        except EngineFault:
            raise
        except Exception as error:
            self._report(failed(task, error))

    def restore(self, task: Task) -> None:
        """Run a RESTORE; if memory or file descriptors are exhausted, the service retries it later."""
        error: Exception | None = None
        try:
            self._executor.remove(task.queue_id)
            self._snapshots.forget(task.queue_id)
            self._broken.discard(task.queue_id)
            if folder := task.payload.decode():
                self._snapshots.register(task.queue_id, self._restored(task.queue_id, folder))
        except EngineFault:
            raise
        except Exception as caught:
            error = caught
            self._mark_broken(task.queue_id)
        reason = None if error is None else f"{type(error).__name__}: {error}"
        later = {"later": True} if is_passing(error) else {}
        self._report(Message(messages.RESTORED, {"queue_id": task.queue_id, "error": reason} | later))

    def forget(self, queue_id: str) -> None:
        """Free a model's memory."""
        self._executor.remove(queue_id)
        self._broken.discard(queue_id)

    def is_broken(self, queue_id: str) -> bool:
        """Return whether the state of a model is unusable."""
        return queue_id in self._broken

    def _mark_broken(self, queue_id: str) -> None:
        """Mark the state of a model as unusable: no operation runs on it, and no snapshot of it is kept."""
        self._snapshots.forget(queue_id)
        self._broken.add(queue_id)

    def _restored(self, queue_id: str, folder: str) -> int:
        place = self._sources.place(folder)
        facts = files.verify(place).facts
        if facts.get("lane") != queue_id or not isinstance(facts.get("number"), int):
            raise files.Damaged(f"{place.name} is not a snapshot of this model")
        self._executor.restore(queue_id, place)
        return int(facts["number"])

    def _end_without_turn(self, task: Task) -> bool:
        """End a task that needs no turn, and return whether it did."""
        if task.queue_id in self._broken:
            self._end(task, Lost())
            return True
        if task.replay and task.kind in ("forward", "save"):  # they change no state, and their results are known
            self._end(task, b"")
            return True
        return False

    def _end(
        self, task: Task, result: bytes | Exception, extra: dict[str, Any] | None = None,
        composition: Composition | None = None, figures: str | None = None,
    ) -> None:  # fmt: skip
        """Report the end of a task, and count its number as applied."""
        if isinstance(result, EngineFault):
            raise result
        if task.replay and isinstance(result, Exception):
            self._mark_broken(task.queue_id)
        self._snapshots.applied(task)
        if task.kind in NATIVE and self._executor.embeds(task.queue_id):
            extra = {"embeds": True}
        if isinstance(result, Exception):
            self._report(failed(task, result))
        else:
            self._report(done(task, result, extra, composition, figures))

    def _passes(self, tasks: Sequence[Task], again: bool = False) -> Cost:
        """Run tasks together; each is reported as soon as it and earlier ones of its queue have ended."""
        left = Unreported(tasks, self._end_pass)
        passes = [
            Pass(
                task.queue_id, task.payload, task.number, task.composition, native=task.kind in NATIVE,
                record=not task.replay,
            )
            for task in tasks
        ]  # fmt: skip
        self._progress.runs()
        try:
            _, cost = self._executor.run(passes, left.put)
        except EngineFault:
            raise
        except Exception as error:
            return self._passes_left(left, error, again)
        return cost

    def _passes_left(self, left: "Unreported", error: Exception, again: bool) -> Cost:
        """Run what an error has left undone in two halves, or again, or fail it."""
        left.close()
        tasks = left.tasks()
        if len(tasks) > 1 or (tasks and left.some_reported):
            return self._halves(tasks)
        if tasks and is_out_of_memory(error) and not again:  # memory of other tasks may be free now
            return self._passes(tasks, again=True)
        for task in tasks:
            self._end_pass(task, error, 0, Cost())
        return Cost()

    def _end_pass(self, task: Task, result: bytes | Exception, place: int, cost: Cost) -> None:
        reach("engine.after_pass")
        trains = task.kind in ("forward_backward", "native_pass") and not task.replay
        recorded = cost.recorded.get(place)
        self._end(
            task, result, composition=cost.compositions.get(place) if trains else None,
            figures=None if recorded is None else recorded.figures,
        )  # fmt: skip
        if recorded is not None and recorded.rollouts:
            self._report(rollouts(task, recorded))

    def _halves(self, tasks: Sequence[Task]) -> Cost:
        """Run a pass in two halves, because memory was exhausted or to isolate the operation that fails."""
        if len(tasks) < 2:
            return self._passes(tasks)
        middle = len(tasks) // 2
        first, second = self._passes(tasks[:middle]), self._passes(tasks[middle:])
        return Cost(first.tokens + second.tokens, first.padded + second.padded, first.flops + second.flops)

    def _steps(self, tasks: Sequence[Task]) -> Cost:
        readable: list[tuple[Task, OptimStep | bytes]] = []
        for task in tasks:
            try:
                readable.append((task, task.payload if task.kind in NATIVE else OptimStep.parse(task.payload)))
            except (TypeError, ValueError) as error:
                self._end(task, error)
        self._step(readable)
        return Cost()

    def _step(self, steps: Sequence[tuple[Task, OptimStep | bytes]], again: bool = False) -> None:
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
        for (task, step), result in zip(steps, results, strict=True):
            if isinstance(result, bytes | Noted | Exception):
                self._end_native(task, result)
            else:
                rate = {"lr": step.learning_rate} if isinstance(step, OptimStep) else {}
                self._end(task, _metrics(result), figures=_figures(task, {**rate, **result}))

    def _barrier(self, task: Task) -> None:
        try:
            if task.kind == "save":
                self._saves.add(task)
                return
            result = self._do(task)
        except EngineFault:
            raise
        except Exception as error:
            self._end(task, error)
        else:
            self._end_native(task, result)

    def _end_native(self, task: Task, result: bytes | Noted | Exception) -> None:
        if isinstance(result, Noted):
            self._end(task, result.frame, figures=_figures(task, result.figures))
        else:
            self._end(task, result)

    def _do(self, task: Task) -> bytes | Noted:
        if task.kind == "native":
            return self._executor.call(task.queue_id, task.payload)
        if task.kind == "create":
            create = Create.parse(task.payload)
            self._executor.create(task.queue_id, create, self._sources(create.source))
            self._snapshots.register(task.queue_id, task.number)
        elif task.kind == "load":
            load = Load.parse(task.payload)
            source = self._sources(load.source)
            if source is None:
                raise ValueError("the load operation has no checkpoint")
            return orjson.dumps(self._executor.load(task.queue_id, load, source))
        elif task.kind == "unload":
            self._snapshots.forget(task.queue_id)
            self._executor.remove(task.queue_id)
        else:
            raise ValueError(f"unknown operation {task.kind!r}")
        return b"{}"

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
        if kind == "pass":
            head |= self._progress.end(cost.tokens)
        self._report(Message(messages.PASSED, head))


def _metrics(values: Mapping[str, float]) -> bytes:
    """Serialize the metrics of an optimizer step; values that are not finite are dropped, since JSON has none."""
    return orjson.dumps({"metrics": {name: value for name, value in values.items() if math.isfinite(value)}})


def _figures(task: Task, values: Mapping[str, float]) -> str | None:
    """Return the figures of an operation for `recording`, as far as they are finite; a replay was recorded before."""
    if task.replay:
        return None
    return orjson.dumps({name: value for name, value in values.items() if math.isfinite(value)}).decode()
