"""A runtime without processes or disks: an engine in the test's loop that dies when told to, and a log in memory."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_server.engine import messages
from twinkle_server.engine.messages import LinkClosed, Message
from twinkle_server.operations import Accepted, Category, Future, Kind, ModelInfo, Operation, Outcome, Submission
from twinkle_server.runtime.core import Runtime
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.store.memory import MemoryJournal

INFO = {"name": "fake", "context": 64, "vocabulary": 100, "losses": ["cross_entropy"]}
SOON = 20.0  # seconds in which everything here happens, by far


class Database:
    """Runs what comes with an operation; there is no connection."""

    async def write(self, work: Callable[[Any], Any]) -> Any:
        return work(None)

    async def read(self, work: Callable[[Any], Any]) -> Any:
        return work(None)


@dataclass
class Plan:
    """What engines do.

    Attributes:
        deaths: how often an engine dies by itself, at random moments.
        chance: of a death at each moment.
        poison: numbers of operations that kill whoever does them.
        hang: numbers of operations that never end.
        fail: numbers that fail as the user's fault.
        lose: kinds of messages from the engine that are lost when it dies although it wrote them.
        snapshot_every: operations of a queue after which it is snapshotted.
        seconds: that each operation takes.
        unreadable: snapshots cannot be read back.
        stubborn: replays of these numbers fail.
        scarce: times that a snapshot cannot be read, or a replay be done, for want of memory.
        deadly: snapshots of these models kill the engine that reads them.
        silent: a WITHDRAW is never answered.
    """

    seed: int = 0
    deaths: int = 0
    chance: float = 0.15
    poison: frozenset[int] = frozenset()
    hang: frozenset[int] = frozenset()
    fail: frozenset[int] = frozenset()
    snapshot_every: int = 5
    seconds: float = 0.0
    unreadable: bool = False
    stubborn: frozenset[int] = frozenset()
    scarce: int = 0
    deadly: frozenset[str] = frozenset()
    silent: bool = False
    disk: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    runs: list[tuple[str, int, bool, bool]] = field(default_factory=list)
    started: int = 0
    detached: list[str] = field(default_factory=list)
    drained: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def dies(self) -> bool:
        """Draw whether the engine dies here."""
        if self.deaths <= 0 or self.random.random() >= self.chance:
            return False
        self.deaths -= 1
        return True


class FakeEngine:
    """A `Child` that keeps, for each model, the numbers of the operations that were applied to it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.models: dict[str, list[int]] = {}
        self.cancelled: set[int] = set()
        self._waiting: dict[int, bool] = {}
        self.broken: set[str] = set()
        self.last_words = ""
        self.dead = asyncio.Event()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        plan.started += 1

    def put(self, message: Message) -> None:
        if self.dead.is_set():
            raise LinkClosed("dead")
        if message.type == messages.CANCEL:
            self.cancelled.add(message.head["id"])
        if message.type == messages.WITHDRAW:
            self._withdraw(set(message.head["ids"]))
            return
        self._waiting[message.head.get("id", -1)] = not message.head.get("replay")
        self._inbox.put_nowait(Message.unpack(*_parts(message)))

    def _withdraw(self, ids: set[int]) -> None:
        if self.plan.silent:
            return
        out = [number for number in ids if self._waiting.get(number)]
        self.cancelled.update(out)
        self._say(messages.WITHDRAWN, {"ids": list(ids), "out": out})

    async def room(self) -> None:
        if self.dead.is_set():
            raise LinkClosed("dead")
        await asyncio.sleep(0)

    async def receive(self) -> Message:
        message = await self._outbox.get()
        if message is None:
            raise LinkClosed("dead")
        return message

    def kill(self) -> None:
        self.dead.set()
        self._task.cancel()
        self._outbox.put_nowait(None)

    async def wait(self) -> str:
        await self.dead.wait()
        await asyncio.wait([self._task])
        return "killed"

    def _say(self, kind: str, head: dict[str, Any], body: bytes = b"") -> None:
        self._outbox.put_nowait(Message.unpack(*_parts(Message(kind, head, body))))

    def _lacks(self) -> bool:
        if self.plan.scarce <= 0:
            return False
        self.plan.scarce -= 1
        return True

    def _moment(self) -> None:
        if self.plan.dies():
            if self.plan.random.random() < 0.5:
                while not self._outbox.empty():
                    self._outbox.get_nowait()
            raise SystemError("the engine dies")

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)
            self._say(messages.READY, {"info": INFO})
            while True:
                message = await self._inbox.get()
                await self._do(message)
        except SystemError:
            self.dead.set()
            self._outbox.put_nowait(None)

    async def _do(self, message: Message) -> None:
        head = message.head
        self._waiting.pop(head.get("id", -1), None)
        self._moment()
        if message.type == messages.RUN:
            await self._operation(head, message.body)
        elif message.type == messages.RESTORE:
            self.models.pop(head["queue_id"], None)
            self.broken.discard(head["queue_id"])
            if head["folder"] is not None and self._lacks():
                self.broken.add(head["queue_id"])
                self._say(messages.RESTORED, {"queue_id": head["queue_id"], "error": "no memory", "later": True})
                return
            if head["folder"] is not None and head["queue_id"] in self.plan.deadly:
                raise SystemError("a deadly snapshot")
            if head["folder"] is not None and not self.plan.unreadable:
                self.models[head["queue_id"]] = list(self.plan.disk[head["folder"]][1])
            error = "damaged" if head["folder"] is not None and self.plan.unreadable else None
            self._say(messages.RESTORED, {"queue_id": head["queue_id"], "error": error})
        elif message.type in (messages.DETACH, messages.SNAPSHOT):
            self._snapshot(head["queue_id"])
            if message.type == messages.DETACH:
                self._moment()
                self.models.pop(head["queue_id"], None)
                self.plan.detached.append(head["queue_id"])
                self._say(messages.DETACHED, {"queue_id": head["queue_id"]})
        elif message.type == messages.DRAIN:
            for queue_id in self.models:
                self._snapshot(queue_id)
            self.plan.drained += 1
            self._say(messages.DRAINED, {})
            await asyncio.Event().wait()

    def _snapshot(self, queue_id: str) -> None:
        if queue_id not in self.models:
            return
        folder = f"snapshots/{len(self.plan.disk)}"
        number = max([0, *self.models[queue_id]])
        self.plan.disk[folder] = (number, list(self.models[queue_id]))
        self._say(
            messages.SNAPSHOTTED, {"queue_id": queue_id, "number": number, "folder": folder, "digest": "", "size": 1}
        )

    async def _operation(self, head: dict[str, Any], body: bytes) -> None:
        number, queue_id, kind = head["number"], head["queue_id"], head["kind"]
        if head["id"] in self.cancelled:
            return
        self._say(messages.BEGIN, {"ids": [head["id"]]})
        self.plan.runs.append((queue_id, number, head["alone"], head["replay"]))
        await asyncio.sleep(self.plan.seconds)
        self._moment()
        if number in self.plan.poison:
            raise SystemError("poisoned")
        if number in self.plan.hang:
            await asyncio.Event().wait()
        error, category = None, None
        if later := head["replay"] and self._lacks():
            self.broken.add(queue_id)
            self.models.pop(queue_id, None)
        if queue_id in self.broken:
            error, category = "its state is lost", "server"
        elif kind == "create":
            self.models[queue_id] = []
        elif number in self.plan.fail or (head["replay"] and number in self.plan.stubborn):
            error, category = "it is told to fail", "user"
        elif kind == "unload":
            self.models.pop(queue_id)
        elif kind != "sample":
            self.models[queue_id].append(number)
        result = json.dumps({"applied": self.models.get(queue_id, []), "asked": body.decode()}).encode()
        done = {"id": head["id"], "error": error, "category": category, "extra": {}, "later": later}
        self._say(messages.DONE, done, b"" if error else result)
        self._moment()
        if kind != "sample" and number and number % self.plan.snapshot_every == 0 and queue_id in self.models:
            self._snapshot(queue_id)
        await asyncio.sleep(0)


