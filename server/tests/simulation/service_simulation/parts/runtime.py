"""The runtime on a real log, with engines of a script: what is sent to them, written of them, and counted."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from service_simulation.parts.supervisor import INFO, ScriptedChild
from service_simulation.parts.support import opened, refused, rows_of
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.errors import Busy, LeaseLost, Unavailable, Unprocessable
from twinkle_server.operations import Create, ModelInfo, Outcome, Sample, Save, Snapshot, Submission
from twinkle_server.runtime.core import Runtime
from twinkle_server.runtime.outcomes import StoreEffects
from twinkle_server.runtime.queues import Closed
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.store import Store, models
from twinkle_server.store.records import Model, Session

TIMES = Times(poll=5.0, gap_fail=20.0, gap_limit=90.0, deadline=1e4, drain=5.0)
MODELS = ("s:train:0", "s:train:1")
SAMPLER = "s:sample:0"
SMALL = 60
"""Bytes of the largest payload that stays in memory."""


class _Figures:
    """What the runtime counts."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str, int, str]] = []
        self.seconds: list[float] = []
        self.counts: dict[str, int] = dict.fromkeys(("passed", "restored", "detached", "replayed", "bytes"), 0)
        self.deaths: list[str] = []

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        self.ended.append((kind, outcome, tokens, tenant))
        self.seconds.append(seconds)

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


class _Effects(StoreEffects):
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


