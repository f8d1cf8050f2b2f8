"""What the API process keeps of a lane while something happens in it, and of each operation that the engine has."""

import asyncio
from dataclasses import dataclass, field

from twinkle_server.operations import Category, Operation
from twinkle_server.runtime.lanes import Lane


@dataclass(frozen=True, slots=True)
class Closed:
    """Why nothing runs in a lane any more; every operation that still comes fails with it."""

    reason: str
    category: Category = "user"


@dataclass(slots=True)
class Flight:
    """An operation that was sent to the engine.

    Attributes:
        operation: which.
        track: its lane.
        size: bytes of its payload.
        replay: its result is known; only its effect on the model is wanted.
    """

    operation: Operation
    track: "Track"
    size: int
    replay: bool = False


@dataclass(slots=True)
class Track:
    """A lane in memory.

    Attributes:
        name: of the lane.
        tenant: whose it is.
        ordered: its numbers are an order; False for a sampling session.
        order: what may run, and what waits.
        behind: the number that its snapshot had when the lane was read from the log; -1 is none.
        seen: the newest row of the log when the lane was read from there.
        attached: the engine has the model's state.
        closed: why nothing runs here any more.
        flying: what the engine has of it, by id.
        pump: sends what cannot be sent at once.
        leaving: the engine is to let go of it as soon as nothing runs.
        detaching: the engine is letting go of it.
        restoring: there while the engine reads its snapshot.
        restore_deaths: times in a row that the engine died while it read the snapshot.
        postponed: why it is not made again at the moment; None lets it be.
        postponements: times in a row that it was put off.
    """

    name: str
    tenant: str
    ordered: bool
    order: Lane[Operation] = field(default_factory=lambda: Lane[Operation]())
    behind: int = -1
    seen: int = 0
    attached: bool = False
    closed: Closed | None = None
    flying: dict[int, Flight] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None
    leaving: bool = False
    detaching: bool = False
    restoring: asyncio.Future[None] | None = None
    restore_deaths: int = 0
    postponed: str | None = None
    postponements: int = 0

    @property
    def running(self) -> bool:
        """Whether something of it runs or may run now."""
        return bool(self.flying or self.order.ready or self.pump is not None or self.detaching)

    @property
    def idle(self) -> bool:
        """Whether nothing of it waits or runs, and the engine has nothing of it."""
        return self.order.idle and not self.running and not self.attached
