"""Queues of the engine: the operations of each model, in the order in which they were sent.

A `Task` is an operation or an order of the service; `Composition` records the passes that computed it; `done` and
`cancelled` report its end.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import orjson

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.engine.recording import Recorded
from twinkle_server.operations import PASSES, STEPS


@dataclass(frozen=True, slots=True)
class Composition:
    """Passes in which an operation was computed, in order.

    Attributes:
        passes: records of the engine. Each has a number (`pass`), which increases with time and is the same for all
            operations that shared the pass; its other fields belong to the engine.
        number: number of the operation for the engine, where it is not that of the log.
    """

    passes: Sequence[Mapping[str, Any]]
    number: int | None = None

    @property
    def first(self) -> int | None:
        """Number of the first pass; None if none is recorded."""
        return int(self.passes[0]["pass"]) if self.passes else None

    def dump(self) -> str:
        """Serialize it for the log."""
        if self.number is None:
            return orjson.dumps(self.passes).decode()
        return orjson.dumps({"number": self.number, "passes": self.passes}).decode()

    @classmethod
    def parse(cls, text: str) -> "Composition":
        """Parse the output of `dump`."""
        document = orjson.loads(text)
        return cls(document["passes"], document["number"]) if isinstance(document, dict) else cls(document)


RESTORE = "restore"
DETACH = "detach"
SNAPSHOT = "snapshot"
GENERATE = "generate"
"""Kind of a streamed request, which is no operation."""
EMBED = "embed"
"""Kind of a request for vectors, which is no operation."""
ORDERS: frozenset[str] = frozenset({RESTORE, DETACH, SNAPSHOT})
"""Orders of the service to a queue; they keep their place among the operations."""
NOBODY = ""
"""Tenant of the orders."""
_arrivals = count()


@dataclass(slots=True)
class Task:
    """An operation, or an order of the service.

    Attributes:
        id: of the operation; -1 for an order.
        queue_id: the model or sampling session.
        number: sequence number in the queue; -1 for an order.
        kind: of the operation or order.
        tenant: owner of the operation.
        tokens: cost, at least 1.
        alone: whether it must not share a pass, because an engine died while it ran.
        replay: whether its result is known and only its effect on the model is needed.
        payload: see `operations.Submission`.
        composition: for a replay, the composition of its passes.
        order: number of tasks that arrived before.
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
        """Parse a RUN message."""
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
        """Parse a RESTORE, DETACH or SNAPSHOT message."""
        payload = (message.head.get("folder") or "").encode()
        return cls(-1, message.head["queue_id"], -1, message.type, NOBODY, payload=payload)

    @classmethod
    def of_generate(cls, message: Message) -> "Task":
        """Parse a GENERATE message; the queue is that of the model whose present weights are used, or ""."""
        head = message.head
        return cls(head["id"], head.get("model") or "", -1, GENERATE, head["tenant"], payload=message.body)

    @classmethod
    def of_embed(cls, message: Message) -> "Task":
        """Parse an EMBED message; it waits in the queue of its model, or alone in a queue."""
        head = message.head
        queue_id = head.get("model") or f"embed{head['id']}"
        return cls(head["id"], queue_id, -1, EMBED, head["tenant"], payload=message.body)

    @property
    def first_pass(self) -> int | None:
        """Number of the first recorded pass; None without a recorded composition."""
        return None if self.composition is None else self.composition.first

    @property
    def fuses(self) -> bool:
        """Whether it may share a forward pass with other tasks."""
        return self.kind in PASSES and not self.alone

    @property
    def steps(self) -> bool:
        """Whether it may share a fused optimizer step."""
        return self.kind in STEPS and not self.alone


def done(
    task: Task,
    result: bytes = b"",
    extra: dict[str, Any] | None = None,
    composition: Composition | None = None,
    figures: str | None = None,
) -> Message:
    """Return the message that an operation is done."""
    head: dict[str, Any] = {"id": task.id, "error": None, "category": None, "extra": extra or {}}
    if composition is not None:
        head["composition"] = composition.dump()
    if figures is not None:
        head["figures"] = figures
    return Message(messages.DONE, head, result)


def rollouts(task: Task, recorded: Recorded) -> Message:
    """Return the message with the recorded rollouts of an operation."""
    head = {"queue_id": task.queue_id, "tenant": task.tenant, "number": task.number, "rows": recorded.rollouts}
    return Message(messages.ROLLOUTS, head, recorded.body)


def cancelled(operation: int) -> Message:
    """Return the message that an operation was cancelled."""
    head = {"id": operation, "error": "cancelled", "category": "user", "extra": {}, "cancelled": True}
    return Message(messages.DONE, head)


class TaskQueues:
    """Queues of tasks by model; a queue can be held."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Task]] = {}
        self._held: set[str] = set()

    def add(self, task: Task) -> None:
        """Append a task to its queue."""
        self._waiting.setdefault(task.queue_id, deque()).append(task)

    def heads(self) -> Iterator[Task]:
        """Yield the first task of each queue that is not held."""
        return (tasks[0] for queue_id, tasks in self._waiting.items() if queue_id not in self._held)

    def run_up(self, queue_id: str) -> Iterator[Task]:
        """Yield the tasks of a queue before the first that does not fuse or has a recorded composition.

        The queue must not change during the iteration.
        """
        return takewhile(lambda task: task.fuses and task.first_pass is None, self._waiting[queue_id])

    def take(self, task: Task) -> Task:
        """Remove a task, which must be the first of its queue."""
        tasks = self._waiting[task.queue_id]
        if tasks[0] is not task:
            raise RuntimeError(f"operation {task.id} is not the next one of its queue")
        tasks.popleft()
        if not tasks:
            del self._waiting[task.queue_id]
        return task

    def withdraw(self, ids: Collection[int]) -> list[int]:
        """Remove the operations with these ids, and return the ids of those that were there; replays stay."""
        found = [task for tasks in self._waiting.values() for task in tasks if task.id in ids and not task.replay]
        for task in found:
            tasks = self._waiting[task.queue_id]
            tasks.remove(task)
            if not tasks:
                del self._waiting[task.queue_id]
        return [task.id for task in found]

    def rebuilding(self, queue_id: str) -> bool:
        """Whether a model does not have all its acknowledged operations yet.

        This is so while its snapshot is to be read or dropped, or operations are to be replayed.
        """
        return any(task.replay or task.kind == RESTORE for task in self._waiting.get(queue_id, ()))

    def hold(self, queue_id: str) -> None:
        """Withhold the tasks of a queue until `release`."""
        self._held.add(queue_id)

    def release(self, queue_id: str) -> None:
        """Undo `hold`."""
        self._held.discard(queue_id)

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._waiting.values())

    def __bool__(self) -> bool:
        """Whether any queue that is not held has a task."""
        return any(queue_id not in self._held for queue_id in self._waiting)