class _Life:
    """A runtime and its engines.

    Attributes:
        children: engines that were started.
        pids: makes their ids differ.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.figures, self.effects = _Figures(), _Effects(store)
        self.children: list[ScriptedChild] = []
        settings = Settings(
            "m", store.data, name="m", tokenizer="t", times=TIMES, limits=Limits(small_bytes=SMALL, queued=8)
        )
        self.runtime = Runtime(settings, store.journal, self.effects, self._start_child, self.figures)

    async def _start_child(self, first: bool) -> Any:
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


def _run(number: int, replay: bool = False, alone: bool = False, queue: str = MODELS[0]) -> tuple[Any, ...]:
    return ("run", queue, number, "replay" if replay else "", alone)


async def run_operations(clock: Clock, draw: random.Random) -> None:
    """Every operation that is in the log is sent once, in order, and its end is written, told and counted once."""
    for work in draw.sample(_SCENES, 2):
        with opened(draw, limits=Limits(small_bytes=SMALL), times=TIMES) as store:
            await store.sessions.create(Session("s", "ada", clock.wall(), clock.wall()))
            for number, name in enumerate(MODELS):
                model = Model(name, "ada", "s", number, "base", 8, clock.wall(), clock.wall())
                await store.database.write(lambda connection, model=model: models.add(connection, model))
                await store.models.set_status("ada", name, "live", clock.wall())
            life = _Life(store)
            try:
                await work(life, clock, draw)
            finally:
                await life.runtime.close()
            demand(all(child.over.done() for child in life.children), "an engine runs after the end")


async def _log(store: Store, number: int, done: bool, queue: str = MODELS[0], kind: Any = "optim_step") -> Any:
    """Write an operation into the log, as an earlier life did."""
    payload = Sample([1]).dump() if kind == "sample" else b"x%d" % number
    _, operation = await store.journal.submit(Submission("ada", queue, kind, payload, number, 3))
    if done:
        await store.journal.finish([Outcome(operation.id, b"ok", composition=f"[{number}]")])
    return operation


async def _resume(life: _Life, clock: Clock, draw: random.Random) -> None:
    """What is pending at the start is taken up; what a snapshot contains, but was never written, fails."""
    store, runtime = life.store, life.runtime
    none = draw.random() < 0.2
    for number in range(3):
        await _log(store, number, done=True)
    covered = None if none else await _log(store, 3, done=False)
    folder = "snapshots/a"
    await store.journal.snapshotted(Snapshot(MODELS[0], 1 if none else 3, folder, "d", 1))
    pending = [] if none else [await _log(store, 4, False), await _log(store, 0, False, SAMPLER, "sample")]
    await store.models.set_status("ada", MODELS[0], "detached", clock.wall())
    begin = clock.now
    demand(runtime.info == ModelInfo("m", 0, 0), "what is known of a model before an engine has it")
    await runtime.start()
    open_ = [] if covered is None else [covered, *pending]
    demand(runtime.futures.waiting["ada"] == len(open_), f"{runtime.futures.waiting} wait")
    demand(all(runtime.futures.find(each.request, "ada") for each in open_), "nobody can wait for what is pending")
    expected = runtime.arrivals.expected_until("ada", 1.0)
    demand(expected == (begin + TIMES.resend if pending else float("-inf")), f"requests may come until {expected}")
    await life.ready()
    if covered is None:
        demand(not life.sent(), f"{life.sent()} although nothing is pending")
        request = await life.submit(3)
        wanted = [("restore", MODELS[0], folder), _run(2, replay=True), _run(3)]
        demand(life.sent() == wanted, f"{life.sent()}")
        demand(life.child.sent[1].head.get("composition") == "[2]", "how its passes were composed")
        demand(life.figures.counts["replayed"] == 1 == runtime.dispatcher.replays, "replays are counted")
        demand(await life.state(request) == ("pending", None), "it is over")
        return
    demand(await life.state(covered.request) == ("failed", "the result could not be written"), "what a snapshot has")
    demand(life.figures.ended == [("optim_step", "server", 3, "ada")], f"{life.figures.ended}")
    demand(sorted(life.sent()) == sorted([("restore", MODELS[0], folder), _run(4), _run(0, queue=SAMPLER)]),
           f"{life.sent()}")  # fmt: skip
    demand(runtime.futures.waiting["ada"] == 2, f"{runtime.futures.waiting} wait")
    demand(life.status() == "live", "a model that is attached is not recorded as such")


async def _count(life: _Life, clock: Clock, draw: random.Random) -> None:
    """Each end is counted once, with its tokens and the seconds that it took."""
    await life.begin()
    runtime, figures = life.runtime, life.figures
    demand(runtime.info.tokenizer == "t" and runtime.info.name == INFO["name"], f"{runtime.info}")
    refused_ = await life.submit(0, refusal="it is refused")
    demand(figures.ended == [("optim_step", "user", 3, "ada")] and figures.seconds == [0.0], f"{figures.ended}")
    demand(await life.state(refused_) == ("failed", "it is refused"), "what was refused")
    done, failed, late, sample = [
        await life.submit(1, "forward"),
        await life.submit(2, "forward_backward"),
        await life.submit(4),
        await life.submit(0, "sample", SAMPLER, payload=Sample([1]).dump()),
    ]
    demand(await life.submit(1, "forward") == done, "a repetition has another future")
    demand(runtime.queued("ada") == 4 and len(runtime.futures) == 4, f"{runtime.queued('ada')} wait")
    await asyncio.sleep(2.0)
    life.answer(1, composition="[7]")
    life.answer(1)
    life.answer(2, error="it failed", category="user")
    await runtime.cancel(late, "ada")
    await asyncio.sleep(0.5)
    await runtime.cancel(sample, "ada")
    await asyncio.sleep(0.5)
    ends = ("forward", "done"), ("forward_backward", "user"), ("optim_step", "cancelled"), ("sample", "cancelled")
    wanted = [(kind, ending, 3, "ada") for kind, ending in ends]
    demand(sorted(figures.ended[1:]) == sorted(wanted), f"{figures.ended}")
    demand(all(2.0 < each < 4.0 for each in figures.seconds[1:]), f"{figures.seconds}")
    demand(await life.state(done) == ("done", None) and await life.state(failed) == ("failed", "it failed"), "the ends")
    demand((await life.state(late))[0] == (await life.state(sample))[0] == "cancelled", "what was cancelled")
    (sampled,) = rows_of(life.store, "SELECT id FROM operations WHERE lane = ?", SAMPLER)
    demand(life.sent()[-1] == ("cancel", sampled[0], None), f"{life.sent()}")
    demand(not runtime.queued("ada") and not runtime.dispatcher.in_flight, "something is left")
    row = rows_of(life.store, "SELECT id FROM operations WHERE number = 1 AND lane = ?", MODELS[0])[0][0]
    demand(await life.store.journal.composition(row) == "[7]", "how its pass was composed")
    for number, error, trouble in ((3, "it broke", True), (5, None, False)):
        await life.submit(number)
        life.answer(number, error=error, category="server" if error else None)
        await asyncio.sleep(0.1)
        life.child.say(messages.PASSED, kind="optim_step", tokens=3)
        await asyncio.sleep(0.1)
        shown = "the last optimizer step failed as a whole; the log says why" if trouble else "worked"
        demand(runtime.ready()[1]["last_pass"] == shown and runtime.ready()[0] is not trouble, f"{runtime.ready()}")
    if draw.random() < 0.3:
        await life.submit(6)
        life.answer(6, error="it broke", category="server")
        life.child.say(messages.PASSED, kind="optim_step", tokens=3)
        life.child.die()
        await asyncio.sleep(1.0)
        await life.ready()
        demand(runtime.ready()[1]["last_pass"] == "worked", "a new engine is in trouble")
        return
    life.child.say("nonsense")
    life.child.say(messages.SNAPSHOTTED, queue_id="nowhere", number=1, folder="snapshots/q", digest="", size=11)
    await asyncio.sleep(0.1)
    counts = {"passed": 2, "restored": 0, "detached": 0, "replayed": 0, "bytes": 11}
    demand(figures.counts == counts, f"{figures.counts}")
    demand(len(life.children) == 1, "an unknown message ends the engine")


async def _detach(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A model of a session that ended is let go of when nothing runs, and recorded so when the engine has freed it."""
    await life.begin()
    runtime, name = life.runtime, MODELS[0]
    await life.submit(0)
    begin = len(life.child.sent)
    await runtime.finish_session("s")
    await asyncio.sleep(0.5)
    demand(not life.sent(begin) and not life.effects.notes, "a model that works is let go of")
    life.answer(0)
    await asyncio.sleep(0.5)
    demand(life.sent(begin) == [("detach", name, None)], f"{life.sent(begin)}")
    demand(life.status() == "live" and not life.effects.notes, "it is recorded before the engine has freed it")
    again = draw.random() < 0.5
    if again:
        request = await life.submit(1)
        demand(len(life.child.sent) == begin + 1, "it is sent to a model that is being freed")
    life.child.say(messages.DETACHED, queue_id=name)
    life.child.say(messages.DETACHED, queue_id="nowhere")
    await asyncio.sleep(0.5)
    if not again:
        demand(life.effects.notes == [("detached", name)] and life.status() == "detached", f"{life.effects.notes}")
        demand(life.figures.counts["detached"] == 2, "what was freed is counted")
        return
    demand(("detached", name) not in life.effects.notes, "a model that is used is recorded as detached")
    wanted = [("detach", name, None), _run(0, replay=True), _run(1)]
    demand([each for each in life.sent(begin) if each[0] != "restore"] == wanted, f"{life.sent(begin)}")
    life.child.say(messages.RESTORED, queue_id=name)
    life.answer(0)
    life.answer(1)
    life.child.say(messages.DETACHED, queue_id=name)  # nobody asked for it
    await asyncio.sleep(0.5)
    demand(("detached", name) not in life.effects.notes and life.status() == "live", "what the engine has is detached")
    demand(await life.state(request) == ("done", None), "it did not end")


