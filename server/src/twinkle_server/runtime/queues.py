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
        """Add an item; return False if its number was used or released before, or is here."""
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
        """Mark a number as used: its item was refused or cancelled, or has ended."""
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
            a further gap go on waiting.
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
        """Remove the items that wait for more than `limit` numbers, in order; their own numbers become used."""
        far = sorted(number for number in self._early if number - self.following > limit)
        self._used.update(far)
        return [self._early.pop(number)[1] for number in far]

    def holds(self, number: int) -> bool:
        """Whether an item of this number waits for numbers before it."""
        return number in self._early

    def drop_all(self) -> list[T]:
        """Remove everything that is ready or waits, in order; its numbers become used."""
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
    """Where the state of a model is."""

    DETACHED = "detached"
    """The engine does not have the model; snapshot and log do. The queue of a sampling session is always detached."""
    ATTACHING = "attaching"
    """The engine reads the newest snapshot, and the operations after it are sent again."""
    ATTACHED = "attached"
    """The engine has the model; operations are sent as they become ready."""
    DETACHING = "detaching"
    """The engine writes a snapshot and frees the model."""
    POSTPONED = "postponed"
    """The engine was told to forget the model; it is attached again after a pause."""
    CLOSED = "closed"
    """Nothing runs any more; every operation fails with the reason."""


TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    # An operation is ready | what runs could not be written into the log | unloaded, corrupted or forgotten.
    State.DETACHED: frozenset({State.ATTACHING, State.POSTPONED, State.CLOSED}),
    # Everything was sent | the engine died, or the log could not be read | memory is lacking | it cannot be restored.
    State.ATTACHING: frozenset({State.ATTACHED, State.DETACHED, State.POSTPONED, State.CLOSED}),
    # The session ended | the engine died | a result could not be written | unloaded, or a replay failed.
    State.ATTACHED: frozenset({State.DETACHING, State.DETACHED, State.POSTPONED, State.CLOSED}),
    # The engine has let go of it, or died | its snapshot could not be read after all: for now, or for good.
    State.DETACHING: frozenset({State.DETACHED, State.POSTPONED, State.CLOSED}),
    # The pause is over, or there is another engine | forgotten meanwhile.
    State.POSTPONED: frozenset({State.DETACHED, State.CLOSED}),
    # Only the reason may become more precise.
    State.CLOSED: frozenset({State.CLOSED}),
}


@dataclass(frozen=True, slots=True)
class Closed:
    """Why a queue is closed; every operation that still arrives fails with it."""

    reason: str
    category: Category = "user"


@dataclass(slots=True)
class InFlight:
    """An operation that the engine has.

    Attributes:
        operation: the operation.
        queue: its queue.
        size: size of its payload in bytes.
        replay: its result is known, and only its effect on the model is needed.
    """

    operation: Operation
    queue: "ModelQueue"
    size: int
    replay: bool = False


