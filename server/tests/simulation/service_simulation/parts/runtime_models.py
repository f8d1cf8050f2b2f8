"""The runtime's models: restored, released, snapshotted, expired, or given up."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from service_simulation.parts.runtime_life import MODELS, TIMES, RuntimeLife, log_earlier, run
from service_simulation.parts.support import refused
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server.engine import messages
from twinkle_server.errors import Gone
from twinkle_server.operations import Create, Save, Snapshot, Submission
from twinkle_server.runtime.dispatch import MAX_DEATHS
from twinkle_server.runtime.queues import Closed
from twinkle_server.runtime.sessions import SessionKeeper
from twinkle_server.store.records import Session


async def _detach(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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
    wanted = [("detach", name, None), run(0, replay=True), run(1)]
    demand([each for each in life.sent(begin) if each[0] != "restore"] == wanted, f"{life.sent(begin)}")
    life.child.say(messages.RESTORED, queue_id=name)
    life.answer(0)
    life.answer(1)
    life.child.say(messages.DETACHED, queue_id=name)  # nobody asked for it
    await asyncio.sleep(0.5)
    demand(("detached", name) not in life.effects.notes and life.status() == "live", "what the engine has is detached")
    demand(await life.state(request) == ("done", None), "it did not end")


async def _leave_while_sending(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """A session ends while the operations of its model wait for room: they fail, and the model is let go of."""
    await log_earlier(life.store, 0, done=True)
    await life.begin()
    life.child.free.clear()
    request = await life.submit(1)
    await life.runtime.finish_session("s")
    life.child.say(messages.RESTORED, queue_id=MODELS[0])
    life.answer(0)
    await asyncio.sleep(0.1)
    demand(await life.state(request) == ("failed", "its session was finished"), f"{await life.state(request)}")
    demand(life.sent() == [("restore", MODELS[0], None), run(0, replay=True)], f"{life.sent()}")
    life.child.free.set()
    await asyncio.sleep(0.1)
    demand(life.sent()[2:] == [("detach", MODELS[0], None)], f"{life.sent()}")


async def _detach_without_engine(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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


async def _restore(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """A model that cannot be restored is tried again if memory lacks, and given up otherwise."""
    store, runtime, name = life.store, life.runtime, MODELS[0]
    await log_earlier(store, 0, done=True)
    await store.journal.snapshotted(Snapshot(name, 0, "snapshots/a", "d", 1))
    saved = draw.random() < 0.5
    if saved:
        save = Save("checkpoints/c", "weights", "w")
        _, operation = await store.journal.submit(Submission("ada", name, "save", save.dump(), 1))
        outcome = life.effects.done(operation, {"size_bytes": 1, "digest": "d"}, b"")
        await store.journal.finish([outcome])
    else:
        await log_earlier(store, 1, done=True)
    await life.begin()
    first, second = await life.submit(2), await life.submit(3)
    base = [("restore", name, "snapshots/a"), run(1, replay=True), run(2), run(3)]
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


async def _die_of_restoring(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """A model whose snapshot, or whose replay, kills one engine after another is given up, and only that model."""
    store, runtime, name = life.store, life.runtime, MODELS[0]
    of_replay = draw.random() < 0.5
    await log_earlier(store, 0, done=True)
    if not of_replay:
        await store.journal.snapshotted(Snapshot(name, 0, "snapshots/a", "d", 1))
    await life.begin()
    request, other = await life.submit(1), await life.submit(0, queue=MODELS[1])
    for deaths in range(1, MAX_DEATHS + 1):
        runs = [each for each in life.sent() if each[:2] == ("run", name)]
        expected = [run(0, replay=True, alone=deaths > 1), run(1)] if of_replay else [run(1)] * (deaths == 1)
        demand(runs == expected, f"after {deaths - 1} deaths: {life.sent()}")
        if of_replay:
            life.child.say(messages.RESTORED, queue_id=name)
            [row] = [each.head["id"] for each in life.child.sent if each.head.get("replay")]
            life.child.say(messages.BEGIN, ids=[row])
            await asyncio.sleep(0.01)
        life.child.die()
        children = len(life.children)
        while len(life.children) == children:
            await asyncio.sleep(0.1)
        await life.ready()
    await asyncio.sleep(0.5)
    what = "repeated operation 0" if of_replay else "read the newest snapshot"
    why = f"cannot restore this model: the engine died {MAX_DEATHS} times while it {what}; it has no checkpoint"
    demand(await life.state(request) == ("failed", why), f"{await life.state(request)}")
    tried = [each for each in life.sent() if each[:2] == ("run", name) or each[2] == "snapshots/a"]
    demand(life.status() == "corrupted" and not tried, f"{life.sent()}")
    life.answer(0, queue=MODELS[1])
    await asyncio.sleep(0.1)
    demand(await life.state(other) == ("done", None), "another model fails with it")
    demand(runtime.queued("ada") == 0, "it waits still")


async def _snapshot(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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


async def _refuse_outcome(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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
    wanted = [("restore", name, None), run(0, replay=True), run(2), run(3)]
    demand(life.sent(begin + 1) == wanted, f"{life.sent(begin + 1)}")
    life.child.say(messages.RESTORED, queue_id=name)
    for each in (0, 2, 3):
        life.answer(each)
    await asyncio.sleep(0.5)
    ends = [(await life.state(each))[0] for each in requests]
    demand(ends == ["done", "failed", "done", "done"], f"{ends}")
    demand(len(life.figures.ended) == 4, f"{life.figures.ended}")


async def _refuse_while_leaving(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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


async def _expire(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """A session ends when it was silent and nothing of it runs; its models are detached, and deleted long after."""
    store, runtime, kept = life.store, life.runtime, 200.0
    times = replace(TIMES, session=30.0, kept_run=kept)
    await life.begin()
    keeper = SessionKeeper(store, runtime.dispatcher, runtime.cancellation, life.effects, times)
    await store.sessions.create(Session("t", "ada", clock.wall(), clock.wall()))
    await life.submit(0)

    async def check(seconds: float, ended: bool) -> None:
        for each in range(round(seconds / 5.0)):
            await asyncio.sleep(5.0)
            if draw.random() < 0.5 or each % 4 == 3:  # at least every 20 s, or it may expire
                await keeper.heartbeat("t", "ada")
            await keeper.expire()
        status = (await store.sessions.get("ada", "s")).status
        demand(status == ("expired" if ended else "active"), f"the session is {status} after {seconds} s")
        await keeper.heartbeat("t", "ada")

    await check(50.0, ended=False)  # its operation runs
    life.answer(0)
    await asyncio.sleep(0.1)
    jump = draw.choice([0.0, 40.0, -40.0])
    if jump:
        clock.offset += jump  # whoever was silent meanwhile could not be heard
        await check(30.0, ended=False)
    begin = len(life.child.sent)
    waiting = await life.submit(2)
    demand(not runtime.dispatcher.queues[MODELS[0]].running, "what waits for a number runs")
    await check(5.0, ended=True)
    await asyncio.sleep(0.1)
    demand(await life.state(waiting) == ("failed", "the session expired: no heartbeat received"), "what waits")
    demand(("detach", MODELS[0], None) in life.sent(begin), f"{life.sent(begin)}")
    await refused(keeper.heartbeat("s", "ada"), Gone, "is not active")
    await keeper.settle()
    demand((life.status(), life.status(MODELS[1])) == ("live", "detached"), "a model is freed, and is detached already")
    clock.offset += kept + 10.0
    await store.models.set_status("ada", MODELS[0], "detached", clock.wall() - kept - 5.0)
    await keeper.settle()
    states = (life.status(), life.status(MODELS[1]))
    demand(states == ("detached", "gone"), f"models are {states}: one is being freed, one is old")
    reason = (await store.models.get("ada", MODELS[1])).reason
    demand(reason == "it was not used for 0.00231 days", f"{reason}")
    life.child.say(messages.DETACHED, queue_id=MODELS[0])
    await asyncio.sleep(0.1)
    await keeper.settle()
    demand(life.status() == "gone", f"an old model is {life.status()}")
    late = await life.submit(3)
    demand(
        "this model no longer exists: it was not used" in str((await life.state(late))[1]), "a model that is deleted"
    )


async def _fail_creation(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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


SCENES: tuple[Callable[[RuntimeLife, Clock, random.Random], Awaitable[None]], ...] = (
    _detach,
    _leave_while_sending,
    _detach_without_engine,
    _restore,
    _die_of_restoring,
    _snapshot,
    _refuse_outcome,
    _refuse_while_leaving,
    _expire,
    _fail_creation,
)