async def _leave_while_sending(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A session ends while the operations of its model wait for room: they fail, and the model is let go of."""
    await _log(life.store, 0, done=True)
    await life.begin()
    life.child.free.clear()
    request = await life.submit(1)
    await life.runtime.finish_session("s")
    life.child.say(messages.RESTORED, queue_id=MODELS[0])
    life.answer(0)
    await asyncio.sleep(0.1)
    demand(await life.state(request) == ("failed", "its session was finished"), f"{await life.state(request)}")
    demand(life.sent() == [("restore", MODELS[0], None), _run(0, replay=True)], f"{life.sent()}")
    life.child.free.set()
    await asyncio.sleep(0.1)
    demand(life.sent()[2:] == [("detach", MODELS[0], None)], f"{life.sent()}")


async def _detach_without_engine(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A model that no engine has is recorded as detached at once."""
    await life.begin()
    await life.submit(0)
    life.answer(0)
    await asyncio.sleep(0.1)
    while_working = draw.random() < 0.5
    if while_working:
        await life.runtime.finish_session("nobody")
        await life.submit(1)
        await life.runtime.finish_session("s")
    life.child.die()
    await asyncio.sleep(0.001)
    if not while_working:
        await life.runtime.finish_session("s")
        await asyncio.sleep(0.5)
    else:  # what was under way runs again first
        await life.ready()
        demand(not life.effects.notes or life.effects.notes[-1][0] != "detached", "a model that works is let go of")
        life.child.say(messages.RESTORED, queue_id=MODELS[0])
        life.answer(0)
        life.answer(1)
        await asyncio.sleep(0.5)
        demand(life.sent()[-1] == ("detach", MODELS[0], None), f"{life.sent()}")
        life.child.say(messages.DETACHED, queue_id=MODELS[0])
        await asyncio.sleep(0.5)
    demand(life.status() == "detached" and life.effects.notes[-1] == ("detached", MODELS[0]), f"{life.effects.notes}")
    demand(life.status(MODELS[1]) == "live", "a model that nobody used is detached")


async def _restore(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A model that cannot be restored is tried again if memory lacks, and given up otherwise."""
    store, runtime, name = life.store, life.runtime, MODELS[0]
    await _log(store, 0, done=True)
    await store.journal.snapshotted(Snapshot(name, 0, "snapshots/a", "d", 1))
    saved = draw.random() < 0.5
    if saved:
        save = Save("checkpoints/c", "weights", "w")
        _, operation = await store.journal.submit(Submission("ada", name, "save", save.dump(), 1))
        outcome = life.effects.done(operation, {"size_bytes": 1, "digest": "d"}, b"")
        await store.journal.finish([outcome])
    else:
        await _log(store, 1, done=True)
    await life.begin()
    first, second = await life.submit(2), await life.submit(3)
    base = [("restore", name, "snapshots/a"), _run(1, replay=True), _run(2), _run(3)]
    demand(life.sent() == base, f"{life.sent()}")
    how = draw.choice(["lacks", "lacks later", "broken", "replay fails", "foreign"])
    begin = len(life.child.sent)
    if how == "lacks":
        life.child.say(messages.RESTORED, queue_id=name, error="no memory", later=True)
    elif how == "broken":
        life.child.say(messages.RESTORED, queue_id=name, error="it is damaged")
    elif how == "foreign":
        life.child.say(messages.RESTORED, queue_id="nowhere", error="it is damaged")
        life.child.say(messages.RESTORED, queue_id=name)
        life.answer(1)
    else:
        life.child.say(messages.RESTORED, queue_id=name)
        life.answer(1, error="it failed", later=how == "lacks later")
    await asyncio.sleep(0.5)
    if how == "foreign":
        demand(not life.sent(begin) and life.status() == "live", f"{life.sent(begin)}")
        life.answer(2)
        await asyncio.sleep(0.1)
        demand((await life.state(first))[0] == "done" and (await life.state(second))[0] == "pending", "what is done")
        return
    demand(life.sent(begin) == [("restore", name, None)], f"{life.sent(begin)}")
    if how.startswith("lacks"):
        state, reason = runtime.queue_state(name)
        demand(state == "paused_capacity" and "not enough memory" in str(reason), f"{state} {reason}")
        life.answer(2)  # of before; it is not known any more
        life.child.say(messages.RESTORED, queue_id=name)
        await asyncio.sleep(0.9)
        demand(life.sent(begin) == [("restore", name, None)], "it is tried again too early")
        await asyncio.sleep(0.5)
        demand(life.sent(begin + 1) == base, f"{life.sent(begin)}")
        demand(runtime.waiting == 4, f"{runtime.waiting} are unanswered")
        life.child.say(messages.RESTORED, queue_id=name)
        for number in (1, 2, 3):
            life.answer(number)
        await asyncio.sleep(0.5)
        demand(await life.state(first) == await life.state(second) == ("done", None), "they did not end")
        demand(life.figures.ended == [("optim_step", "done", 3, "ada")] * 2, f"{life.figures.ended}")
        return
    why = (
        "the newest snapshot cannot be read"
        if how == "broken"
        else "operation 1 failed when it was repeated: it failed"
    )
    last = f"; its last good checkpoint is tinker://{name}/weights/w" if saved else "; it has no checkpoint"
    wanted = ("failed", f"cannot restore this model: {why}{last}")
    demand(await life.state(first) == await life.state(second) == wanted, f"{await life.state(first)}")
    demand(life.status() == "corrupted" and not runtime.queued("ada"), "it is not recorded")
    third = await life.submit(4)
    demand(await life.state(third) == wanted, f"{await life.state(third)}")


async def _wait_for_room(life: _Life, clock: Clock, draw: random.Random) -> None:
    """While an engine takes no more messages, operations wait in their queues."""
    await _log(life.store, 0, done=True)
    await life.begin()
    life.child.free.clear()
    large = b"y" * (SMALL + 1)
    for number in (1, 2, 3):
        await life.submit(number, payload=large)
    for runs in (1, 2, 3, 4):
        sent = [each[2] for each in life.sent() if each[0] == "run"]
        demand(sent == list(range(runs)), f"{sent} was sent without room")
        life.child.free.set()
        life.child.free.clear()
        await asyncio.sleep(0.1)
    demand(life.runtime.queued("ada") == 3, "how many wait")


async def _snapshot(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A snapshot is recorded after what it contains, and replaces the one before; one that is not wanted is removed."""
    await life.begin()
    store, runtime, name = life.store, life.runtime, MODELS[0]
    for number in range(3):
        await life.submit(number)
    for number in (0, 1):
        life.answer(number)
    await asyncio.sleep(0.1)
    places = [store.data / "snapshots" / each for each in "abcd"]
    for place in places:
        place.mkdir()

    def report(number: int, place: int) -> str:
        folder = f"snapshots/{places[place].name}"
        life.child.say(messages.SNAPSHOTTED, queue_id=name, number=number, folder=folder, digest="d", size=1)
        return folder

    real, held = store.journal.snapshotted, list[bool]()

    async def snapshotted(snapshot: Snapshot) -> list[str]:
        held.append(snapshot.folder in runtime.unrecorded)
        return await real(snapshot)

    with mock.patch.object(store.journal, "snapshotted", snapshotted):
        first = report(0, 0)
        await asyncio.sleep(0.1)
    demand(held == [True], "upkeep may remove a snapshot before it is recorded")
    demand(await store.journal.snapshot(name) == Snapshot(name, 0, first, "d", 1), "the snapshot is not recorded")
    second = report(1, 1)
    await asyncio.sleep(0.1)
    demand(await store.journal.snapshot(name) == Snapshot(name, 1, second, "d", 1), "the next one is not recorded")
    demand(not places[0].exists() and places[1].exists(), "the one before is left")
    how = draw.choice(["older", "too new", "closed", "postponed", "postponed later"])
    if how == "older":
        report(0, 2)
    elif how == "too new":
        report(2, 2)  # it says that it contains what is still under way
    elif how == "closed":
        runtime.dispatcher.close(runtime.dispatcher.queues[name], Closed("it is over"))
        report(1, 2)
    else:
        if how == "postponed later":
            report(1, 2)
            await asyncio.sleep(0)
        runtime.dispatcher.postpone(runtime.dispatcher.queues[name], "a reason")
        if how == "postponed":
            report(1, 2)
    await asyncio.sleep(0.5)
    kept = [place.name for place in places if place.exists()]
    current = await store.journal.snapshot(name)
    demand(current is not None, "there is no snapshot")
    wanted = [str(current and current.folder).partition("/")[2], "d"]
    demand(kept == wanted, f"{how}: {kept} is kept, not {wanted}")
    demand(how == "postponed later" or wanted == ["b", "d"], f"{how}: {current} is recorded")
    demand(not runtime.unrecorded, f"{runtime.unrecorded} is not recorded")


async def _refuse_outcome(life: _Life, clock: Clock, draw: random.Random) -> None:
    """What the log cannot hold fails; its model is restored without it, and what came after it runs again."""
    await life.begin()
    store, runtime, name = life.store, life.runtime, MODELS[0]
    requests = [await life.submit(number) for number in range(4)]
    life.answer(0)
    await asyncio.sleep(0.1)
    real, bad = store.journal.finish, set[int]()

    async def finish(outcomes: Any) -> Any:
        if any(each.operation in bad and each.result is not None for each in outcomes):
            raise ValueError("the log cannot hold it")
        return await real(outcomes)

    begin = len(life.child.sent)
    with mock.patch.object(store.journal, "finish", finish):
        (store.data / "snapshots" / "a").mkdir()
        bad.add(life.answer(1))
        life.answer(2)
        number = draw.choice([1, 2])
        life.child.say(messages.SNAPSHOTTED, queue_id=name, number=number, folder="snapshots/a", digest="d", size=1)
        await asyncio.sleep(0.5)
        demand(life.sent(begin) == [("restore", name, None)], f"{life.sent(begin)}")
        state, reason = runtime.queue_state(name)
        demand(state == "paused_capacity" and "the result of an operation could not be written" in str(reason), reason)
        demand(runtime.dispatcher.queues[name].distrusts, "what the engine has is trusted")
        life.child.say(messages.RESTORED, queue_id=name)
        await asyncio.sleep(1.5)
    demand(await life.state(requests[1]) == ("failed", "the result could not be written"), "it did not fail")
    demand(await store.journal.snapshot(name) is None and not (store.data / "snapshots" / "a").exists(), "its snapshot")
    demand(not runtime.dispatcher.queues[name].distrusts, "the engine is distrusted for ever")
    wanted = [("restore", name, None), _run(0, replay=True), _run(2), _run(3)]
    demand(life.sent(begin + 1) == wanted, f"{life.sent(begin + 1)}")
    life.child.say(messages.RESTORED, queue_id=name)
    for each in (0, 2, 3):
        life.answer(each)
    await asyncio.sleep(0.5)
    ends = [(await life.state(each))[0] for each in requests]
    demand(ends == ["done", "failed", "done", "done"], f"{ends}")
    demand(len(life.figures.ended) == 4, f"{life.figures.ended}")


async def _refuse_while_leaving(life: _Life, clock: Clock, draw: random.Random) -> None:
    """The last outcome of a model that is being let go of cannot be written: it is detached after it was restored."""
    await life.begin()
    store, name = life.store, MODELS[0]
    request = await life.submit(0)
    await life.runtime.finish_session("s")
    real, bad = store.journal.finish, set[int]()

    async def finish(outcomes: Any) -> Any:
        if any(each.operation in bad and each.result is not None for each in outcomes):
            raise ValueError("the log cannot hold it")
        return await real(outcomes)

    begin = len(life.child.sent)
    with mock.patch.object(store.journal, "finish", finish):
        bad.add(life.answer(0))
        await asyncio.sleep(0.5)
    demand(life.sent(begin) == [("detach", name, None), ("restore", name, None)], f"{life.sent(begin)}")
    life.child.say(messages.DETACHED, queue_id=name)
    await asyncio.sleep(0.1)
    demand(not life.effects.notes, "a model that is to be restored is detached")
    life.child.say(messages.RESTORED, queue_id=name)
    await asyncio.sleep(1.5)
    demand((await life.state(request))[0] == "failed" and life.status() == "detached", f"{life.status()}")


async def _die(life: _Life, clock: Clock, draw: random.Random) -> None:
    """What an engine did not answer is sent to the next one; what was under way in two that died fails."""
    await life.begin()
    runtime, name = life.runtime, MODELS[0]
    requests = [await life.submit(number) for number in range(3)]
    life.answer(0)
    await asyncio.sleep(0.1)
    for deaths in (1, 2):
        rows = [each.head["id"] for each in life.child.sent if each.type == "run" and each.head["number"] == 1]
        life.child.say(messages.BEGIN, ids=[rows[-1]])
        await asyncio.sleep(0.01)
        life.child.die()
        await asyncio.sleep(0.1)
        demand(
            not runtime.dispatcher.in_flight and runtime.dispatcher._window.used == 0, "an engine that died has work"
        )
        attempts = rows_of(life.store, "SELECT attempts FROM operations WHERE number = 1")[0][0]
        demand(attempts == deaths, f"{attempts} deaths are counted, not {deaths}")
        await asyncio.sleep(1.0)
        await life.ready()
        again = [_run(1, alone=True)] if deaths == 1 else []
        runs = [each for each in life.sent() if each[0] == "run"]
        demand(runs == [_run(0, replay=True), *again, _run(2)], f"{runs}")
        restored = [each for each in life.sent() if each[0] == "restore"]
        demand(restored == [("restore", name, None)], f"{restored}")
        life.child.say(messages.RESTORED, queue_id=name)
        life.answer(0)
        await asyncio.sleep(0.1)
    demand(life.figures.deaths == ["died", "died"] and life.figures.counts["replayed"] == 2, f"{life.figures.deaths}")
    status, error = await life.state(requests[1])
    demand(status == "failed" and error == "the engine died, twice while running this operation; it is not retried",
           f"{status} {error}")  # fmt: skip
    life.answer(2)
    await asyncio.sleep(0.1)
    demand(await life.state(requests[2]) == ("done", None), "what was not to blame fails")
    ended = sorted(each[1] for each in life.figures.ended)
    demand(ended == ["done", "done", "server"], f"{ended}")


async def _read_again(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A read of the log that fails is repeated, or answered with an error; nothing is lost."""
    store, runtime = life.store, life.runtime
    await _log(store, 0, done=True)
    await life.begin()
    left = 0
    real = store.database.read

    async def read(work: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            raise Unavailable("the store cannot read at the moment")
        return await real(work)

    with mock.patch.object(store.database, "read", read):
        left = draw.choice([1, 2, 3])
        taking = asyncio.create_task(life.submit(1))
        await asyncio.sleep(0.5)
        demand(not taking.done() and not life.sent(), "it is accepted before its queue is known")
        await asyncio.sleep(2.0 * left + 4.0)
        request = taking.result()
        demand([each for each in life.sent() if each[0] == "run"] == [_run(0, replay=True), _run(1)], f"{life.sent()}")
        large = b"y" * (SMALL + 1)
        left = 1
        others = [await life.submit(number, payload=large) for number in (2, 3)]  # read again before they are sent
        await asyncio.sleep(3.0)
        runs = [each for each in life.child.sent if each.type == "run"]
        demand([each.head["number"] for each in runs] == [0, 1, 2, 3], f"{life.sent()}")
        demand(runs[2].body == runs[3].body == large, "what was read again is another payload")
        left = 1
        await refused(runtime.wait("f" * 48, "ada", 0.0), Busy)
        far = Submission("ada", MODELS[1], "optim_step", b"x", 10**4)
        left = 1
        await refused(runtime.submit(far), Busy)
        await refused(runtime.submit(far), Unprocessable, "seq_id must be at most 4096 above the next one")
    life.child.say(messages.RESTORED, queue_id=MODELS[0])
    for number in range(4):
        life.answer(number)
    await asyncio.sleep(0.5)
    ends = [await life.state(each) for each in (request, *others)]
    demand(ends == [("done", None)] * 3, f"{ends}")
    demand(len(life.figures.ended) == 3, f"{life.figures.ended}")


async def _fill(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A tenant has so many unfinished operations; repetitions, and what others wait for, are accepted beyond that."""
    await life.begin()
    requests = [await life.submit(number, payload=b"y" * (SMALL + number - 4)) for number in range(1, 9)]
    # the first one was read from the log with its queue, the last ones are large
    kept = [getattr(life.runtime.futures.find(each, "ada"), "payload", None) is not None for each in requests]
    demand(kept == [False, True, True, True] + [False] * 4, f"which payloads stay in memory: {kept}")
    demand(life.runtime.queued("ada") == 8 and not life.sent(), "what waits for a number is sent")
    await refused(life.submit(9), Busy, "you have 8 (limit 8)")
    await refused(life.submit(0, "sample", SAMPLER, payload=Sample([1]).dump()), Busy)
    again = await life.submit(3, payload=b"y" * (SMALL - 1))
    demand(again == requests[2], "a repetition is refused")
    first = await life.submit(0)
    demand([each[2] for each in life.sent() if each[0] == "run"] == list(range(9)), f"{life.sent()}")
    demand(life.runtime.queued("ada") == 9, "what others wait for is refused")
    for number in range(9):
        life.answer(number)
    await asyncio.sleep(0.5)
    demand(all([await life.state(each) == ("done", None) for each in (first, *requests)]), "they did not end")
    demand(life.runtime.queued("ada") == 0 and not life.runtime.futures.waiting, "what is over waits")


async def _fail_creation(life: _Life, clock: Clock, draw: random.Random) -> None:
    """A model whose creation failed is gone, and so is what waits for it; a save that failed leaves no folder."""
    await life.begin()
    name = MODELS[0]
    await life.store.models.set_status("ada", name, "creating", clock.wall())
    first = await life.submit(0, "create", payload=Create(rank=8, seed=1).dump())
    second = await life.submit(1)
    fails = draw.random() < 0.5
    life.answer(0, **({"error": "no room", "category": "server"} if fails else {}))
    await asyncio.sleep(0.5)
    if fails:
        demand(await life.state(first) == ("failed", "no room"), f"{await life.state(first)}")
        life.answer(1)
        third = await life.submit(2)
        words = "this model does not exist: its creation failed"
        demand(await life.state(third) == ("failed", words), f"{await life.state(third)}")
        demand(life.status() == "gone", f"it is {life.status()}")
        records = life.store.models
        await records.set_status("ada", name, "creating", clock.wall())  # as if the service had died in between
        await records.set_status("ada", MODELS[1], "creating", clock.wall())
        demand(
            await records.end_failed_creations() == 1 and await records.end_failed_creations() == 0, "how many ended"
        )
        demand((await records.get("ada", name)).reason == "its creation failed", "why it is gone")
        demand((life.status(), life.status(MODELS[1])) == ("gone", "creating"), "which are gone")
        return
    demand(life.status() == "live", f"it is {life.status()}")
    life.answer(1)
    (life.store.data / "checkpoints" / "c").mkdir()
    (life.store.data / "checkpoints" / "d").mkdir()
    bad = await life.submit(2, "save", payload=Save("checkpoints/c", "weights", "w").dump())
    good = await life.submit(3, "save", payload=Save("checkpoints/d", "weights", "v").dump())
    life.answer(2, error="no room", category="server")
    life.answer(3, extra={"size_bytes": 5, "digest": "d"})
    await asyncio.sleep(0.5)
    demand([(await life.state(each))[0] for each in (second, bad, good)] == ["done", "failed", "done"], "the ends")
    there = sorted(path.name for path in (life.store.data / "checkpoints").iterdir())
    demand(there == ["d"], f"{there} is left")


async def _drain(life: _Life, clock: Clock, draw: random.Random) -> None:
    await _end(life, "drain")


async def _close(life: _Life, clock: Clock, draw: random.Random) -> None:
    await _end(life, "close")


async def _lose_lease(life: _Life, clock: Clock, draw: random.Random) -> None:
    await _end(life, "lease")


async def _lose_supervisor(life: _Life, clock: Clock, draw: random.Random) -> None:
    await _end(life, "supervisor")


async def _end(life: _Life, how: str) -> None:
    """At the end nothing new is accepted, who waits is let go of, and what is pending stays in the log."""
    await life.begin()
    runtime = life.runtime
    request = await life.submit(0)
    waiting = asyncio.create_task(runtime.wait(request, "ada", 100.0))
    await asyncio.sleep(0.1)
    if how == "drain":
        draining = asyncio.create_task(runtime.drain())
        await asyncio.sleep(0.1)
        await refused(life.submit(1), Unavailable, "the service is shutting down")
        demand(life.sent()[-1][0] == "drain" and not waiting.done(), f"{life.sent()}")
        life.answer(0)
        life.child.say(messages.DRAINED)
        await asyncio.sleep(0.5)
        demand(draining.done() and waiting.result().status == "done", "the last answer is lost")
        return
    if how == "close":
        slow = asyncio.create_task(runtime.submit(Submission("ada", MODELS[0], "optim_step", b"z", 1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await runtime.close()
        await asyncio.sleep(0.01)
        demand(slow.done() and waiting.done() and waiting.result().status == "pending", "somebody waits at the end")
        rows = rows_of(life.store, "SELECT number, status FROM operations ORDER BY number")
        demand(rows == [(0, "pending"), (1, "pending")], f"{rows}")
        return
    if how == "lease":
        context = life.store.journal.context
        life.store.journal.context = replace(context, epoch=99)
        await refused(life.submit(1), LeaseLost, "another process now serves")
        life.store.journal.context = context
        words = "another process now serves"
    else:
        with mock.patch.object(runtime.dispatcher, "engine_down", side_effect=KeyError("a defect")):
            life.child.die()
            await asyncio.sleep(1.0)
        words = "the service failed and is shutting down"
    demand(runtime.lost.is_set() and not runtime.healthy() and runtime.dispatcher.stopped, "it goes on")
    await refused(life.submit(2), Unavailable, words)
    demand(words in str(runtime.ready()[1]["store"]) and not runtime.ready()[0], f"{runtime.ready()}")
    waiting.cancel()


_SCENES: tuple[Callable[[_Life, Clock, random.Random], Awaitable[None]], ...] = (
    _resume,
    _count,
    _detach,
    _leave_while_sending,
    _detach_without_engine,
    _restore,
    _wait_for_room,
    _snapshot,
    _refuse_outcome,
    _refuse_while_leaving,
    _die,
    _read_again,
    _fill,
    _fail_creation,
    _drain,
    _close,
    _lose_lease,
    _lose_supervisor,
)
