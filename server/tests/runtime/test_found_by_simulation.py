"""What simulations of the service found: each test is the shortest history that showed it."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from server_runtime import SOON, Database, FakeEffects, Plan, World, answer, applied, ask, within

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.errors import Unavailable
from twinkle_server.operations import Embed, Generate, Kind, Outcome
from twinkle_server.runtime import dispatch, sessions
from twinkle_server.runtime.core import Runtime
from twinkle_server.runtime.generations import Generation
from twinkle_server.runtime.queues import ModelQueue, State
from twinkle_server.runtime.sessions import SessionKeeper
from twinkle_server.settings import Limits, Times
from twinkle_server.store.memory import MemoryJournal
from twinkle_server.store.records import Session


@dataclass
class PayloadsThatWait:
    """A log whose payloads are read only when it is told, and are gone once the operation is over, as in SQLite."""

    reading: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def journal(self) -> MemoryJournal:
        wait = self

        class Journal(MemoryJournal):
            async def payload(self, operation: int) -> bytes:
                wait.reading.set()
                await wait.told.wait()
                if self._operations[operation].status == "cancelled":
                    raise LookupError("its payload was dropped")
                return await super().payload(operation)

        return Journal(Database(), b"secret")


def test_an_operation_that_is_cancelled_while_its_payload_is_read_does_not_end_its_model() -> None:
    async def scenario() -> None:
        waiting = PayloadsThatWait()
        waiting.told.set()
        world = World(Plan(), waiting.journal(), limits=Limits(small_bytes=0))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        await runtime.close()

        runtime = await world.runtime()  # the model must be attached, and payloads are read again
        waiting.reading.clear()
        first = await ask(runtime, 1, "optim_step")
        waiting.told.clear()
        await asyncio.wait_for(waiting.reading.wait(), SOON)
        await runtime.cancel(first.request, "ada")
        await answer(runtime, first.request)
        waiting.told.set()
        second = await answer(runtime, (await ask(runtime, 2, "optim_step")).request)
        assert (second.status, applied(second)) == ("done", [2]), second.error
        await runtime.close()

    within(2 * SOON, scenario)


class Unwritable(MemoryJournal):
    """A log that cannot hold the result of one operation, and takes a while to say so."""

    number = 3

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        bad = [each for each in outcomes if self._operations[each.operation].number == self.number]
        if any(each.error is None for each in bad):
            await asyncio.sleep(0.05)
            raise ValueError("nothing that a row can hold")
        return await super().finish(outcomes)


def test_what_a_failed_operation_did_is_in_no_snapshot_and_in_nothing_that_ran_after_it() -> None:
    async def scenario() -> None:
        world = World(Plan(snapshot_every=2), Unwritable(Database(), b"secret"))
        runtime = await world.runtime()
        asked = [await ask(runtime, 0, "create")] + [await ask(runtime, number, "optim_step") for number in range(1, 9)]
        told = [await answer(runtime, each.request) for each in asked]
        assert [number for number, future in enumerate(told) if future.status != "done"] == [3]
        assert told[3].error == "the result could not be written"
        assert applied(told[8]) == [1, 2, 4, 5, 6, 7, 8]
        assert applied(told[4]) == [1, 2, 4]
        await runtime.close()

        runtime = await world.runtime()
        last = await answer(runtime, (await ask(runtime, 9, "optim_step")).request)
        assert applied(last) == [1, 2, 4, 5, 6, 7, 8, 9]
        await runtime.close()

    within(2 * SOON, scenario)


def test_a_queue_agrees_with_no_snapshot_of_what_is_to_be_done_again() -> None:
    async def scenario() -> None:
        queue = ModelQueue("m", "ada", True)
        assert queue.agrees_with(7)
        queue.distrust(5)
        queue.distrust(6)
        assert [queue.agrees_with(number) for number in (4, 5, 6)] == [True, False, False]
        await queue.trust()
        assert queue.agrees_with(6)

    within(SOON, scenario)


def test_a_snapshot_of_a_model_that_was_taken_back_is_not_recorded() -> None:
    async def scenario() -> None:
        runtime = await World().runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        done = await ask(runtime, 1, "optim_step")
        await answer(runtime, done.request)
        (queue,) = runtime.dispatcher.queues.values()
        assert queue.postpone("memory is lacking") == []
        late = {"queue_id": queue.name, "number": 1, "folder": "snapshots/late", "digest": "", "size": 1}
        runtime._events.snapshotted(Message(messages.SNAPSHOTTED, late))  # sent before the engine was told
        queue.resume(queue.postponements)
        await runtime.outcomes.flush()
        newest = await runtime._journal.snapshot(queue.name)
        assert newest is None or newest.folder != "snapshots/late"
        assert not runtime.unrecorded
        await runtime.close()

    within(SOON, scenario)


def test_a_number_is_not_lost_because_the_service_stood_still() -> None:
    async def scenario() -> None:
        world = World(times=Times(gap_fail=0.05, gap_limit=600.0, resend=60.0))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        await runtime.janitor.stop()
        later = await ask(runtime, 2, "optim_step")
        await asyncio.sleep(0.1)
        runtime.cancellation._last_check = time.monotonic() - 100.0  # as after SIGSTOP
        await runtime.cancellation.give_up_gaps()
        await answer(runtime, (await ask(runtime, 1, "optim_step")).request)
        future = await answer(runtime, later.request)
        assert (future.status, applied(future)) == ("done", [1, 2])
        await runtime.close()

    within(2 * SOON, scenario)


class Unreadable(MemoryJournal):
    """A log that fails once to return what a replay needs, after earlier replays were sent."""

    number = 5
    failed = False

    async def composition(self, operation: int) -> str | None:
        if self._operations[operation].number == self.number and not self.failed:
            self.failed = True
            raise OSError("disk I/O error")
        return await super().composition(operation)


@dataclass
class RemovingEffects(FakeEffects):
    """Removes the folders of snapshots from the disk of the fake engine."""

    disk: dict[str, tuple[int, list[int]]]

    def __post_init__(self) -> None:
        super().__init__()

    async def remove(self, folders: Sequence[str]) -> None:
        for folder in folders:
            self.disk.pop(folder, None)


def test_a_snapshot_that_a_second_restore_will_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_RETRY", 0.01)

    async def scenario() -> None:
        plan = Plan(snapshot_every=2)
        world = World(plan, Unreadable(Database(), b"secret"), effects=RemovingEffects(plan.disk))
        runtime = await world.runtime()
        for number in range(3):
            kind: Kind = "optim_step" if number else "create"
            await answer(runtime, (await ask(runtime, number, kind)).request)
        await runtime.outcomes.flush()
        plan.snapshot_every = 100
        for number in (3, 4, 5):
            await answer(runtime, (await ask(runtime, number, "optim_step")).request)
        await runtime.close()

        plan.snapshot_every, plan.seconds = 3, 0.1  # the replay of number 3 is slow, and a snapshot follows it
        runtime = await world.runtime()
        last = await answer(runtime, (await ask(runtime, 6, "optim_step")).request)
        assert (last.status, last.error) == ("done", None)
        assert applied(last) == [1, 2, 3, 4, 5, 6]
        await runtime.close()

    within(2 * SOON, scenario)


def test_a_postponed_model_waits_for_the_answers_to_all_restores() -> None:
    async def scenario() -> None:
        queue = ModelQueue("m", "ada", True)
        first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
        queue.start_restoring(first)
        queue.start_restoring(second)
        queue.start_dropping()
        queue.restored()
        assert (first.done(), second.done(), queue.restoring, queue.dropped) == (True, False, True, False)
        queue.restored()
        assert (second.done(), queue.restoring, queue.dropped, queue.idle) == (True, False, False, False)
        queue.restored()
        assert queue.dropped
        assert queue.idle

    within(SOON, scenario)


def test_an_operation_that_kills_an_engine_while_it_is_taken_back_is_blamed() -> None:
    async def scenario() -> None:
        world = World(Plan(hang=frozenset({1})))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        asked = await ask(runtime, 1, "optim_step")

        async def running(runs: int) -> ModelQueue:
            while len(world.plan.runs) < runs or not any(each.begun for each in runtime.dispatcher.in_flight.values()):
                await asyncio.sleep(0.01)
            return runtime.dispatcher.queues["s:train:0"]

        await _die_while_postponed(runtime, world, await running(2))
        queue = await running(4)  # with the replay of number 0
        assert world.plan.runs[-1] == ("s:train:0", 1, True, False)  # alone
        await _die_while_postponed(runtime, world, queue)
        future = await answer(runtime, asked.request)
        assert (future.status, future.error) == (
            "failed",
            "the engine died, twice while running this operation; it is not retried",
        )
        await runtime.close()

    within(2 * SOON, scenario)


async def _die_while_postponed(runtime: Runtime, world: World, queue: ModelQueue) -> None:
    runtime.dispatcher.postpone(queue, "memory is lacking")
    assert not runtime.dispatcher.in_flight
    world.engines[-1].kill()


@dataclass
class Slow:
    """A log whose results are written only when it is told, and that cannot hold those of some numbers."""

    told: asyncio.Event = field(default_factory=asyncio.Event)
    unwritable: set[int] = field(default_factory=set)

    def journal(self) -> MemoryJournal:
        slow = self

        class Journal(MemoryJournal):
            async def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
                await slow.told.wait()
                numbers = {self._operations[each.operation].number for each in outcomes if each.error is None}
                if numbers & slow.unwritable:
                    raise ValueError("nothing that a row can hold")
                return await super().finish(outcomes)

        return Journal(Database(), b"secret")


async def _stream(runtime: Runtime, world: World) -> Generation:
    """Return a stream of the present weights, with both of its tokens, of a model with one unwritten step."""
    generation = await runtime.generate("ada", Generate([1], {"max_tokens": 2}, model="s:train:0"))
    for parts, end in ([[0, [5], [-1.0], [], None]], None), ([[0, [6], [-1.0], [], "length"]], {"cached_tokens": 0}):
        world.engines[-1]._say(messages.TOKENS, {}, orjson.dumps([[generation.key, parts, end]]))
    while generation.end is None:
        await asyncio.sleep(0.01)
    return generation


async def _stepped(world: World, slow: Slow) -> tuple[Runtime, str]:
    """Return a runtime whose engine has done a step that is not written, and the request of the step."""
    runtime = await world.runtime()
    slow.told.set()
    await answer(runtime, (await ask(runtime, 0, "create")).request)
    slow.told.clear()
    step = await ask(runtime, 1, "optim_step")
    while runtime.outcomes.settled("s:train:0"):
        await asyncio.sleep(0.01)
    return runtime, step.request


def test_a_stream_has_no_tokens_of_a_step_that_is_undone() -> None:
    async def scenario() -> None:
        slow = Slow(unwritable={1})
        world = World(journal=slow.journal())
        runtime, step = await _stepped(world, slow)
        generation = await _stream(runtime, world)
        slow.told.set()
        with pytest.raises(Unavailable, match="could not be written, and its weights are restored; repeat the request"):
            await generation.parts()
        assert (await answer(runtime, step)).status == "failed"
        assert not len(runtime.generations)
        await runtime.close()

    within(2 * SOON, scenario)


def test_a_stream_waits_until_the_steps_in_its_weights_are_durable() -> None:
    async def scenario() -> None:
        slow = Slow()
        world = World(journal=slow.journal())
        runtime, step = await _stepped(world, slow)
        generation = await _stream(runtime, world)
        reading = asyncio.create_task(generation.parts())
        await asyncio.sleep(0.05)
        assert not reading.done()
        assert (len(runtime.generations), runtime.waiting) == (1, 0)  # the engine has no more to answer
        vectors = await runtime.generate("ada", Embed([[1]], model="s:train:0"))
        world.engines[-1]._say(messages.DONE, {"id": vectors.key, "error": None, "category": None}, b"vectors")
        embedding = asyncio.create_task(vectors.parts())
        await asyncio.sleep(0.05)
        assert (embedding.done(), vectors.end) == (False, {"body": b"vectors"})
        slow.told.set()
        assert await embedding == []
        assert [part.tokens for part in await reading] == [[5], [6]]
        assert await generation.parts() == []
        assert (await answer(runtime, step)).status == "done"
        assert not len(runtime.generations)

        await runtime.outcomes.flush()
        slow.told.clear()  # without an unwritten step, nothing waits
        assert [part.tokens for part in await (await _stream(runtime, world)).parts()] == [[5], [6]]
        slow.told.set()
        await runtime.close()

    within(2 * SOON, scenario)


def test_the_pause_of_a_postponement_does_not_end_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PAUSES", (0.5, 60.0))

    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        queue = runtime.dispatcher.queues["s:train:0"]
        runtime.dispatcher.postpone(queue, "memory is lacking")
        while not queue.dropped:
            await asyncio.sleep(0.01)
        world.engines[-1].kill()  # which ends the postponement before its pause
        while queue.state is not State.ATTACHED:
            await asyncio.sleep(0.01)
            with suppress(Unavailable):
                await runtime.dispatcher.attach(queue.name, "ada")
        runtime.dispatcher.postpone(queue, "memory is lacking again")
        await asyncio.sleep(0.7)
        assert queue.state is State.POSTPONED
        await runtime.close()

    within(SOON, scenario)


def test_answers_to_an_attempt_to_attach_do_not_count_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_RETRY", 0.01)
    monkeypatch.setattr(dispatch, "PAUSES", (0.01,))

    async def scenario() -> None:
        world = World(Plan(snapshot_every=100), Unreadable(Database(), b"secret"))
        runtime = await world.runtime()
        for number in range(6):
            kind: Kind = "optim_step" if number else "create"
            await answer(runtime, (await ask(runtime, number, kind)).request)
        await runtime.close()

        world.plan.seconds = 0.05
        runs = len(world.plan.runs)
        runtime = await world.runtime()
        last = await ask(runtime, 6, "optim_step")
        while len(world.plan.runs) < runs + 6:  # five of the first attempt, whose sixth could not be read
            await asyncio.sleep(0.001)
        world.plan.scarce = 1  # for the first replay of the second attempt, which has begun
        future = await answer(runtime, last.request)
        assert (future.status, future.error) == ("done", None)
        assert applied(future) == [1, 2, 3, 4, 5, 6]
        await runtime.close()

    within(2 * SOON, scenario)


def test_an_engine_that_hangs_in_an_operation_that_was_taken_back_is_killed() -> None:
    async def scenario() -> None:
        world = World(Plan(hang=frozenset({1})), times=Times(deadline=0.3))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        asked = await ask(runtime, 1, "optim_step")
        while not any(flight.begun for flight in runtime.dispatcher.in_flight.values()):
            await asyncio.sleep(0.01)
        runtime.dispatcher.postpone(runtime.dispatcher.queues["s:train:0"], "memory is lacking")
        future = await answer(runtime, asked.request)
        assert future.error == "a pass took longer than 0.3 s, twice while running this operation; it is not retried"
        await runtime.close()

    within(2 * SOON, scenario)


def test_a_session_does_not_expire_because_the_service_stood_still_several_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(sessions, "time", SimpleNamespace(time=lambda: clock.now))
    ended: list[str] = []

    class Table:
        async def silent(self, before: float) -> list[Session]:
            return [Session("s", "ada", 1e9, 1e9)] if before > 1e9 else []

        async def end(self, tenant: str, session: str, *_: object) -> bool:
            ended.append(session)
            return True

    async def scenario() -> None:
        anything: Any = SimpleNamespace(sessions=Table(), queues={}, leave=lambda prefix, reason: None)
        keeper = SessionKeeper(anything, anything, anything, anything, Times(session=300.0))
        pauses = [10.0] * 15 + [110.0, 10.0, 110.0] + [10.0] * 29  # since the last of 110 s, only 290 s passed
        for pause in pauses:
            clock.now += pause
            await keeper.expire()
        assert not ended
        clock.now += 10.0
        await keeper.expire()
        assert ended == ["s"]

    within(SOON, scenario)


def test_a_replay_that_ends_after_it_was_taken_back_does_not_run_alone_again() -> None:
    async def scenario() -> None:
        world = World(Plan(snapshot_every=100))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        step = await ask(runtime, 1, "optim_step")
        await answer(runtime, step.request)
        row = next(each.id for each in world.journal._operations.values() if each.request == step.request)
        runtime.dispatcher._deaths[row] = 1  # an engine died while it repeated the step
        world.engines[-1]._say(messages.DONE, {"id": row, "error": None})  # of an attempt to attach that has failed
        await asyncio.sleep(0.01)
        world.engines[-1].kill()
        while runtime.supervisor.restarts == 0 or not runtime.supervisor.up:
            await asyncio.sleep(0.01)
        assert applied(await answer(runtime, (await ask(runtime, 2, "optim_step")).request)) == [1, 2]
        assert world.plan.runs[-2:] == [("s:train:0", 1, False, True), ("s:train:0", 2, False, False)]
        await runtime.close()

    within(SOON, scenario)
