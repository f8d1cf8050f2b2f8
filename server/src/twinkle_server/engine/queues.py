"""What waits in the engine: for each model its operations, in the order in which they were sent.

A `Task` is one of them, `Composition` says in which passes it was computed, and `done` and `cancelled` are how it ends.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import PASSES


@dataclass(frozen=True, slots=True)
class Composition:
    """Passes in which an operation was computed, in order.

    Attributes:
        passes: what the engine recorded. Of each its number (`pass`), which grows with time and is the same for all
            operations that shared it; the rest is the engine's own.
    """

    passes: Sequence[Mapping[str, Any]]

    @property
    def first(self) -> int:
        """Number of the first pass."""
        return int(self.passes[0]["pass"])

    def dump(self) -> str:
        """Return it as the log keeps it."""
        return orjson.dumps(self.passes).decode()

    @classmethod
    def parse(cls, text: str) -> "Composition":
        """Read what `dump` wrote."""
        return cls(orjson.loads(text))


RESTORE = "restore"
DETACH = "detach"
SNAPSHOT = "snapshot"
ORDERS: frozenset[str] = frozenset({RESTORE, DETACH, SNAPSHOT})
"""What the service itself asks of a queue, in its place among the operations."""
NOBODY = ""
"""Whose the orders are."""
_arrivals = count()


@dataclass(slots=True)
class Task:
    """An operation, or an order of the service.

    Attributes:
        id: of the operation; -1 for an order.
        queue_id: the model, or the sampling session.
        number: its place there; -1 for an order.
        kind: of the operation or order.
        tenant: whose it is.
        tokens: what it costs, at least 1.
        alone: it was under way when an engine died, and shares nothing with others.
        replay: its result is known, only its effect on the model is wanted.
        payload: see `operations.Submission`.
        composition: of a replay, how its passes were composed.
        order: how many came before it.
    """

    id: int
    queue_id: str
    number: int
    kind: str
    tenant: str
    tokens: int = 1
    alone: bool = False
    replay: bool = False
    payload: bytes = b""
    composition: Composition | None = None
    order: int = field(default_factory=_arrivals.__next__)

    @classmethod
    def of_run(cls, message: Message) -> "Task":
        """Read a RUN."""
        head: dict[str, Any] = message.head
        return cls(
            id=head["id"],
            queue_id=head["queue_id"],
            number=head["number"],
            kind=head["kind"],
            tenant=head["tenant"],
            tokens=max(1, head["tokens"]),
            alone=bool(head.get("alone")),
            replay=bool(head.get("replay")),
            payload=message.body,
            composition=Composition.parse(head["composition"]) if head.get("composition") else None,
        )

    @classmethod
    def of_order(cls, message: Message) -> "Task":
        """Read a RESTORE, DETACH or SNAPSHOT."""
        payload = (message.head.get("folder") or "").encode()
        return cls(-1, message.head["queue_id"], -1, message.type, NOBODY, payload=payload)

    @property
    def first_pass(self) -> int | None:
        """Number of the first of the passes that are to be composed again; None composes them anew."""
        return None if self.composition is None else self.composition.first

    @property
    def fuses(self) -> bool:
        """Whether it may go through the model with others."""
        return self.kind in PASSES and not self.alone

    @property
    def steps(self) -> bool:
        """Whether it may share a fused optimizer step."""
        return self.kind == "optim_step" and not self.alone


def done(
    task: Task, result: bytes = b"", extra: dict[str, Any] | None = None, composition: Composition | None = None
) -> Message:
    """Return the message that an operation is done."""
    head = {"id": task.id, "error": None, "category": None, "extra": extra or {}}
    return Message(messages.DONE, head if composition is None else head | {"composition": composition.dump()}, result)


def cancelled(operation: int) -> Message:
    """Return the message that an operation ended because nobody wanted it."""
    head = {"id": operation, "error": "cancelled", "category": "user", "extra": {}, "cancelled": True}
    return Message(messages.DONE, head)


class TaskQueues:
    """Queues of tasks by model; a queue that is held gives nothing."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Task]] = {}
        self._held: set[str] = set()

    def add(self, task: Task) -> None:
        """Put a task at the end of its queue."""
        self._waiting.setdefault(task.queue_id, deque()).append(task)

    def heads(self) -> Iterator[Task]:
        """Give what is next in each queue that has something and is not held."""
        return (tasks[0] for queue_id, tasks in self._waiting.items() if queue_id not in self._held)

    def run_up(self, queue_id: str) -> Iterator[Task]:
        """Give a queue's tasks up to the first that does not fuse, or whose passes are to be composed again.

        The queue must not change meanwhile.
        """
        return takewhile(lambda task: task.fuses and task.first_pass is None, self._waiting[queue_id])

    def take(self, task: Task) -> Task:
        """Remove a task, which is the next of its queue."""
        tasks = self._waiting[task.queue_id]
        if tasks[0] is not task:
            raise RuntimeError(f"operation {task.id} is not the next one of its queue")
        tasks.popleft()
        if not tasks:
            del self._waiting[task.queue_id]
        return task

    def hold(self, queue_id: str) -> None:
        """Give nothing of a queue until it is released."""
        self._held.add(queue_id)

    def release(self, queue_id: str) -> None:
        """Undo `hold`."""
        self._held.discard(queue_id)

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._waiting.values())

    def __bool__(self) -> bool:
        """Whether a queue that is not held has a task."""
        return any(queue_id not in self._held for queue_id in self._waiting)
