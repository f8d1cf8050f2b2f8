"""What the service reports of itself: why a future waits, whether work would be done, and figures."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import PASSES, Category, Kind, ModelInfo, Outcome
from twinkle_server.ports import Figures
from twinkle_server.runtime.dispatch import Dispatcher
from twinkle_server.runtime.futures import Futures
from twinkle_server.runtime.outcomes import Outcomes
from twinkle_server.runtime.supervision import DIED, Supervisor

FORGOTTEN = 60.0
"""Seconds after which a failure says nothing any more: a probe that keeps work away must not wait for work."""
_SHOWN: dict[str, str] = {"pass": "pass", "optim_step": "optimizer step", "sample": "sampling step"}


class LastPass:
    """Turns of the engine, each known by how its operations ended.

    A turn in which something was done has worked, whatever else failed in it; one in which everything failed as the
    service's fault has failed. What fails as a user's fault says nothing of the engine. Saving, loading and creating
    are not counted: what they fail of lies in files and in how much fits.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._turns: dict[str, set[bool]] = {}  # of the turns under way, by kind: whether there were such as worked
        self._failed: dict[str, float] = {}

    def ended(self, kind: Kind, category: Category | None) -> None:
        """Take into account how an operation of the turn under way ended; None is well."""
        name = "pass" if kind in PASSES else kind
        if name in _SHOWN and category in (None, "server"):
            self._turns.setdefault(name, set()).add(category is None)

    def passed(self, name: str) -> None:
        """Take into account that a turn is over.

        Args:
            name: "pass" or a kind of operation, as the message `passed` has it.
        """
        ended = self._turns.pop(name, set())
        if True in ended:
            self._failed.pop(name, None)
        elif ended:
            self._failed[name] = self._clock()

    def begin_anew(self) -> None:
        """Forget it all: there is a new engine."""
        self._turns.clear()
        self._failed.clear()

    @property
    def trouble(self) -> str | None:
        """What failed last and has not worked since; None if nothing did."""
        for name, since in self._failed.items():
            if self._clock() - since < FORGOTTEN:
                return f"the last {_SHOWN[name]} failed as a whole; the log says why"
        return None


QueueState = tuple[str, str | None]


class RuntimeStatus:
    """Reads the parts of a runtime.

    Attributes:
        draining: nothing more is taken.
        last_pass: whether the engine's work works.
        lost: why this process may not write any more.

    Args:
        futures: of clients.
        outcomes: how operations ended.
        dispatcher: the queues.
        supervisor: the engine.
        gap_pause: seconds after which a missing number is told as the reason.
        info: returns what the base model is.
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
        self._began = time.time()
        self._count: Callable[[Mapping[str, Any]], None] = lambda figures: None
        self.last_pass = LastPass()
        supervisor.passed = self._passed
        self.draining = False
        self.lost: str | None = None
        self.store_works: Callable[[], bool] = lambda: True

    def queue_state(self, queue_id: str) -> QueueState:
        """Return "active" or "paused_capacity", and why a future of this queue waits."""
        if self.draining:
            return "paused_capacity", "the service is going down; this goes on when it is back"
        if self._outcomes.trouble is not None:
            return "paused_capacity", "the service's disk takes nothing at the moment"
        if (missing := self._missing(queue_id)) is not None:
            return "paused_capacity", missing
        if (engine := self._engine()) != "up":
            return "paused_capacity", f"the engine is {engine}"
        queue = self._dispatcher.queues.get(queue_id)
        if queue is not None and queue.postponed is not None:
            return "paused_capacity", f"this model is made again as soon as that can be: {queue.postponed}"
        others = len(self._dispatcher.in_flight) - (len(queue.in_flight) if queue is not None else 0)
        return "active", f"{others} operations of others are under way" if others else None

    def _missing(self, queue_id: str) -> str | None:
        queue = self._dispatcher.queues.get(queue_id)
        gap = queue.order.gap() if queue is not None and not queue.running else None
        if gap is None or time.monotonic() - gap.since < self._gap_pause:
            return None
        seconds = time.monotonic() - gap.since
        return f"number {gap.number} of this model has not arrived; {gap.waiting} wait for it since {seconds:.0f} s"

    def _engine(self) -> str:
        if not self._supervisor.up:
            return "starting"
        if (seconds := self._supervisor.silent) is not None:
            return f"not responding: no sign of life for {seconds:.0f} s (its process may be stopped)"
        return "up"

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Return whether work would be done now, and the facts behind it."""
        store = self.lost or self._outcomes.trouble or (None if self.store_works() else "the last commit failed")
        troubled = self._supervisor.troubled or self.last_pass.trouble
        engine = self._engine()
        good = engine == "up" and troubled is None and store is None and not self.draining
        return good, {
            "engine": engine,
            "last_pass": troubled or "worked",
            "store": store or "writable",
            "draining": self.draining,
            "paths": [dict(path) for path in self._info().paths],
        }

    def status(self) -> dict[str, Any]:
        """Return what the service does at the moment."""
        good, facts = self.ready()
        return {
            "ready": good,
            **facts,
            "up_seconds": round(time.time() - self._began, 1),
            "engine_restarts": self._supervisor.restarts,
            "open_futures": len(self._futures),
            "polls": self._futures.polls,
            "in_engine": len(self._dispatcher.in_flight),
            "replays": self._dispatcher.replays,
            "queues": len(self._dispatcher.queues),
        }

    def ended(self, message: Message) -> None:
        """Take into account how an operation ended that the engine has; one that is done again says nothing new."""
        flight = self._dispatcher.in_flight.get(message.head["id"])
        if flight is not None and not flight.replay:
            self.last_pass.ended(flight.operation.kind, message.head.get("category"))

    def _passed(self, head: Mapping[str, Any]) -> None:
        self.last_pass.passed(str(head.get("kind")))
        self._count(head)

    def show(self, figures: Figures) -> None:
        """Let what happens be counted, and what is at the moment be read."""
        self._count = figures.passed
        figures.watch("open_futures", "Operations that wait or run.", lambda: float(len(self._futures)))
        figures.watch("polls", "Requests that wait for a result.", lambda: float(self._futures.polls))
        figures.watch("in_engine", "Operations that the engine has.", lambda: float(len(self._dispatcher.in_flight)))
        figures.watch("queue_age_seconds", "Age of the oldest open future.", self._futures.oldest)


def ending_of(outcome: Outcome) -> str:
    """Return the word for how an operation ended: "done", "cancelled", or whose fault a failure was."""
    return "cancelled" if outcome.cancelled else "done" if outcome.error is None else outcome.category


def count_message(figures: Figures, message: Message) -> None:
    """Count what the engine tells of models."""
    if message.type == messages.RESTORED:
        figures.restored()
    elif message.type == messages.SNAPSHOTTED:
        figures.snapshotted(message.head["size"])
    elif message.type == messages.DETACHED:
        figures.detached()


def count_death(figures: Figures, why: str) -> None:
    """Count an engine that ended by itself, or that was ended because it hung."""
    figures.restarted("died" if why == DIED else "hung")
