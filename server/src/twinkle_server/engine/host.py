"""The engine's own thread: takes messages, alternates training and sampling, and keeps snapshots."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from twinkle_server.engine import messages
from twinkle_server.engine.backend import Backend, Fatal
from twinkle_server.engine.lanes import DETACH, RESTORE, SNAPSHOT, Lanes, Task
from twinkle_server.engine.messages import Message
from twinkle_server.engine.outcomes import cancelled
from twinkle_server.engine.sampling import Sampling
from twinkle_server.engine.scheduler import Alternation, Budget, Scheduler
from twinkle_server.engine.snapshots import Snapshots
from twinkle_server.engine.turns import Sources, Turns
from twinkle_server.runtime.link import BlockingLink, LinkClosed
from twinkle_server.settings import Settings

FATAL = 70
"""Exit status after which nothing but a new process helps."""
_REPORT_EVERY = 0.5  # seconds of decoding that are told in one PASSED
_log = logging.getLogger(__name__)


class Host:
    """Serves one service over a link until it is closed.

    Args:
        backend: computes.
        link: to the service.
        settings: of the service.
    """

    def __init__(self, backend: Backend, link: BlockingLink, settings: Settings) -> None:
        self._backend, self._link = backend, link
        self._inbox: queue.SimpleQueue[Message | Callable[[], None]] = queue.SimpleQueue()
        self._lanes = Lanes()
        self._scheduler = Scheduler(self._lanes)
        self._budget = Budget(settings.max_pass_seconds)
        self._alternation = Alternation()
        sources = Sources(settings.data)
        self._snapshots = Snapshots(
            backend=backend,
            data=settings.data,
            later=self._inbox.put,
            report=link.send,
            left=self._left,
            steps=settings.snapshot_steps,
            seconds=settings.times.snapshot,
        )
        self._turns = Turns(backend, sources, self._snapshots, self._budget, link.send)
        self._sampling = Sampling(backend, sources, link.send)
        self._decoded = _Decoded()
        self._under_way: frozenset[int] = frozenset()
        self._draining = False
        self._drained = False

    def serve(self) -> None:
        """Work until the process ends; it does when the other end of the link is closed, or after `Fatal`."""
        self._link.send(Message(messages.READY, {"info": asdict(self._backend.describe())}))
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            while True:
                self.turn()
        except LinkClosed:
            os._exit(0)
        except Fatal:
            _log.exception("the engine cannot go on")
        except BaseException:
            _log.exception("the engine failed")
        os._exit(FATAL)

    def turn(self) -> None:
        """Wait until there is work, and do one piece of it."""
        self._receive()
        self._snapshots.tend()
        if self._draining:
            self._tell_drained()
            return
        self._sampling.admit()
        training, sampling = bool(self._lanes), bool(self._sampling.running)
        if not (training or sampling):
            return
        decoding = self._alternation.decodes(training, sampling)
        begin = time.perf_counter()
        if decoding:
            self._decode()
        else:
            self._train()
        self._alternation.took(time.perf_counter() - begin, decoding)

    def _read(self) -> None:
        for message in self._link:
            self._inbox.put(message)
        os._exit(0)

    def _receive(self) -> None:
        """Take what arrived; wait for something if there is nothing else to do."""
        busy = not self._draining and (bool(self._lanes) or len(self._sampling) > 0)
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(not busy, None if busy else self._snapshots.next()))
            while True:
                self._take(self._inbox.get_nowait())

    def _take(self, item: Message | Callable[[], None]) -> None:
        if not isinstance(item, Message):
            item()
        elif item.type == messages.RUN:
            task = Task.of_run(item)
            (self._sampling if task.kind == "sample" else self._lanes).add(task)
        elif item.type in (messages.RESTORE, messages.DETACH, messages.SNAPSHOT):
            self._lanes.add(Task.of_order(item))
        elif item.type == messages.CANCEL:
            self._cancel(item.head["id"])
        elif item.type == messages.DRAIN:
            self._draining = True
            self._snapshots.drain()
        else:
            raise RuntimeError(f"the engine knows no message {item.type!r}")

    def _cancel(self, operation: int) -> None:
        if self._sampling.cancel(operation) or self._lanes.cancel(operation):
            self._link.send(cancelled(operation))

    def _train(self) -> None:
        tasks = self._scheduler.next(self._budget.tokens(sampling=bool(self._sampling)))
        if not tasks:
            return
        self._under_way = frozenset()
        first = tasks[0]
        if first.kind == RESTORE:
            self._turns.restore(first)
        elif first.kind == SNAPSHOT:
            self._snapshots.want(first.lane)
        elif first.kind == DETACH:
            self._detach(first.lane)
        else:
            self._turns.run(tasks)

    def _detach(self, lane: str) -> None:
        if self._snapshots.leave(lane):
            self._lanes.hold(lane)
        else:
            self._snapshots.forget(lane)
            self._left(lane)

    def _left(self, lane: str) -> None:
        self._turns.forget(lane)
        self._lanes.release(lane)
        self._link.send(Message(messages.DETACHED, {"lane": lane}))

    def _decode(self) -> None:
        ids = frozenset(self._sampling.running)
        if not ids <= self._under_way:
            self._link.send(Message(messages.BEGIN, {"ids": sorted(ids)}))
            self._under_way = ids
        begin, tenants = time.perf_counter(), self._sampling.tenants
        tokens = self._sampling.decode()
        if head := self._decoded.add(time.perf_counter() - begin, tokens, tenants, len(ids), bool(self._sampling)):
            self._link.send(Message(messages.PASSED, head))

    def _tell_drained(self) -> None:
        if self._snapshots.drained and not self._drained:
            self._drained = True
            self._link.send(Message(messages.DRAINED))


class _Decoded:
    """Figures of decode steps, told together."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    def add(self, seconds: float, tokens: int, tenants: int, operations: int, more: bool) -> dict[str, Any] | None:
        """Add a step; returns the figures of several when it is time to tell them."""
        self._seconds += seconds
        self._tokens += tokens
        if more and self._seconds < _REPORT_EVERY:
            return None
        head = {"kind": "sample", "seconds": self._seconds, "tokens": self._tokens, "padded": 0, "flops": 0.0}
        self._seconds, self._tokens = 0.0, 0
        return head | {"tenants": tenants, "operations": operations}
