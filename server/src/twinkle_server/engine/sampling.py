"""Sampling requests of the engine: taken at once, decoded together, alone where they were under way in a crash."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from twinkle_server.engine.backend import Backend, Fatal, Sampled
from twinkle_server.engine.lanes import Task
from twinkle_server.engine.messages import Message
from twinkle_server.engine.outcomes import done, failed
from twinkle_server.payloads import Sample


class Sampling:
    """The requests that wait or run.

    Args:
        backend: decodes.
        source: gives the folder of a checkpoint, checked.
        report: sends messages to the service.
    """

    def __init__(
        self, backend: Backend, source: Callable[[str | None], Path | None], report: Callable[[Message], None]
    ) -> None:
        self._backend, self._source, self._report = backend, source, report
        self._waiting: deque[Task] = deque()
        self.running: dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self.running)

    @property
    def tenants(self) -> int:
        """Number of tenants whose requests run."""
        return len({task.tenant for task in self.running.values()})

    def add(self, task: Task) -> None:
        """Take a request; it runs with the next `decode`."""
        self._waiting.append(task)

    def cancel(self, operation: int) -> bool:
        """Drop a request, wherever it is; returns whether there was one."""
        if self.running.pop(operation, None) is not None:
            self._backend.cancel(operation)
            return True
        task = next((task for task in self._waiting if task.id == operation), None)
        if task is not None:
            self._waiting.remove(task)
        return task is not None

    def admit(self) -> None:
        """Give the backend what waits; a request that must be alone waits for the others' end, and they for its own."""
        while self._waiting and not self._blocked(self._waiting[0]):
            task = self._waiting.popleft()
            try:
                sample = Sample.parse(task.payload)
                self._backend.sample(task.id, sample, self._source(sample.source))
            except Fatal:
                raise
            except Exception as error:
                self._report(failed(task, error))
            else:
                self.running[task.id] = task

    def decode(self) -> int:
        """Take one step, report what is over, and return the tokens of those."""
        try:
            over = self._backend.decode()
        except Fatal:
            raise
        except Exception as error:
            self._one_by_one(error)
            return 0
        for sampled in over:
            self._finish(sampled)
        return sum(sampled.tokens for sampled in over)

    def _blocked(self, task: Task) -> bool:
        return bool(self.running) and (task.alone or next(iter(self.running.values())).alone)

    def _finish(self, sampled: Sampled) -> None:
        task = self.running.pop(sampled.key, None)
        if task is None:
            return
        if sampled.result is None:
            self._report(failed(task, sampled.error or RuntimeError("a request ended without a result")))
        else:
            self._report(done(task, sampled.result))

    def _one_by_one(self, error: Exception) -> None:
        """Begin every request again, alone; the one that fails then is the one that failed."""
        tasks = list(self.running.values())
        self.running.clear()
        for task in tasks:
            self._backend.cancel(task.id)
        if len(tasks) == 1:
            self._report(failed(tasks[0], error))
            return
        self._waiting.extendleft(replace(task, alone=True) for task in reversed(tasks))
