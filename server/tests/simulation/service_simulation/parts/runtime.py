"""The runtime on a real log, with engines of a script: what is sent to them, written of them, and counted."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from service_simulation.parts import runtime_models
from service_simulation.parts.runtime_life import MODELS, SAMPLER, SMALL, TIMES, RuntimeLife, log_earlier, run
from service_simulation.parts.supervisor import INFO
from service_simulation.parts.support import opened, refused, rows_of
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server import failpoints
from twinkle_server.engine import messages
from twinkle_server.errors import Busy, LeaseLost, Unavailable, Unprocessable
from twinkle_server.operations import ModelInfo, Sample, Snapshot, Submission
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Limits
from twinkle_server.store import models
from twinkle_server.store.records import Model, Session


async def run_operations(clock: Clock, draw: random.Random) -> None:
    """Every operation that is in the log is sent once, in order, and its end is written, told and counted once."""
    for work in draw.sample(SCENES, 2):
        with opened(draw, limits=Limits(small_bytes=SMALL), times=TIMES) as store:
            await store.sessions.create(Session("s", "ada", clock.wall(), clock.wall()))
            for number, name in enumerate(MODELS):
                model = Model(name, "ada", "s", number, "base", 8, clock.wall(), clock.wall())
                await store.database.write(lambda connection, model=model: models.add(connection, model))
                await store.models.set_status("ada", name, "live", clock.wall())
            life = RuntimeLife(store)
            try:
                await work(life, clock, draw)
            finally:
                await life.runtime.close()
            demand(all(child.over.done() for child in life.children), "an engine runs after the end")


async def _resume(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """What is pending at the start is taken up; what a snapshot contains, but was never written, fails."""
    store, runtime = life.store, life.runtime
    none = draw.random() < 0.2
    for number in range(3):
        await log_earlier(store, number, done=True)
    covered = None if none else await log_earlier(store, 3, done=False)
    folder = "snapshots/a"
    await store.journal.snapshotted(Snapshot(MODELS[0], 1 if none else 3, folder, "d", 1))
    pending = (
        [] if none else [await log_earlier(store, 4, False), await log_earlier(store, 0, False, SAMPLER, "sample")]
    )
    deaths = draw.choice([0, 1, 2]) if pending else 0
    for _ in range(deaths):
        await store.journal.blame([pending[0].id])
    await store.models.set_status("ada", MODELS[0], "detached", clock.wall())
    begin = clock.now
    demand(runtime.info == ModelInfo("m", 0, 0), "what is known of a model before an engine has it")
    await runtime.start()
    open_ = [] if covered is None else [covered, *pending]
    demand(runtime.futures.waiting["ada"] == len(open_), f"{runtime.futures.waiting} wait")
    demand(all(runtime.futures.find(each.request, "ada") for each in open_), "a pending operation has no open future")
    expected = runtime.arrivals.expected_until("ada", 1.0)
    demand(expected == (begin + TIMES.resend if pending else float("-inf")), f"requests may come until {expected}")
    await life.ready()
    if covered is None:
        demand(not life.sent(), f"{life.sent()} although nothing is pending")
        request = await life.submit(3)
        wanted = [("restore", MODELS[0], folder), run(2, replay=True), run(3)]
        demand(life.sent() == wanted, f"{life.sent()}")
        demand(life.child.sent[1].head.get("composition") == "[2]", "how its passes were composed")
        demand(life.figures.counts["replayed"] == 1 == runtime.dispatcher.replays, "replays are counted")
        demand(await life.state(request) == ("pending", None), "it is over")
        return
    demand(await life.state(covered.request) == ("failed", "the result could not be written"), "what a snapshot has")
    wanted = [("optim_step", "server", 3, "ada")] * (2 if deaths == 2 else 1)
    demand(life.figures.ended == wanted, f"{life.figures.ended}")
    if deaths == 2:
        words = "the engine died twice while running this operation; it is not retried"
        demand(await life.state(pending[0].request) == ("failed", words), f"{await life.state(pending[0].request)}")
        demand(life.sent() == [run(0, queue=SAMPLER)], f"{life.sent()}")
        return
    sent = [("restore", MODELS[0], folder), run(4, alone=deaths == 1), run(0, queue=SAMPLER)]
    demand(sorted(life.sent()) == sorted(sent), f"{life.sent()}")
    demand(runtime.futures.waiting["ada"] == 2, f"{runtime.futures.waiting} wait")
    demand(life.status() == "live", "a model that is attached is not recorded as such")


async def _count(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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
        shown = "the last optimizer step failed as a whole; the log says why" if trouble else "no failure"
        demand(runtime.ready()[1]["last_pass"] == shown and runtime.ready()[0] is not trouble, f"{runtime.ready()}")
    if draw.random() < 0.3:
        await life.submit(6)
        life.answer(6, error="it broke", category="server")
        life.child.say(messages.PASSED, kind="optim_step", tokens=3)
        life.child.die()
        await asyncio.sleep(1.0)
        await life.ready()
        demand(runtime.ready()[1]["last_pass"] == "no failure", "a new engine is in trouble")
        return
    life.child.say("nonsense")
    life.child.say(messages.SNAPSHOTTED, queue_id="nowhere", number=1, folder="snapshots/q", digest="", size=11)
    await asyncio.sleep(0.1)
    counts = {"passed": 2, "restored": 0, "detached": 0, "replayed": 0, "bytes": 11}
    demand(figures.counts == counts, f"{figures.counts}")
    demand(len(life.children) == 1, "an unknown message ends the engine")


async def _wait_for_room(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """While an engine takes no more messages, operations wait in their queues."""
    await log_earlier(life.store, 0, done=True)
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


async def _die(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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
        again = [run(1, alone=True)] if deaths == 1 else []
        runs = [each for each in life.sent() if each[0] == "run"]
        demand(runs == [run(0, replay=True), *again, run(2)], f"{runs}")
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


async def _read_again(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """A read of the log that fails is repeated, or answered with an error; nothing is lost."""
    store, runtime = life.store, life.runtime
    await log_earlier(store, 0, done=True)
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
        demand([each for each in life.sent() if each[0] == "run"] == [run(0, replay=True), run(1)], f"{life.sent()}")
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


async def _fill(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
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


async def _probe(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    """After a commit that failed, the service writes a row each second until the disk works, and is ready again."""
    store, full = life.store, [False]

    def reach(place: str) -> None:
        if full[0] and place == "store.before_commit":
            raise OSError(28, "No space left on device")

    service = Service(life.settings, store, life.figures, life.start_child)
    before = failpoints.watch(reach)
    try:
        await service.start()
        await life.ready()
        await asyncio.sleep(5.0)
        commits = store.database.commits
        await asyncio.sleep(3.0)
        demand(service.ready()[0] and store.database.commits == commits, "it writes although nothing is to be written")
        full[0] = True
        await refused(store.sessions.create(Session("u", "ada", clock.wall(), clock.wall())), Unavailable)
        await asyncio.sleep(3.0)
        demand(not service.ready()[0] and service.ready()[1]["store"] == "the last commit failed", f"{service.ready()}")
        full[0] = False
        await asyncio.sleep(1.5)
        demand(service.ready()[0] and service.ready()[1]["store"] == "writable", f"{service.ready()}")
        commits = store.database.commits
        await asyncio.sleep(3.0)
        demand(store.database.commits == commits, "it goes on writing")
    finally:
        failpoints.watch(before)
        await service.close()


async def _drain(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    await _end(life, "drain")


async def _close(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    await _end(life, "close")


async def _lose_lease(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    await _end(life, "lease")


async def _lose_supervisor(life: RuntimeLife, clock: Clock, draw: random.Random) -> None:
    await _end(life, "supervisor")


async def _end(life: RuntimeLife, how: str) -> None:
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


SCENES: tuple[Callable[[RuntimeLife, Clock, random.Random], Awaitable[None]], ...] = (
    *runtime_models.SCENES,
    _resume,
    _count,
    _wait_for_room,
    _die,
    _read_again,
    _fill,
    _probe,
    _drain,
    _close,
    _lose_lease,
    _lose_supervisor,
)
