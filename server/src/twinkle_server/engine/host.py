"""The main thread of the engine process: handles messages, alternates training and sampling, and keeps snapshots."""

import concurrent.futures
import contextlib
import gc
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Protocol

from twinkle.errors import EngineFault
from twinkle_server.engine import messages
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.files import Published
from twinkle_server.engine.messages import LinkClosed, Message
from twinkle_server.engine.queues import DETACH, RESTORE, SNAPSHOT, Task, TaskQueues, cancelled
from twinkle_server.engine.runner import OperationRunner, Sources
from twinkle_server.engine.scheduler import Sampling, Scheduler, TimeSharing, Weights
from twinkle_server.engine.snapshots import Snapshots
from twinkle_server.failpoints import reach
from twinkle_server.settings import Settings

_PIECES = 4
"""Passes in one turn. Sampling continues between them; other messages wait for all of them."""
FATAL = 70
"""Exit status of an engine that can continue only in a new process."""
_BEAT = 1.0  # seconds between heartbeats
_Item = Message | Callable[[], None]
_log = logging.getLogger(__name__)


class Link(Protocol):
    """The engine's end of the link to the service; see `messages.BlockingLink`."""

    def send(self, message: Message) -> None:
        """Send a message; called by any thread."""

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the service closes the link."""


class Host:
    """Serves one service over a link until it is closed.

    Args:
        executor: executes operations.
        link: to the service.
        settings: of the service.
        threads: makes thread pools, given the number and the name of their threads.
    """

    def __init__(
        self,
        executor: Executor,
        link: Link,
        settings: Settings,
        threads: Callable[[int, str], concurrent.futures.Executor] = ThreadPoolExecutor,
    ) -> None:
        self._executor, self._link = executor, link
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._backlog: deque[_Item] = deque()  # received, but not handled
        self._queues = TaskQueues()
        self._weights = Weights()
        self._scheduler = Scheduler(self._queues, self._weights)
        pieces = _PIECES if executor.interruptible else 1
        self._turn_tokens = pieces * executor.pass_tokens
        sources = Sources(settings.data)
        self._snapshots = Snapshots(
            executor=executor,
            data=settings.data,
            later=self._inbox.put,
            report=link.send,
            detached=self._detached,
            before_copy=lambda: self._interleaving.begin(()),
            steps=settings.snapshot_steps,
            seconds=settings.times.snapshot,
            thread=threads(1, "snapshots"),
        )
        self._sampling = Sampling(
            executor, sources, link.send, self._weights, self._queues.rebuilding,
            broken=lambda queue_id: self._runner.is_broken(queue_id),
        )  # fmt: skip
        self._interleaving = TimeSharing(self._sampling, self._arrive, link.send, settings.max_pass_seconds)
        self._runner = OperationRunner(
            executor=executor,
            sources=sources,
            snapshots=self._snapshots,
            waiting=self._queues,
            background=self._background,
            interleaving=self._interleaving,
            report=link.send,
        )
        self._threads = threads(2, "files")
        self._background_jobs = 0
        executor.interrupt(self._between)
        self._draining = False
        self._drained = False

    def serve(self) -> None:
        """Serve until the link is closed or an `EngineFault` occurs; ends the process."""
        gc.collect()
        gc.freeze()  # a model's modules are many objects that are never garbage
        try:
            self._link.send(Message(messages.READY, {"info": asdict(self._executor.describe())}))
            threading.Thread(target=self._read, name="reader", daemon=True).start()
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
            while True:
                self.turn()
        except LinkClosed:
            os._exit(0)
        except EngineFault:
            _log.exception("the engine cannot continue")
        except BaseException:
            _log.exception("the engine failed")
        os._exit(FATAL)

    def soon(self, work: Callable[[], None]) -> None:
        """Call a function on the main thread between two turns; called by any thread."""
        self._inbox.put(work)

    def turn(self) -> None:
        """Wait for work, and do one piece of it."""
        self._receive()
        self._snapshots.write_due()
        if self._draining:
            self._report_drained()
            return
        self._sampling.admit()
        training = bool(self._queues)
        if self._interleaving.next_is_decoding(training):
            self._interleaving.decode()
        elif training:
            self._interleaving.train(self._train)

    def pause(self) -> float | None:
        """Return the seconds for which `turn` waits without a message; None waits until one arrives."""
        if self._backlog or not self._inbox.empty():
            return 0.0
        busy = not self._draining and (bool(self._queues) or len(self._sampling) > 0)
        return 0.0 if busy else self._snapshots.next()

    def receive(self, message: Message) -> None:
        """Queue a message of the service for the next turn; called by any thread."""
        self._inbox.put(message)

    def _background(self, work: Callable[[], Published], then: Callable[[Published | Exception], None]) -> None:
        def end(future: Future[Published]) -> None:
            self._background_jobs -= 1
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            then(error or future.result())

        self._background_jobs += 1
        self._threads.submit(work).add_done_callback(lambda future: self._inbox.put(lambda: end(future)))

    def _read(self) -> None:
        for message in self._link:
            self.receive(message)
        os._exit(0)

    def _beat(self) -> None:
        """Send heartbeats, independently of the other threads."""
        with contextlib.suppress(LinkClosed):
            while True:
                self._link.send(Message(messages.ALIVE))
                time.sleep(_BEAT)

    def _receive(self) -> None:
        """Handle all queued messages; wait for one if there is no other work."""
        with contextlib.suppress(queue.Empty):
            if not self._backlog:
                pause = self.pause()
                self._backlog.append(self._inbox.get(pause != 0.0, pause))
            while True:
                self._backlog.append(self._inbox.get_nowait())
        while self._backlog:
            self._take(self._backlog.popleft())

    def _arrive(self) -> None:
        """Handle queued sampling requests and WITHDRAW; other messages wait for the end of the pass."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if not isinstance(item, Message) or self._behind(item) or not self._take_at_once(item):
                    self._backlog.append(item)

    def _between(self) -> None:
        """Do what is due between two passes of a turn."""
        self._runner.between()
        self._interleaving.between()

    def _behind(self, message: Message) -> bool:
        """Return whether a request uses the present weights of a model that waiting messages rebuild."""
        model = message.head.get("model") if message.type == messages.GENERATE else None
        return model is not None and any(
            isinstance(item, Message)
            and item.head.get("queue_id") == model
            and (item.type == messages.RESTORE or item.head.get("replay"))
            for item in self._backlog
        )

    def _take_at_once(self, message: Message) -> bool:
        """Handle a message that need not wait for the end of a pass; return whether it was one."""
        if message.type == messages.WITHDRAW:
            self._withdraw(message.head["ids"])
            return True
        return self._take_sample(message)

    def _withdraw(self, ids: Collection[int]) -> None:
        """Take operations out that have not begun: from the queues, and from messages that are not handled yet."""
        wanted = set(ids)
        out = self._queues.withdraw(wanted)
        kept: deque[_Item] = deque()
        for item in self._backlog:
            is_run = isinstance(item, Message) and item.type == messages.RUN and not item.head.get("replay")
            if isinstance(item, Message) and is_run and item.head["id"] in wanted:
                out.append(item.head["id"])
            else:
                kept.append(item)
        self._backlog = kept
        reach("engine.after_withdraw")
        self._link.send(Message(messages.WITHDRAWN, {"ids": list(ids), "out": out}))

    def _take_sample(self, message: Message) -> bool:
        if message.type == messages.RUN and message.head["kind"] == "sample":
            self._sampling.add(Task.of_run(message))
            return True
        if message.type == messages.GENERATE:
            self._sampling.add(Task.of_generate(message))
            return True
        if message.type == messages.CANCEL:
            if self._sampling.cancel(message.head["id"]):
                self._link.send(cancelled(message.head["id"]))
            return True
        return False

    def _take(self, item: Message | Callable[[], None]) -> None:
        if not isinstance(item, Message):
            item()
        elif self._take_at_once(item):
            return
        elif item.type == messages.RUN:
            self._queues.add(Task.of_run(item))
        elif item.type == messages.EMBED:
            self._queues.add(Task.of_embed(item))
        elif item.type in (messages.RESTORE, messages.DETACH, messages.SNAPSHOT):
            self._queues.add(Task.of_order(item))
        elif item.type == messages.WEIGHTS:
            self._weights.put(item.head["weights"])
        elif item.type == messages.PLACES:
            self._link.send(Message(messages.PLACED, {"places": self._executor.places()}))
        elif item.type == messages.DRAIN:
            self._draining = True
            self._snapshots.drain()
        else:
            raise RuntimeError(f"unknown message type {item.type!r}")

    def _train(self) -> None:
        tasks = self._scheduler.next(self._turn_tokens)
        if not tasks:
            return
        first = tasks[0]
        if first.kind == RESTORE:
            self._interleaving.begin(())
            self._runner.restore(first)
        elif first.kind == SNAPSHOT:
            self._snapshots.want(first.queue_id)
        elif first.kind == DETACH:
            self._interleaving.begin(())
            self._detach(first.queue_id)
        else:
            self._runner.run(tasks)

    def _detach(self, queue_id: str) -> None:
        if self._snapshots.leave(queue_id):
            self._queues.hold(queue_id)
        else:
            self._snapshots.forget(queue_id)
            self._detached(queue_id)

    def _detached(self, queue_id: str) -> None:
        self._runner.forget(queue_id)
        self._queues.release(queue_id)
        self._link.send(Message(messages.DETACHED, {"queue_id": queue_id}))

    def _report_drained(self) -> None:
        if self._snapshots.drained and not self._background_jobs and not self._drained:
            self._drained = True
            self._link.send(Message(messages.DRAINED))
