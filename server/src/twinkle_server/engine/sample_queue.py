"""Sampling requests of the engine: decoded together, fairly admitted, alone where they were under way in a crash."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from twinkle.errors import EngineFault
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task
from twinkle_server.engine.results import done, failed
from twinkle_server.engine.samples import Sampled
from twinkle_server.payloads import Sample

TOGETHER = 256
"""Sequences that the engine samples at once. Of the waiting requests, one of the tenant with the fewest is next."""


class Sampling:
    """The requests that wait or run.

    Args:
        executor: decodes.
        source: gives the folder of a checkpoint, checked.
        report: sends messages to the service.

    Attributes:
        begins: called with a request right before the engine is given it, which takes memory.
    """

    def __init__(
        self, executor: Executor, source: Callable[[str | None], Path | None], report: Callable[[Message], None]
    ) -> None:
        self.begins: Callable[[int], None] = lambda operation: None
        self._executor, self._source, self._report = executor, source, report
        self._waiting: dict[str, dict[int, Task]] = {}  # by tenant and id, in order
        self._sequences: Counter[str] = Counter()  # that run, by tenant
        self._counts: dict[int, int] = {}  # of sequences, by request
        self.running: dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self.running) + sum(len(tasks) for tasks in self._waiting.values())

    def add(self, task: Task) -> None:
        """Take a request; it runs as soon as `admit` finds room for it."""
        self._waiting.setdefault(task.tenant, {})[task.id] = task

    def cancel(self, operation: int) -> bool:
        """Drop a request, wherever it is; returns whether there was one."""
        if operation in self.running:
            self._leave(operation)
            self._executor.cancel(operation)
            return True
        for tenant, tasks in self._waiting.items():
            if operation in tasks:
                self._unqueue(tenant, operation)
                return True
        return False

    def admit(self) -> None:
        """Submit what waits; a request that must be alone waits for the others' end, and they for its own."""
        while (task := self._next()) is not None:
            self._unqueue(task.tenant, task.id)
            try:
                sample = Sample.parse(task.payload)
                self.begins(task.id)
                self._executor.sample(task.id, sample, self._source(sample.source))
            except EngineFault:
                raise
            except Exception as error:
                self._report(failed(task, error))
                continue
            self.running[task.id] = task
            self._counts[task.id] = max(1, sample.count)
            self._sequences[task.tenant] += self._counts[task.id]

    def decode(self) -> int:
        """Take one step, report what is over, and return the tokens of those."""
        try:
            over = self._executor.decode()
        except EngineFault:
            raise
        except Exception as error:
            self._one_by_one(error)
            return 0
        for sampled in over:
            self._finish(sampled)
        return sum(sampled.tokens for sampled in over)

    def _next(self) -> Task | None:
        """Return the request that the engine should have now, if it should have one."""
        full = sum(self._sequences.values()) >= TOGETHER or any(task.alone for task in self.running.values())
        if full or not self._waiting:
            return None
        heads = (next(iter(tasks.values())) for tasks in self._waiting.values())
        task = min(heads, key=lambda head: (self._sequences[head.tenant], head.order))
        return None if task.alone and self.running else task

    def _finish(self, sampled: Sampled) -> None:
        if (task := self._leave(sampled.key)) is None:
            return
        if sampled.result is None:
            self._report(failed(task, sampled.error or RuntimeError("a request ended without a result")))
        else:
            self._report(done(task, sampled.result))

    def _leave(self, operation: int) -> Task | None:
        if (task := self.running.pop(operation, None)) is not None:
            self._sequences[task.tenant] -= self._counts.pop(operation)
            if not self._sequences[task.tenant]:
                del self._sequences[task.tenant]
        return task

    def _unqueue(self, tenant: str, operation: int) -> None:
        del self._waiting[tenant][operation]
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _one_by_one(self, error: Exception) -> None:
        """Begin every request again, alone; the one that fails then is the one that failed."""
        tasks = list(self.running.values())
        for task in reversed(tasks):
            self._leave(task.id)
            self._executor.cancel(task.id)
            if len(tasks) > 1:
                self._waiting[task.tenant] = {task.id: replace(task, alone=True)} | self._waiting.get(task.tenant, {})
        if len(tasks) == 1:
            self._report(failed(tasks[0], error))
