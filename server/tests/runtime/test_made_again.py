"""Models are made again from snapshot and log: what lacks is waited for, what is lost is never guessed."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_runtime import SOON, Plan, World, answer, applied, ask, within

from twinkle_server.operations import Operation, Outcome, Snapshot, Submission
from twinkle_server.runtime.dispatch import MAX_DEATHS
from twinkle_server.settings import Limits

QUEUE = "s:train:0"


def test_a_model_whose_payloads_are_lost_is_given_up_with_its_last_checkpoint_named() -> None:
    async def scenario() -> None:
        world = World(Plan(snapshot_every=100))
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(3)]
        await answer(runtime, asked[2].request)
        for operation in world.journal._operations.values():
            operation.payload = None
        world.engines[-1].kill()
        await asyncio.sleep(0.05)
        told = await answer(runtime, (await ask(runtime, 3)).request)
        assert told.category == "server"
        assert told.error is not None
        assert f"tinker://{QUEUE}/weights/good" in told.error
        assert ("corrupted", QUEUE) in world.effects.said
        told = await answer(runtime, (await ask(runtime, 4)).request)
        assert told.status == "failed"
        await runtime.close()

    within(SOON, scenario)


@pytest.mark.parametrize(
    "plan", [Plan(unreadable=True, snapshot_every=2), Plan(stubborn=frozenset({3}), snapshot_every=2)]
)
def test_a_model_that_cannot_be_made_again_is_never_guessed(plan: Plan) -> None:
    async def scenario() -> None:
        world = World(plan)
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(4)]
        await answer(runtime, asked[3].request)
        world.engines[-1].kill()
        told = [await answer(runtime, (await ask(runtime, n)).request) for n in (4, 5)]
        assert [future.category for future in told] == ["server", "server"]
        assert told[0].error is not None
        assert "cannot restore this model" in told[0].error
        await runtime.close()

    within(SOON, scenario)


@pytest.mark.parametrize("snapshot_every", [2, 100], ids=["snapshot", "replay"])
@given(scarce=st.integers(1, 9), kill=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_model_for_which_there_is_no_memory_at_the_moment_is_made_again_later(
    snapshot_every: int, scarce: int, kill: bool
) -> None:
    async def scenario() -> None:
        world = World(Plan(snapshot_every=snapshot_every))
        runtime = await world.runtime()
        queues = [QUEUE, "t:train:0"]
        for queue_id in queues:
            for number in range(4):
                last = await ask(runtime, number, "create" if number == 0 else "forward_backward", queue_id)
            await answer(runtime, last.request)
        world.plan.scarce = scarce
        world.engines[-1].kill()
        asked = [(queue_id, await ask(runtime, number, queue_id=queue_id)) for number in (4, 5) for queue_id in queues]
        if kill:
            await asyncio.sleep(0.01)
            world.engines[-1].kill()
        for queue_id, accepted in asked:
            assert applied(await answer(runtime, accepted.request))[:4] == [1, 2, 3, 4], queue_id
        assert applied(await answer(runtime, asked[-1][1].request)) == [1, 2, 3, 4, 5]
        assert not world.plan.scarce
        assert "corrupted" not in [what for what, _ in world.effects.said]
        await runtime.close()

    within(SOON, scenario)


def test_what_the_log_says_failed_is_taken_out_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(Plan(snapshot_every=100))
        finish = world.journal.finish

        async def broken(outcomes: Sequence[Outcome]) -> list[Outcome]:
            if any(b"[1, 2]" in (each.result or b"") for each in outcomes):
                raise ValueError("a defect")
            return await finish(outcomes)

        monkeypatch.setattr(world.journal, "finish", broken)
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(3)]
        assert applied(await answer(runtime, asked[1].request)) == [1]
        assert (await answer(runtime, asked[2].request)).error == "the result could not be written"
        assert applied(await answer(runtime, (await ask(runtime, 3)).request)) == [1, 3]
        await runtime.close()

    within(SOON, scenario)


def test_an_operation_that_a_snapshot_contains_and_whose_outcome_is_lost_fails() -> None:
    async def scenario() -> None:
        world = World()
        lost, _ = await world.journal.submit(Submission("ada", QUEUE, "forward_backward", b"{}", 1))
        world.plan.disk["snapshots/a"] = (2, [1, 2])
        await world.journal.snapshotted(Snapshot(QUEUE, 2, "snapshots/a", "", 1))
        runtime = await world.runtime()
        assert (await answer(runtime, lost.request)).error == "the result could not be written"
        assert applied(await answer(runtime, (await ask(runtime, 3)).request)) == [1, 2, 3]
        await runtime.close()

    within(SOON, scenario)


def test_a_model_that_waits_for_memory_says_so_and_is_given_up_with_its_session() -> None:
    async def scenario() -> None:
        world = World(Plan(snapshot_every=1))
        runtime = await world.runtime()
        for number in range(3):
            last = await ask(runtime, number, "create" if number == 0 else "forward_backward")
        await answer(runtime, last.request)
        await runtime.outcomes.flush()
        world.plan.scarce = 10**9
        world.engines[-1].kill()
        waits = await ask(runtime, 3)
        async with asyncio.timeout(SOON):
            while runtime.dispatcher.queues[QUEUE].postponed is None:
                await asyncio.sleep(0.001)
        state, reason = runtime.queue_state(QUEUE)
        assert state == "paused_capacity"
        assert "restored as soon as possible" in str(reason)
        other = await ask(runtime, 0, "create", "t:train:0")
        assert (await answer(runtime, other.request)).status == "done"
        await runtime.finish_session("s")
        assert (await answer(runtime, waits.request)).error == "its session was finished"
        await runtime.close()

    within(SOON, scenario)


def test_a_snapshot_that_kills_engines_costs_its_own_model_alone() -> None:
    queues = ["s:train:0", "s:train:1", "t:train:0"]

    async def scenario() -> None:
        world = World(Plan(deadly=frozenset({queues[1]}), snapshot_every=1))
        runtime = await world.runtime()
        for queue_id in queues:
            await ask(runtime, 0, "create", queue_id)
            await answer(runtime, (await ask(runtime, 1, queue_id=queue_id)).request)
        await runtime.outcomes.flush()
        world.engines[-1].kill()
        for number in (2, 3):
            asked = {queue_id: await ask(runtime, number, queue_id=queue_id) for queue_id in queues}
            for queue_id in queues:
                told = await answer(runtime, asked[queue_id].request)
                if queue_id in world.plan.deadly:
                    assert f"the engine died {MAX_DEATHS} times while it read the newest snapshot" in str(told.error)
                else:
                    assert applied(told) == list(range(1, number + 1))
        assert runtime.supervisor.restarts == MAX_DEATHS + 1
        await runtime.close()

    within(SOON, scenario)


def test_a_large_payload_that_must_wait_is_read_again() -> None:
    async def scenario() -> None:
        world = World(limits=Limits(small_bytes=4))
        runtime = await world.runtime()
        asked = [await ask(runtime, number) for number in (2, 1)]
        found = [runtime.futures.find(accepted.request, "ada") for accepted in asked]
        assert [operation is not None and operation.payload for operation in found] == [None, None]
        await ask(runtime, 0, "create")
        assert applied(await answer(runtime, asked[0].request)) == [1, 2]
        await runtime.close()

    within(SOON, scenario)


def test_a_queue_that_cannot_be_read_at_first_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_server.runtime.core._AGAIN", 0.01)

    async def scenario() -> None:
        world, faults = World(), [OSError("no"), OSError("no")]
        read = world.journal.after

        async def after(queue_id: str, number: int) -> list[Operation]:
            if faults:
                raise faults.pop()
            return await read(queue_id, number)

        monkeypatch.setattr(world.journal, "after", after)
        runtime = await world.runtime()
        await ask(runtime, 0, "create")
        assert applied(await answer(runtime, (await ask(runtime, 1)).request)) == [1]
        assert not faults
        await runtime.close()

    within(SOON, scenario)
