"""The reference: what every model must be, from the operations that were asked for and how each ended."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from service_simulation import native

Kind = Literal[
    "create", "train", "read", "step", "save", "load", "unload",
    "pass", "only", "graph", "score", "backward", "due step", "measure", "weights", "metric", "scheduler",
]  # fmt: skip
"""Of an operation; those of the second line are native ones."""
Ending = Literal["done", "failed", "cancelled"]


class Violation(AssertionError):
    """The service broke a promise."""


def demand(holds: bool, what: object) -> None:
    """Raise `Violation` unless something holds."""
    if not holds:
        raise Violation(str(what))


@dataclass(frozen=True, slots=True)
class State:
    """What a model is: rows applied by steps, rows that wait for one, and the number of steps.

    The other fields are those of native models: what metrics have seen, counters, and what later calls continue.
    """

    applied: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    steps: int = 0
    seen: tuple[int, ...] = ()
    evaluated: tuple[int, ...] = ()
    cur_step: int = 0
    calls: int = 0
    accumulation: int = 1
    graph: tuple[int, ...] | None = None
    scored: bool = False
    staged: tuple[int, ...] | None = None
    training: bool = True
    metrics: int = 0
    scheduler: int | None = None

    def version(self) -> list[int]:
        """Return the tokens that a sample of this state has."""
        return [self.steps, len(self.applied), *(row >> 32 for row in self.applied)]


@dataclass(slots=True)
class Source:
    """A saved state: of a model, after an operation."""

    history: "History"
    number: int

    def state(self) -> State:
        """Return what a checkpoint holds."""
        return replace(self.history.after(self.number), pending=())


@dataclass(slots=True)
class Event:
    """An operation that a client asked for.

    Attributes:
        number: its place in the model's order.
        kind: of it.
        rows: ids that it adds.
        source: what it loads.
        optimizer: whether a load takes the optimizer's state.
        excuses: parts of error texts with which it may fail, because of what it asks for.
        request: id of its future.
        ending: how it ended; None while nobody was told.
        error: of a failure.
        seen: what a read showed.
        norm: gradient norm that a step reported: the number of rows that waited.
        value: what a native call returned, or the name of the error that it raised.
        options: of a native call: whether it is for training, its number of samples, or the number of backward calls
            for each step.
    """

    number: int
    kind: Kind
    rows: tuple[int, ...] = ()
    source: Source | None = None
    optimizer: bool = True
    excuses: tuple[str, ...] = ()
    request: str = ""
    ending: Ending | None = None
    error: str = ""
    seen: State | None = None
    norm: float | None = None
    value: Any = None
    options: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    """A streamed request for the present weights of a model.

    Attributes:
        first: number up to which all operations were over when it was sent.
        last: of the operations that were asked for when its answer came.
        most: number of tokens that it asked for.
        samples: tokens and stop reason of each sequence.
    """

    first: int
    last: int
    most: int
    samples: list[dict[str, Any]]


@dataclass
class History:
    """Everything that was asked of one model.

    Attributes:
        model: its id.
        tenant: its owner.
        events: by number.
        lost: numbers whose requests were never sent, or much too late.
        excuses: parts of error texts with which any of its operations may fail.
        chats: streamed requests for its present weights.
        cancelled: number of operations of which an operator was told that they are cancelled.
    """

    model: str
    tenant: str
    events: dict[int, Event] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    excuses: tuple[str, ...] = ()
    chats: list[Chat] = field(default_factory=list)
    cancelled: int = 0
    _states: list[State] = field(default_factory=lambda: [State()])

    def add(self, event: Event) -> Event:
        """Note that an operation is asked for."""
        assert event.number not in self.events
        self.events[event.number] = event
        return event

    def after(self, number: int) -> State:
        """Return the state after an operation: a replay of all that were done, in order. They must be over."""
        while len(self._states) <= number + 1:
            at = len(self._states) - 1
            self._states.append(_applied(self._states[at], self.events.get(at)))
        return self._states[number + 1]

    def is_over(self, number: int) -> bool:
        """Return whether it is known how every operation up to a number ended."""
        return all(event.ending is not None for at, event in self.events.items() if at <= number)

    def check(self, excuses: Iterable[str]) -> None:
        """Compare what clients were told with the replay.

        Args:
            excuses: parts of error texts that are excused by what happened to the service.
        """
        allowed = (*excuses, *self.excuses)
        for number, event in sorted(self.events.items()):
            where = f"{self.model} number {number} ({event.kind})"
            demand(event.ending is not None, f"{where} was never answered")
            if event.ending == "failed":
                words = (*allowed, *event.excuses)
                gap = "did not arrive within" in event.error and self._behind_a_gap(number)
                demand(gap or any(word in event.error for word in words), f"{where} failed: {event.error}")
                continue
            before = self.after(number - 1)
            if event.seen is not None:
                same = (event.seen.applied, event.seen.pending) == (before.applied, before.pending)
                demand(same, f"{where} saw {event.seen}, and the replay is {before}")
            if event.ending == "done" and event.kind in native.KINDS:
                native.check(event, before, where)
            if event.norm is not None:
                demand(event.norm == len(before.pending), f"{where} stepped on {event.norm} rows, not {before.pending}")
        ended = sum(event.ending == "cancelled" for event in self.events.values())
        demand(ended >= self.cancelled, f"{self.model}: {self.cancelled} were reported as cancelled, {ended} are")
        for chat in self.chats:
            versions = [self.after(number).version() for number in range(chat.first, chat.last + 1)]
            wanted = [(each[: chat.most], "stop" if len(each) <= chat.most else "length") for each in versions]
            for sample in chat.samples:
                found = sample["tokens"], sample["stop"]
                demand(found in wanted, f"{self.model} answered {found} between {chat.first} and {chat.last}: {wanted}")

    def over(self) -> int:
        """Return the number up to which it is known how all operations ended."""
        number = 0
        while (event := self.events.get(number)) is not None and event.ending is not None:
            number += 1
        return number - 1

    def _behind_a_gap(self, number: int) -> bool:
        """Return whether a number was lost before this one, and nothing was done in between."""
        while number >= 0:
            if number in self.lost:
                return True
            number -= 1
            event = self.events.get(number)
            if event is not None and number not in self.lost and event.ending == "done":
                return False
        return False


def _applied(state: State, event: Event | None) -> State:
    if event is None or event.ending != "done":
        return state
    if event.kind in native.KINDS or event.options:
        return native.applied(state, event)
    if event.kind == "train":
        return replace(state, pending=(*state.pending, *event.rows))
    if event.kind == "step":
        return State((*state.applied, *state.pending), (), state.steps + 1)
    if event.kind in ("load", "create") and event.source is not None:
        loaded = event.source.state()
        return loaded if event.optimizer else replace(loaded, steps=0)
    return state


def as_metrics(output: dict[str, Any]) -> State:
    """Return the state that a forward pass of the counting engine reports."""
    from ledger_engine import read_ledger_metrics

    applied, pending = (tuple(read_ledger_metrics(name, output)) for name in ("applied", "pending"))
    return State(applied, pending)