def _parts(message: Message) -> tuple[bytes, bytes]:
    frame = message.pack()
    head, body = messages.SIZES.unpack(frame[:8])
    return frame[8 : 8 + head], frame[8 + head : 8 + head + body]


class FakeEffects:
    """The rest of the store: what happened to models, in words."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.removed: list[str] = []
        self.inflight: str | None = None
        self.states: dict[str, tuple[str, Category]] = {}

    def done(self, operation: Operation, extra: dict[str, Any], body: bytes) -> Outcome:
        return Outcome(operation.id, result=body)

    async def closed(self, tenant: str, model: str) -> tuple[str, Category] | None:
        return self.states.get(model)

    async def attached(self, tenant: str, model: str) -> None:
        self.said.append(("attached", model))

    async def detached(self, tenant: str, model: str) -> None:
        self.said.append(("detached", model))

    async def gone(self, tenant: str, model: str, reason: str) -> None:
        self.said.append(("gone", model))
        self.states[model] = (f"gone: {reason}", "user")

    async def unloaded(self) -> None:
        self.said.append(("unloaded", ""))

    async def corrupted(self, tenant: str, model: str, reason: str) -> None:
        self.said.append(("corrupted", model))
        self.states[model] = (reason, "server")

    async def last_checkpoint(self, tenant: str, model: str) -> str | None:
        return f"tinker://{model}/weights/good"

    async def inflight_folder(self, tenant: str, model: str) -> str | None:
        return self.inflight

    async def remove(self, folders: Sequence[str]) -> None:
        self.removed.extend(folders)


@dataclass
class World:
    """What outlives a runtime: the log, the effects, the engines' plan."""

    plan: Plan = field(default_factory=Plan)
    journal: MemoryJournal = field(default_factory=lambda: MemoryJournal(Database(), b"secret"))
    effects: FakeEffects = field(default_factory=FakeEffects)
    times: Times = field(default_factory=Times)
    limits: Limits = field(default_factory=Limits)
    engines: list[FakeEngine] = field(default_factory=list)

    async def runtime(self) -> Runtime:
        """Start a runtime."""
        settings = Settings("fake", Path("/nowhere"), times=self.times, limits=self.limits)
        made = Runtime(settings, self.journal, self.effects, self._start)
        await made.start()
        return made

    async def _start(self, first: bool) -> FakeEngine:
        self.engines.append(FakeEngine(self.plan))
        return self.engines[-1]


async def ask(
    runtime: Runtime,
    number: int | None,
    kind: Kind = "forward_backward",
    queue_id: str = "s:train:0",
    tenant: str = "ada",
) -> Accepted:
    """Submit an operation whose payload is its number."""
    return await runtime.submit(
        Submission(tenant, queue_id, kind, json.dumps({"n": number}).encode(), number, tokens=1)
    )


async def answer(runtime: Runtime, request: str, tenant: str = "ada") -> Future:
    """Wait for a future's end."""
    future = await runtime.wait(request, tenant, SOON)
    assert future.status != "pending", f"{request} was not over within {SOON} s: {runtime.queue_state(future.queue_id)}"
    return future


def applied(future: Future) -> list[int]:
    """Return the numbers that were applied to the model up to this operation."""
    assert future.result is not None, future.error
    found: list[int] = json.loads(future.result)["applied"]
    return found


def within(seconds: float, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine on a loop of its own, for at most so long."""

    async def limited() -> Any:
        return await asyncio.wait_for(work(), seconds)

    return asyncio.run(limited())


def model_info() -> ModelInfo:
    """Return what the fake engine says of itself."""
    return ModelInfo(**{**INFO, "losses": tuple(INFO["losses"])})  # type: ignore[arg-type]
