"""A runtime on a real log, with engines of a script, and what it counts and records."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from service_simulation.parts.supervisor import INFO, ScriptedChild
from service_simulation.parts.support import rows_of

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Outcome, Sample, Submission
from twinkle_server.runtime.core import Runtime
from twinkle_server.runtime.outcomes import StoreEffects
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.store import Store

TIMES = Times(poll=5.0, gap_fail=20.0, gap_limit=90.0, deadline=1e4, drain=5.0)
MODELS = ("s:train:0", "s:train:1")
SAMPLER = "s:sample:0"
SMALL = 60
"""Bytes of the largest payload that stays in memory."""


class Figures:
    """What the runtime counts."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str, int, str]] = []
        self.seconds: list[float] = []
        self.counts: dict[str, int] = dict.fromkeys(("passed", "restored", "detached", "replayed", "bytes"), 0)
        self.deaths: list[str] = []

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        self.ended.append((kind, outcome, tokens, tenant))
        self.seconds.append(seconds)

    def progressed(self, head: Mapping[str, Any]) -> None:
        pass

    def passed(self, head: Mapping[str, Any]) -> None:
        self.counts["passed"] += 1

    def restored(self) -> None:
        self.counts["restored"] += 1

    def detached(self) -> None:
        self.counts["detached"] += 1

    def replayed(self, count: int = 1) -> None:
        self.counts["replayed"] += count

    def restarted(self, reason: str) -> None:
        self.deaths.append(reason)

    def snapshotted(self, size: int) -> None:
        self.counts["bytes"] += size

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        pass


class Effects(StoreEffects):
    """Notes which models are recorded as attached, detached or corrupted."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.data, store)
        self.notes: list[tuple[str, str]] = []

    async def attached(self, tenant: str, model: str) -> None:
        self.notes.append(("attached", model))
        await super().attached(tenant, model)

    async def detached(self, tenant: str, model: str) -> None:
        self.notes.append(("detached", model))
        await super().detached(tenant, model)

    async def corrupted(self, tenant: str, model: str, reason: str) -> None:
        self.notes.append(("corrupted", model))
        await super().corrupted(tenant, model, reason)


class RuntimeLife:
    """A runtime and its engines.

    Attributes:
        children: engines that were started.
        settings: of the runtime.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.figures, self.effects = Figures(), Effects(store)
        self.children: list[ScriptedChild] = []
        self.settings = settings = Settings(
            "m", store.data, name="m", tokenizer="t", times=TIMES, limits=Limits(small_bytes=SMALL, queued=8)
        )
        self.runtime = Runtime(settings, store.journal, self.effects, self.start_child, self.figures)

    async def start_child(self, first: bool) -> Any:
        """Start an engine; see `supervision.StartChild`."""
        self.children.append(ScriptedChild())
        return self.children[-1]

    @property
    def child(self) -> ScriptedChild:
        """The engine that runs."""
        return self.children[-1]

    async def begin(self) -> None:
        """Start, with an engine that is ready."""
        await self.runtime.start()
        await self.ready()

    async def ready(self) -> None:
        """Let a new engine be ready."""
        await asyncio.sleep(0.01)
        self.child.say(messages.READY, info=INFO)
        await asyncio.sleep(0.1)

    async def submit(self, number: int, kind: Any = "optim_step", queue: str = MODELS[0], **fields: Any) -> str:
        """Submit an operation, and return the id of its future."""
        payload = fields.pop("payload", b"x%d" % number)
        submission = Submission("ada", queue, kind, payload, number, 3, **fields)
        request = (await self.runtime.submit(submission)).request
        await asyncio.sleep(0.1)
        return request

    def sent(self, since: int = 0) -> list[tuple[Any, ...]]:
        """Return what the engine was sent: type, queue, and what is special of it."""
        return [_short(message) for message in self.child.sent[since:]]

    def answer(self, number: int, queue: str = MODELS[0], body: bytes = b"ok", **head: Any) -> int:
        """Let the engine answer the operation that it was sent last under a number; return its id."""
        runs = [each.head for each in self.child.sent if each.type == messages.RUN]
        row = [each["id"] for each in runs if (each["queue_id"], each["number"]) == (queue, number)][-1]
        self.child.say(messages.DONE, body, id=row, **head)
        return int(row)

    async def state(self, request: str) -> tuple[str, str | None]:
        """Return how a future ended."""
        future = await self.runtime.wait(request, "ada", 0.0)
        return future.status, future.error

    def status(self, model: str = MODELS[0]) -> str:
        """Return the status in the row of a model."""
        return str(rows_of(self.store, "SELECT status FROM models WHERE id = ?", model)[0][0])


def _short(message: Message) -> tuple[Any, ...]:
    head = message.head
    if message.type == messages.RUN:
        return ("run", head["queue_id"], head["number"], "replay" if head["replay"] else "", head["alone"])
    return (message.type, head.get("queue_id", head.get("id")), head.get("folder"))


def run(number: int, replay: bool = False, alone: bool = False, queue: str = MODELS[0]) -> tuple[Any, ...]:
    return ("run", queue, number, "replay" if replay else "", alone)


async def log_earlier(store: Store, number: int, done: bool, queue: str = MODELS[0], kind: Any = "optim_step") -> Any:
    """Write an operation into the log, as an earlier life did."""
    payload = Sample([1]).dump() if kind == "sample" else b"x%d" % number
    _, operation = await store.journal.submit(Submission("ada", queue, kind, payload, number, 3))
    if done:
        await store.journal.finish([Outcome(operation.id, b"ok", composition=f"[{number}]")])
    return operation