class ModelQueue:
    """Operations of one model, or of one sampling session.

    Args:
        name: id of the model or session.
        tenant: its owner.
        ordered: operations run in the order of their numbers; False for a sampling session.
        snapshot_number: number of the last operation in the newest snapshot; -1 if there is none.
        newest_row: id of the newest row of the log when the queue was read from there.
        closed: why nothing runs in it, if so.

    Attributes:
        order: what may run, and what waits for which number.
        in_flight: what the engine has, by id.
        restore_deaths: consecutive deaths of the engine while it read the snapshot.
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
        self.restore_deaths = 0
        self._restoring: asyncio.Future[None] | None = None
        self._attempts = 0
        self._state = State.DETACHED if closed is None else State.CLOSED
        self._closed = closed
        self._postponed = ""
        self._sending = False
        self._leaving = False
        self._distrusted: int | None = None

    # What it is

    @property
    def state(self) -> State:
        """Where the model's state is."""
        return self._state

    @property
    def closed(self) -> Closed | None:
        """Why nothing runs any more, if so."""
        return self._closed

    @property
    def postponed(self) -> str | None:
        """Why the model is not attached at the moment, if it was postponed."""
        return self._postponed if self._state is State.POSTPONED else None

    @property
    def sending(self) -> bool:
        """Whether a task sends what is ready."""
        return self._sending

    @property
    def may_send(self) -> bool:
        """Whether what is ready may be sent now, or after the model was attached."""
        return not self._sending and self._state in (State.DETACHED, State.ATTACHED)

    @property
    def must_attach(self) -> bool:
        """Whether the engine must get the model before anything is sent."""
        return self.ordered and self._state is not State.ATTACHED

    @property
    def running(self) -> bool:
        """Whether something of it runs or may run now."""
        return bool(self.in_flight or self.order.ready or self._sending or self._state is State.DETACHING)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs, and the engine does not have the model."""
        return self.order.idle and not self.running and self._state is not State.ATTACHED

    # Operations

    def arrive(self, operation: Operation, now: float) -> bool:
        """Add an operation; return False if its number was used before.

        Args:
            operation: a new one.
            now: the time.
        """
        if self.ordered:
            return self.order.arrive(operation.number, operation, now)
        self.order.ready.append(operation)
        return True

    @property
    def head(self) -> Operation | None:
        """The operation to be sent next; None if none is ready."""
        return self.order.ready[0] if self.order.ready else None

    def withdraw(self, operation: Operation) -> bool:
        """Remove an operation that was not sent; return False if it is not here."""
        if operation in self.order.ready:
            self.order.ready.remove(operation)
        elif self.ordered and self.order.holds(operation.number):
            self.order.use_up(operation.number)
        else:
            return False
        return True

    def sent(self, flight: InFlight) -> None:
        """Note that an operation was sent; unless it is a replay, it was the head."""
        if not flight.replay:
            head = self.order.ready.popleft()
            assert head is flight.operation
        self.in_flight[flight.operation.id] = flight

    def landed(self, operation: int) -> None:
        """Note that the engine does not have an operation any more."""
        self.in_flight.pop(operation, None)

    def put_back(self, operations: Sequence[Operation]) -> None:
        """Make operations ready again that were taken back from the engine, before all others."""
        self.order.ready.extendleft(reversed(operations))

    def _take_back(self) -> list[InFlight]:
        flights = list(self.in_flight.values())
        self.in_flight.clear()
        return flights

    # Snapshots

    def distrust(self, number: int) -> None:
        """Note that an operation failed whose effect is in the engine, and in every snapshot of it that contains it."""
        self._distrusted = number if self._distrusted is None else min(self._distrusted, number)

    @property
    def distrusts(self) -> bool:
        """Whether the engine may have such an effect."""
        return self._distrusted is not None

    async def trust(self) -> None:
        """Note that the engine does not have that effect any more, and that its snapshots were recorded or removed."""
        self._distrusted = None

    def agrees_with(self, snapshot: int) -> bool:
        """Return whether a snapshot contains what the log says is done, and nothing else.

        Args:
            snapshot: number of the last operation in it.
        """
        if self._distrusted is not None and snapshot >= self._distrusted:
            return False
        again = [flight.operation.number for flight in self.in_flight.values() if not flight.replay]
        again += [operation.number for operation in self.order.ready]
        return all(snapshot < number for number in again)

    # A task that sends

    def start_sending(self) -> None:
        """Note that a task sends what is ready."""
        assert not self._sending
        self._sending = True

    def stop_sending(self) -> None:
        """Note that the task has ended."""
        self._sending = False

    # States

    def start_attaching(self) -> None:
        """The engine is about to get the model."""
        self._move(State.ATTACHING)

    def attached(self) -> None:
        """The engine was sent all that makes the model; no-op if it was closed or postponed meanwhile."""
        if self._state is State.ATTACHING:
            self._move(State.ATTACHED)

    def attaching_failed(self) -> None:
        """The log could not be read; it is tried again."""
        if self._state is State.ATTACHING:
            self._move(State.DETACHED)

    def leave(self) -> None:
        """Have the engine let go of the model as soon as nothing runs; see `release`."""
        self._leaving = self.ordered

    def release(self, engine: bool) -> Literal["detach", "detached"] | None:
        """Return what to do about a model that is to leave.

        Args:
            engine: whether there is an engine.

        Returns:
            "detach": tell the engine, the state is DETACHING; "detached": the engine does not have it; None: nothing,
            because it does not leave, because something runs, or because it is closed.
        """
        if not self._leaving or self.running:
            return None
        self._leaving = False
        if self._state is State.ATTACHED and engine:
            self._move(State.DETACHING)
            return "detach"
        return None if self._state is State.CLOSED else "detached"

    def detached(self) -> bool:
        """The engine has let go of the model; return False if it was postponed or closed meanwhile."""
        if self._state is not State.DETACHING:
            return False
        self._move(State.DETACHED)
        return True

    def postpone(self, reason: str) -> list[InFlight] | None:
        """Take back what the engine has, until `resume`.

        Args:
            reason: shown to clients.

        Returns:
            What the engine had, to be put back; None if the queue is closed or postponed already.
        """
        if self._state in (State.CLOSED, State.POSTPONED):
            return None
        self._leaving = self._leaving or self._state is State.DETACHING
        self._move(State.POSTPONED)
        self._postponed = reason
        self._sending = False
        return self._take_back()

    def next_attempt(self) -> int:
        """Return how often in a row the model was postponed before, and count one more."""
        self._attempts += 1
        return self._attempts - 1

    def worked(self) -> None:
        """An operation was answered that is not a replay."""
        self._attempts = 0

    def resume(self) -> None:
        """The pause is over; no-op if another engine came meanwhile."""
        if self._state is State.POSTPONED:
            self._move(State.DETACHED)

    def engine_died(self, blamed: Collection[int]) -> list[InFlight]:
        """Return what the engine had, to be put back.

        Args:
            blamed: ids of the operations that were under way when it died.
        """
        self._leaving = self._leaving or self._state is State.DETACHING
        if self._state not in (State.DETACHED, State.CLOSED):
            self._move(State.DETACHED)
        self._sending = False
        if self._restoring is not None:
            self._restoring = None
            self.restore_deaths += not blamed
        return self._take_back()

    @property
    def restoring(self) -> bool:
        """Whether the engine was told to read the snapshot, and has not answered."""
        return self._restoring is not None

    def start_restoring(self, answered: asyncio.Future[None]) -> None:
        """The engine is told to read the snapshot.

        Args:
            answered: resolved by `restored`.
        """
        self._restoring = answered

    def restored(self) -> None:
        """The engine has read the snapshot, or said why it cannot."""
        if self._restoring is not None and not self._restoring.done():
            self._restoring.set_result(None)
        self._restoring, self.restore_deaths = None, 0

    def close(self, closed: Closed) -> list[Operation]:
        """Close the queue, or make the reason more precise; return what waited, which fails with the reason."""
        self._move(State.CLOSED)
        self._closed = closed
        return self.order.drop_all()

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RuntimeError(f"cannot change the state of model {self.name} from {self._state} to {state}")
        self._state = state
