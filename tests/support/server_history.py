"""What clients asked for and were told, and the check that exactly that was done: once, in order, for nobody else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from ledger_engine import read_ledger_metrics, row_id
from server_raw import tokens_of

from twinkle_server.wire import codec
from twinkle_server.wire import tinker_pb2 as wire

Kind = Literal["train", "read", "step", "save", "freeze", "load"]


@dataclass(frozen=True)
class State:
    """What a model must be: datums applied by steps, and datums that wait for one."""

    applied: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    steps: int = 0


@dataclass
class Event:
    """One operation of a model's queue.

    Attributes:
        number: its place there.
        kind: of it.
        datums: that it brought, or the state that it loads.
        output: what its future gave; None while nobody was told.
        cancelled: whether its future says that it was cancelled.
    """

    number: int
    kind: Kind
    datums: tuple[int, ...] = ()
    loads: State | None = None
    output: Any = None
    cancelled: bool = False


@dataclass
class History:
    """All operations of one model by number; `expected` folds them."""

    events: dict[int, Event] = field(default_factory=dict)
    start: State = field(default_factory=State)

    def add(self, event: Event) -> Event:
        """Write an operation down."""
        assert event.number not in self.events
        self.events[event.number] = event
        return event

    @property
    def changes(self) -> int:
        """Number of operations that were asked for and do more than read."""
        return sum(event.kind != "read" for event in self.events.values())

    def expected(self, number: int) -> State:
        """Return the model's state after an operation, if all before it were done once and in order."""
        state = self.start
        for at in range(1, number + 1):
            event = self.events[at]
            if event.cancelled:
                continue
            if event.kind == "train":
                state = State(state.applied, (*state.pending, *event.datums), state.steps)
            elif event.kind == "step":
                state = State((*state.applied, *state.pending), (), state.steps + 1)
            elif event.kind == "load" and event.loads is not None:
                state = event.loads
        return state

    def check(self) -> None:
        """Compare everything that was told with what must have been."""
        assert sorted(self.events) == list(range(1, len(self.events) + 1))
        for number, event in sorted(self.events.items()):
            assert event.output is not None, f"operation {number} ({event.kind}) was never answered"
            before = self.expected(number - 1)
            if event.kind == "read":
                pending, applied = read_ledger(event.output)
                assert (tuple(applied), tuple(pending)) == (before.applied, before.pending), f"operation {number}"
            elif event.kind == "step":
                assert event.output["metrics"]["grad_norm"] == len(before.pending), f"operation {number}"


def datum_id(datum: wire.Datum) -> int:
    """Return the counting engine's name of a datum: its first token, and 32 bits of a hash."""
    tokens = np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4")
    return row_id(tokens, codec.datum_inputs(datum)["target_tokens"])


def read_ledger(output: wire.ForwardBackwardOutput) -> tuple[list[int], list[int]]:
    """Return what a forward pass of the counting engine says is pending, and what is applied."""
    return read_ledger_metrics("pending", output.metrics), read_ledger_metrics("applied", output.metrics)


def read_version(answer: wire.SampleResponse) -> tuple[int, list[int]]:
    """Return which version a sample came from: steps, and the first tokens of the datums that were applied."""
    steps, count, *first = tokens_of(answer.sequences[0])
    assert count == len(first), "the sample was cut off"
    return steps, first


def version_of(state: State) -> tuple[int, list[int]]:
    """Return what a sample of a version must say."""
    return state.steps, [number >> 32 for number in state.applied]


def none_foreign(histories: Sequence[History]) -> None:
    """Demand that no datum of one model is in another's ledger."""
    for at, history in enumerate(histories):
        own = {datum for event in history.events.values() for datum in event.datums} | set(history.start.applied)
        for event in history.events.values():
            if event.kind == "read":
                pending, applied = read_ledger(event.output)
                assert {*pending, *applied} <= own, f"model {at} holds another's datums"
