"""The status of the service: why a future waits, readiness, and figures."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Category, Kind, ModelInfo, Outcome, turn_name
from twinkle_server.ports import Figures
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.futures import Futures
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.supervision import DIED, Supervisor

FORGOTTEN = 60.0
"""Seconds after which a failure is ignored: a probe that keeps work away must not wait for work."""
_SHOWN: dict[str, str] = {"pass": "pass", "optim_step": "optimizer step", "sample": "sampling step"}


class LastPass:
    """Health of the engine, derived from the outcomes of its passes.

    A pass with at least one successful operation has worked. A pass in which every operation failed by the service's
    fault has failed. Failures by a user's fault are ignored. Saving, loading and creating are not counted: they fail
    for reasons of storage and memory.

    Args:
        clock: returns seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._passes: dict[str, set[bool]] = {}  # outcomes of the current pass, by kind: True is success
        self._failed: dict[str, float] = {}

    def ended(self, kind: Kind, category: Category | None) -> None:
        """Record how an operation of the current pass ended; None is success."""
        name = turn_name(kind)
        if name in _SHOWN and category in (None, "server"):
            self._passes.setdefault(name, set()).add(category is None)

    def passed(self, name: str) -> None:
        """Record the end of a pass.

        Args:
            name: "pass" or a kind of operation, as in the message `passed`.
        """
        ended = self._passes.pop(name, set())
        if True in ended:
            self._failed.pop(name, None)
        elif ended:
            self._failed[name] = self._clock()

    def reset(self) -> None:
        """Forget all outcomes; called for a new engine."""
        self._passes.clear()
        self._failed.clear()

    @property
    def trouble(self) -> str | None:
        """The last failure without a success since; None if there is none."""
        for name, since in self._failed.items():
            if self._clock() - since < FORGOTTEN:
                return f"the last {_SHOWN[name]} failed as a whole; the log says why"
        return None


QueueState = tuple[str, str | None]


class RuntimeStatus:
    """Combines the status of the parts of a runtime.

    Attributes:
        draining: whether new operations are refused.
        last_pass: health of the engine's passes.
        lost: why this process must not write any more, if so.

    Args:
        futures: of clients.
        outcomes: the writer of outcomes.
        dispatcher: the queues.
        supervisor: the engine process.
        gap_pause: seconds after which a missing sequence number is reported.
        info: returns the base model.
    """

    def __init__(
        self, futures: Futures, outcomes: Outcomes, dispatcher: Dispatcher, supervisor: Supervisor, gap_pause: float,
        info: Callable[[], ModelInfo],
    ) -> None:  # fmt: skip
        self._futures = futures
        self._outcomes = outcomes
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._gap_pause = gap_pause
        self._info = info
        self._started = time.time()
        self._count: Callable[[Mapping[str, Any]], None] = lambda figures: None
        self._trace: Callable[[Mapping[str, Any]], None] = lambda figures: None
        self.last_pass = LastPass()
        supervisor.passed = self._passed
        self.draining = False
        self.lost: str | None = None
        self.store_works: Callable[[], bool] = lambda: True

    def queue_state(self, queue_id: str) -> QueueState:
        """Return "active" or "paused_capacity", and why a future of this queue waits."""
        if self.draining:
            return "paused_capacity", "the service is shutting down; this operation resumes after the restart"
        if self._outcomes.trouble is not None:
            return "paused_capacity", "the service's disk cannot be written at the moment"
        if (missing := self._missing(queue_id)) is not None:
            return "paused_capacity", missing
        if (engine := self._engine()) != "up":
            return "paused_capacity", f"the engine is {engine}"
        queue = self._dispatcher.queues.get(queue_id)
        if queue is not None and queue.postponed is not None:
            return "paused_capacity", f"this model will be restored as soon as possible: {queue.postponed}"
        others = len(self._dispatcher.in_flight) - (len(queue.in_flight) if queue is not None else 0)
        return "active", f"{others} other operations are in flight" if others else None

    def _missing(self, queue_id: str) -> str | None:
        queue = self._dispatcher.queues.get(queue_id)
        gap = queue.order.gap() if queue is not None and not queue.running else None
        if gap is None or time.monotonic() - gap.since < self._gap_pause:
            return None
        seconds = time.monotonic() - gap.since
        return f"number {gap.number} of this model has not arrived; {gap.waiting} operations wait for {seconds:.0f} s"

    def _engine(self) -> str:
        if not self._supervisor.up:
            return "starting"
        if (seconds := self._supervisor.silent) is not None:
            return f"not responding: no sign of life for {seconds:.0f} s (its process may be stopped)"
        return "up"

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the service can do work now, and the details."""
        store = self.lost or self._outcomes.trouble or (None if self.store_works() else "the last commit failed")
        troubled = self._supervisor.troubled or self.last_pass.trouble
        engine = self._engine()
        good = engine == "up" and troubled is None and store is None and not self.draining
        return good, {
            "engine": engine,
            "last_pass": troubled or "no failure",
            "store": store or "writable",
            "draining": self.draining,
            "paths": [dict(path) for path in self._info().paths],
        }

    def status(self) -> dict[str, Any]:
        """Return the current figures of the service."""
        good, facts = self.ready()
        return {
            "ready": good,
            **facts,
            "up_seconds": round(time.time() - self._started, 1),
            "engine_restarts": self._supervisor.restarts,
            "open_futures": len(self._futures),
            "polls": self._futures.polls,
            "in_engine": len(self._dispatcher.in_flight),
            "replays": self._dispatcher.replays,
            "queues": len(self._dispatcher.queues),
        }

    def ended(self, message: Message) -> None:
        """Record how an operation in flight ended; replays are ignored."""
        flight = self._dispatcher.in_flight.get(message.head["id"])
        if flight is not None and not flight.replay:
            self.last_pass.ended(flight.operation.kind, message.head.get("category"))

    def _passed(self, head: Mapping[str, Any]) -> None:
        self.last_pass.passed(str(head.get("kind")))
        self._count(head)
        self._trace(head)

    def follow(self, passed: Callable[[Mapping[str, Any]], None]) -> None:
        """Also call a function with the head of each message `passed`."""
        self._trace = passed

    def show(self, figures: Figures) -> None:
        """Connect the counters and gauges."""
        self._count = figures.passed
        figures.watch("open_futures", "Operations that wait or run.", lambda: float(len(self._futures)))
        figures.watch("polls", "Requests that wait for a result.", lambda: float(self._futures.polls))
        figures.watch("in_engine", "Operations that the engine has.", lambda: float(len(self._dispatcher.in_flight)))
        figures.watch("queue_age_seconds", "Age of the oldest open future.", self._futures.oldest)


def ending_of(outcome: Outcome) -> str:
    """Return how an operation ended: "done", "cancelled", or the category of its failure."""
    return "cancelled" if outcome.cancelled else "done" if outcome.error is None else outcome.category


def count_message(figures: Figures, message: Message) -> None:
    """Count a message of the engine about a model."""
    if message.type == messages.RESTORED:
        figures.restored()
    elif message.type == messages.SNAPSHOTTED:
        figures.snapshotted(message.head["size"])
    elif message.type == messages.DETACHED:
        figures.detached()
    elif message.type == messages.PROGRESS:
        figures.progressed(message.head)


def count_death(figures: Figures, why: str) -> None:
    """Count an engine that died or was killed because it hung."""
    figures.restarted("died" if why == DIED else "hung")
