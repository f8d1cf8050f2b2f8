"""The queue of one model: which operation is next, what the engine has, and where the model's state is.

Nothing here does I/O or reads a clock. `ModelQueue` is a state machine: its fields change in its own methods alone,
and `TRANSITIONS` lists every change of state that is legal.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Literal, TypeVar

from twinkle_server.operations import Category, Operation

T = TypeVar("T")
MAX_GAP: Final = 4096
"""Numbers that may be missing before one that arrives; a row is written for each that never comes."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A missing number that operations wait for.

    Attributes:
        number: the number that is missing.
        since: time of arrival of the oldest operation that waits for it.
        waiting: number of operations that wait behind it.
    """

    number: int
    since: float
    waiting: int


class SequenceOrder(Generic[T]):
    """Releases items in the order of their numbers, without gaps, whatever the order of arrival.

    Args:
        following: the first number that is neither used nor released.

    Attributes:
        following: see above.
        ready: released items, in order.
    """

    def __init__(self, following: int = 0) -> None:
        self.following = following
        self.ready: deque[T] = deque()
        self._early: dict[int, tuple[float, T]] = {}
        self._used: set[int] = set()

    def arrive(self, number: int, item: T, now: float) -> bool:
        """Add an item; return False if its number is already used, released or waiting."""
        if number < self.following or number in self._early or number in self._used:
            return False
        if number == self.following:
            self.ready.append(item)
            self.following += 1
            self._advance()
        else:
            self._early[number] = (now, item)
        return True

    def use_up(self, number: int) -> None:
        """Mark a number as used: its item was refused, was cancelled, or has ended."""
        if number < self.following:
            return
        self._early.pop(number, None)
        self._used.add(number)
        self._advance()

    def gap(self) -> Gap | None:
        """Return the first missing number, if any item waits for it."""
        if not self._early:
            return None
        return Gap(self.following, min(since for since, _ in self._early.values()), len(self._early))

    def missing(self) -> list[int]:
        """Return the missing numbers before the first item that waits."""
        return [number for number in self.hole() if number not in self._used]

    def hole(self) -> range:
        """Return all numbers before the first item that waits; some of them may be used."""
        return range(self.following, min(self._early, default=self.following))

    def give_up(self) -> list[T]:
        """Mark the missing numbers before the first item that waits as used.

        Returns:
            The items directly behind them, which must fail: they were meant to run after the missing ones. Items behind
            a further gap keep waiting.
        """
        if not self._early:
            return []
        self.following = min(self._early)
        self._used = {number for number in self._used if number >= self.following}
        dropped = []
        while self.following in self._early or self.following in self._used:
            if self.following in self._early:
                dropped.append(self._early.pop(self.following)[1])
            self._used.discard(self.following)
            self.following += 1
        return dropped

    def drop_far(self, limit: int) -> list[T]:
        """Remove the items more than `limit` above the next number, in order; their numbers become used."""
        far = sorted(number for number in self._early if number - self.following > limit)
        self._used.update(far)
        return [self._early.pop(number)[1] for number in far]

    def holds(self, number: int) -> bool:
        """Whether an item of this number waits for numbers before it."""
        return number in self._early

    def drop_all(self) -> list[T]:
        """Remove all ready and waiting items, in order; their numbers become used."""
        dropped = [*self.ready, *(item for _, (_, item) in sorted(self._early.items(), key=lambda entry: entry[0]))]
        self.ready.clear()
        self._used.update(self._early)
        self._early.clear()
        self._advance()
        return dropped

    @property
    def idle(self) -> bool:
        """Whether nothing is ready and nothing waits."""
        return not self.ready and not self._early

    def _advance(self) -> None:
        while True:
            if self.following in self._used:
                self._used.remove(self.following)
            elif self.following in self._early:
                self.ready.append(self._early.pop(self.following)[1])
            else:
                return
            self.following += 1


class State(StrEnum):
    """State of a model."""

    DETACHED = "detached"
    """The engine does not have the model; it exists as snapshot and log. Sampling sessions stay in this state."""
    ATTACHING = "attaching"
    """The engine reads the newest snapshot, and later operations are sent again."""
    ATTACHED = "attached"
    """The engine has the model; operations are sent as they become ready."""
    DETACHING = "detaching"
    """The engine writes a snapshot and frees the model."""
    POSTPONED = "postponed"
    """The engine drops the model; it is attached again after a pause."""
    CLOSED = "closed"
    """No operation runs any more; every operation fails with the reason."""


TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    # An operation is ready | a result could not be written to the log | unloaded, corrupted or deleted.
    State.DETACHED: frozenset({State.ATTACHING, State.POSTPONED, State.CLOSED}),
    # All operations were sent | the engine died, or the log could not be read | out of memory | cannot be restored.
    State.ATTACHING: frozenset({State.ATTACHED, State.DETACHED, State.POSTPONED, State.CLOSED}),
    # The session ended | the engine died | a result could not be written | unloaded, or a replay failed.
    State.ATTACHED: frozenset({State.DETACHING, State.DETACHED, State.POSTPONED, State.CLOSED}),
    # The engine has freed it, or died | its snapshot could not be read: temporarily, or permanently.
    State.DETACHING: frozenset({State.DETACHED, State.POSTPONED, State.CLOSED}),
    # The pause has ended, or a new engine started | deleted meanwhile.
    State.POSTPONED: frozenset({State.DETACHED, State.CLOSED}),
    # Only the reason may become more precise.
    State.CLOSED: frozenset({State.CLOSED}),
}


@dataclass(frozen=True, slots=True)
class Closed:
    """Why a queue is closed; every later operation fails with this reason."""

    reason: str
    category: Category = "user"


@dataclass(slots=True)
class InFlight:
    """An operation that was sent to the engine.

    Attributes:
        operation: the operation.
        queue: its queue.
        size: size of its payload in bytes.
        replay: the result is already known; only the effect on the model is needed.
        begun: whether the engine has reported that it runs.
        withdrawal: while the engine is asked to take it out again: whether it did, resolved by its answer.
    """

    operation: Operation
    queue: "ModelQueue"
    size: int
    replay: bool = False
    begun: bool = False
    withdrawal: "asyncio.Future[bool] | None" = None

    def answer(self, withdrawn: bool) -> None:
        """End a withdrawal; a later one asks the engine again."""
        if self.withdrawal is not None and not self.withdrawal.done():
            self.withdrawal.set_result(withdrawn)
        self.withdrawal = None


class ModelQueue:
    """The operations of one model or one sampling session.

    Args:
        name: id of the model or session.
        tenant: its owner.
        ordered: operations run in the order of their numbers; False for a sampling session.
        snapshot_number: number of the last operation in the newest snapshot; -1 without a snapshot.
        newest_row: id of the newest row of the log when the queue was loaded.
        closed: why the queue is closed, if it is.

    Attributes:
        order: ready and waiting operations.
        in_flight: operations sent to the engine, by id.
        restore_deaths: consecutive deaths of the engine while it read the snapshot.
        postponements: number of times that the model was postponed.
    """

    def __init__(
        self,
        name: str,
        tenant: str,
        ordered: bool,
        *,
        snapshot_number: int = -1,
        newest_row: int = 0,
        closed: Closed | None = None,
    ) -> None:
        self.name, self.tenant, self.ordered = name, tenant, ordered
        self.snapshot_number, self.newest_row = snapshot_number, newest_row
        self.order = SequenceOrder[Operation](snapshot_number + 1)
        self.in_flight: dict[int, InFlight] = {}
        self.restore_deaths = self.postponements = 0
        self._restores: deque[asyncio.Future[None] | None] = deque()  # unanswered, in order; None drops the model
        self._attempts = 0
        self._state = State.DETACHED if closed is None else State.CLOSED
        self._closed = closed
        self._postponed = ""
        self._sending = False
        self._leaving = False
        self._distrusted: int | None = None

    # Properties

    @property
    def state(self) -> State:
        """State of the model."""
        return self._state

    @property
    def closed(self) -> Closed | None:
        """Why the queue is closed, if it is."""
        return self._closed

    @property
    def postponed(self) -> str | None:
        """Why the model is postponed, if it is."""
        return self._postponed if self._state is State.POSTPONED else None

    @property
    def sending(self) -> bool:
        """Whether a task is sending the ready operations."""
        return self._sending

    @property
    def may_send(self) -> bool:
        """Whether ready operations may be sent, if necessary after attaching the model."""
        return not self._sending and self._state in (State.DETACHED, State.ATTACHED)

    @property
    def must_attach(self) -> bool:
        """Whether the model must be attached before anything is sent."""
        return self.ordered and self._state is not State.ATTACHED

    @property
    def running(self) -> bool:
        """Whether an operation runs or is ready to run."""
        return bool(self.in_flight or self.order.ready or self._sending or self._state is State.DETACHING)

    @property
    def idle(self) -> bool:
        """Whether no operation waits or runs, and the engine does not have the model and owes no answer about it."""
        return self.order.idle and not self.running and self._state is not State.ATTACHED and not self._restores

    # Operations

    def arrive(self, operation: Operation, now: float) -> bool:
        """Add an operation; return False if its number is already used.

        Args:
            operation: a new one.
            now: time in seconds, monotonic.
        """
        if self.ordered:
            return self.order.arrive(operation.number, operation, now)
        self.order.ready.append(operation)
        return True

    @property
    def head(self) -> Operation | None:
        """The operation to send next; None if none is ready."""
        return self.order.ready[0] if self.order.ready else None

    def withdraw(self, operation: Operation) -> bool:
        """Remove an operation that was not sent; return False if it is not in the queue."""
        if operation in self.order.ready:
            self.order.ready.remove(operation)
        elif self.ordered and self.order.holds(operation.number):
            self.order.use_up(operation.number)
        else:
            return False
        return True

    def sent(self, flight: InFlight) -> None:
        """Move an operation to `in_flight`; unless it is a replay, it must be the head."""
        if not flight.replay:
            head = self.order.ready.popleft()
            assert head is flight.operation
        self.in_flight[flight.operation.id] = flight

    def remove_in_flight(self, operation: int) -> None:
        """Remove an operation from `in_flight`."""
        self.in_flight.pop(operation, None)

    def ready_among(self, ids: Collection[int]) -> list[Operation]:
        """Return the ready operations with these ids."""
        return [operation for operation in self.order.ready if operation.id in ids]

    def put_back(self, operations: Sequence[Operation]) -> None:
        """Put operations taken back from the engine before all ready ones."""
        self.order.ready.extendleft(reversed(operations))

    def _take_back(self) -> list[InFlight]:
        flights = list(self.in_flight.values())
        self.in_flight.clear()
        return flights

    # Snapshots

    def distrust(self, number: int) -> None:
        """Distrust the engine's state from an operation on: it failed in the log but has an effect in the engine."""
        self._distrusted = number if self._distrusted is None else min(self._distrusted, number)

    @property
    def distrusts(self) -> bool:
        """Whether the engine may have such an effect."""
        return self._distrusted is not None

    async def trust(self) -> None:
        """Trust the engine's state again: the effect is gone, and its snapshots were recorded or removed."""
        self._distrusted = None

    def agrees_with(self, snapshot: int) -> bool:
        """Return whether a snapshot contains exactly the operations that are done in the log.

        Args:
            snapshot: number of the last operation in it.
        """
        if self._distrusted is not None and snapshot >= self._distrusted:
            return False
        again = [flight.operation.number for flight in self.in_flight.values() if not flight.replay]
        again += [operation.number for operation in self.order.ready]
        return all(snapshot < number for number in again)

    # The sending task

    def start_sending(self) -> None:
        """Mark the sending task as running."""
        assert not self._sending
        self._sending = True

    def stop_sending(self) -> None:
        """Mark the sending task as ended."""
        self._sending = False

    # States

    def start_attaching(self) -> None:
        """Start attaching the model to the engine."""
        self._move(State.ATTACHING)

    def attached(self) -> None:
        """Finish attaching; no-op if the queue was closed or postponed meanwhile."""
        if self._state is State.ATTACHING:
            self._move(State.ATTACHED)

    def attaching_failed(self) -> None:
        """Return to DETACHED after the log could not be read; attaching is retried."""
        if self._state is State.ATTACHING:
            self._move(State.DETACHED)

    def leave(self) -> None:
        """Detach the model as soon as no operation runs; see `release`."""
        self._leaving = self.ordered

    def release(self, engine: bool) -> Literal["detach", "detached"] | None:
        """Return what to do with a model that is to be detached.

        Args:
            engine: whether an engine is running.

        Returns:
            "detach": send DETACH to the engine, the state is DETACHING; "detached": the engine does not have the model;
            None: nothing, because it is not to be detached, an operation runs, or the queue is closed.
        """
        if not self._leaving or self.running:
            return None
        self._leaving = False
        if self._state is State.ATTACHED and engine:
            self._move(State.DETACHING)
            return "detach"
        return None if self._state is State.CLOSED else "detached"

    def detached(self) -> bool:
        """Handle that the engine freed the model; return False if it was postponed or closed meanwhile."""
        if self._state is not State.DETACHING:
            return False
        self._move(State.DETACHED)
        return True

    def postpone(self, reason: str) -> list[InFlight] | None:
        """Take the model out of the engine until `resume`.

        Args:
            reason: shown to clients.

        Returns:
            The operations in flight, to be put back; None if the queue is already closed or postponed.
        """
        if self._state in (State.CLOSED, State.POSTPONED):
            return None
        self._leaving = self._leaving or self._state is State.DETACHING
        self._move(State.POSTPONED)
        self.postponements += 1
        self._postponed = reason
        self._sending = False
        return self._take_back()

    def next_attempt(self) -> int:
        """Return the number of consecutive postponements so far, and count one more."""
        self._attempts += 1
        return self._attempts - 1

    def worked(self) -> None:
        """Reset the count of postponements after an answer that is not a replay."""
        self._attempts = 0

    def resume(self, postponement: int) -> None:
        """End the pause of a postponement; no-op if another engine was started meanwhile.

        Args:
            postponement: value of `postponements` at that time; later ones have pauses of their own.
        """
        if self._state is State.POSTPONED and postponement == self.postponements:
            self._move(State.DETACHED)

    def engine_died(self, blamed: Collection[int]) -> list[InFlight]:
        """Take back the operations of an engine that died.

        Args:
            blamed: ids of the operations that were running.

        Returns:
            The operations in flight, to be put back.
        """
        self._leaving = self._leaving or self._state is State.DETACHING
        if self._state not in (State.DETACHED, State.CLOSED):
            self._move(State.DETACHED)
        self._sending = False
        if self.restoring:
            self.restore_deaths += not blamed
        self._restores.clear()
        return self._take_back()

    @property
    def restoring(self) -> bool:
        """Whether the engine is reading a snapshot, or will read one."""
        return any(answered is not None for answered in self._restores)

    @property
    def dropped(self) -> bool:
        """Whether the engine has answered every RESTORE, and so has nothing that was sent before the last one."""
        return not self._restores

    def start_restoring(self, answered: asyncio.Future[None]) -> None:
        """Note that a RESTORE with a snapshot was sent. The engine may still have earlier ones to answer.

        Args:
            answered: resolved by the call of `restored` for this RESTORE.
        """
        self._restores.append(answered)

    def start_dropping(self) -> None:
        """Note that a RESTORE without a snapshot was sent, which only drops the model."""
        self._restores.append(None)

    def restored(self) -> None:
        """Handle the answer to the oldest unanswered RESTORE, successful or not."""
        answered = self._restores.popleft() if self._restores else None
        if answered is not None:
            self.restore_deaths = 0
            if not answered.done():
                answered.set_result(None)

    def close(self, closed: Closed) -> list[Operation]:
        """Close the queue, or make the reason more precise; return the waiting operations, which must fail."""
        self._move(State.CLOSED)
        self._closed = closed
        return self.order.drop_all()

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RuntimeError(f"cannot change the state of model {self.name} from {self._state} to {state}")
        self._state = state
