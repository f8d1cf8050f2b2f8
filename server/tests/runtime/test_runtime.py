"""Every acknowledged operation is applied exactly once and in order, and every future resolves, whatever dies."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_runtime import SOON, Plan, World, answer, applied, ask, within

from twinkle_server.errors import Busy, Gone, NotFound, SequenceConflict, Unavailable, Unprocessable
from twinkle_server.operations import Submission
from twinkle_server.runtime.core import Cancelled
from twinkle_server.runtime.queues import MAX_GAP
from twinkle_server.settings import Limits, Times

QUEUE = "s:train:0"


@given(st.permutations(range(12)))
@settings(max_examples=30, deadline=None)
def test_operations_run_in_the_order_of_their_numbers_whatever_the_order_of_arrival(order: list[int]) -> None:
    async def scenario() -> None:
        runtime = await World().runtime()
        asked = {}
        for number in order:
            asked[number] = await ask(runtime, number, "create" if number == 0 else "forward_backward")
        for number in range(1, 12):
            future = await answer(runtime, asked[number].request)
            assert applied(future) == list(range(1, number + 1))
        await runtime.close()

    within(SOON, scenario)


@pytest.mark.full
@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_an_engine_that_dies_anywhere_loses_and_repeats_nothing(seed: int, deaths: int, every: int) -> None:
    async def scenario() -> None:
        world = World(Plan(seed=seed, deaths=deaths, snapshot_every=every))
        runtime = await world.runtime()
        draw = random.Random(seed)
        queues = ["s:train:0", "s:train:1", "t:train:0"]
        asked = []
        for number in range(10):
            for queue_id in draw.sample(queues, 3):
                kind = "create" if number == 0 else "forward_backward"
                asked.append((queue_id, number, await ask(runtime, number, kind, queue_id)))
            if draw.random() < 0.3:
                await asyncio.sleep(0.001)
        failed: set[tuple[str, int]] = set()
        for queue_id, number, accepted in asked:
            future = await answer(runtime, accepted.request)
            if future.status == "failed":
                failed.add((queue_id, number))
                assert future.category == "server" or number > 0
            elif number > 0:
                want = [n for n in range(1, number + 1) if (queue_id, n) not in failed]
                assert applied(future) == want
        assert runtime.supervisor.restarts <= deaths
        await runtime.close()

    within(3 * SOON, scenario)


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_service_that_ends_anywhere_is_taken_up_by_the_next(seed: int) -> None:
    async def scenario() -> None:
        world, draw = World(Plan(seed=seed, deaths=1, snapshot_every=3)), random.Random(seed)
        asked: dict[int, str] = {}
        number = 0
        for _ in range(4):
            runtime = await world.runtime()
            for _ in range(draw.randrange(6)):
                kind = "create" if number == 0 else "forward_backward"
                asked[number] = (await ask(runtime, number, kind)).request
                number += 1
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            await runtime.close()
        runtime = await world.runtime()
        failed = set()
        for turn, request in asked.items():
            future = await answer(runtime, request)
            if future.status == "failed":
                failed.add(turn)
            elif turn:
                assert applied(future) == [n for n in range(1, turn + 1) if n not in failed]
        assert len(failed) <= 1
        await runtime.close()

    within(SOON, scenario)


def test_a_repeated_request_has_the_same_future_and_another_one_is_refused() -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        await ask(runtime, 0, "create")
        first, again = await ask(runtime, 1), await ask(runtime, 1)
        assert first.request == again.request
        assert not again.fresh
        await answer(runtime, first.request)
        with pytest.raises(SequenceConflict):
            await runtime.submit(Submission("ada", QUEUE, "forward_backward", b"other", 1))
        assert [run[1] for run in world.plan.runs] == [0, 1]
        await runtime.close()

    within(SOON, scenario)


def test_what_kills_the_engine_twice_fails_and_its_neighbours_live() -> None:
    async def scenario() -> None:
        world = World(Plan(poison=frozenset({3})))
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(6)]
        other = [
            await ask(runtime, n, "create" if n == 0 else "forward_backward", "t:train:0", "bob") for n in range(3)
        ]
        bad = await answer(runtime, asked[3].request)
        assert bad.category == "server"
        assert bad.error == "the engine died, twice while running this operation; it is not retried"
        assert applied(await answer(runtime, asked[5].request)) == [1, 2, 4, 5]
        assert applied(await answer(runtime, other[2].request, "bob")) == [1, 2]
        tries = [run for run in world.plan.runs if run[:2] == (QUEUE, 3)]
        assert [alone for _, _, alone, _ in tries] == [False, True]
        await runtime.close()
        later = await world.runtime()
        assert applied(await answer(later, (await ask(later, 6)).request)) == [1, 2, 4, 5, 6]
        assert len([run for run in world.plan.runs if run[:2] == (QUEUE, 3)]) == 2
        await later.close()

    within(SOON, scenario)


def test_a_pass_that_hangs_is_ended_and_its_operation_fails_with_the_deadline() -> None:
    async def scenario() -> None:
        world = World(Plan(hang=frozenset({2})), times=Times(deadline=0.2))
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(4)]
        hung = await answer(runtime, asked[2].request)
        assert (hung.status, hung.category) == ("failed", "server")
        assert hung.error is not None
        assert "a pass took longer than 0.2 s" in hung.error
        assert applied(await answer(runtime, asked[3].request)) == [1, 3]
        await runtime.close()

    within(SOON, scenario)


def test_an_idle_engine_is_not_taken_for_hung() -> None:
    async def scenario() -> None:
        world = World(times=Times(deadline=0.05))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        await asyncio.sleep(0.3)
        assert applied(await answer(runtime, (await ask(runtime, 1)).request)) == [1]
        assert world.plan.started == 1
        await runtime.close()

    within(SOON, scenario)


def test_failed_and_refused_operations_do_not_block_later_ones() -> None:
    async def scenario() -> None:
        runtime = await World(Plan(fail=frozenset({1}))).runtime()
        await ask(runtime, 0, "create")
        bad = await ask(runtime, 1)
        last = await ask(runtime, 3)
        refused = await runtime.submit(Submission("ada", QUEUE, "forward_backward", b"x", 2, refusal="no such key"))
        assert (await answer(runtime, bad.request)).error == "it is told to fail"
        told = await answer(runtime, refused.request)
        assert (told.status, told.error, told.category) == ("failed", "no such key", "user")
        assert applied(await answer(runtime, last.request)) == [3]
        await runtime.close()

    within(SOON, scenario)


def test_a_gap_is_told_as_the_reason_and_given_up_in_the_end() -> None:
    async def scenario() -> None:
        world = World(times=Times(gap_pause=0.05, gap_fail=0.4))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        waiting = await ask(runtime, 3)
        await asyncio.sleep(0.1)
        state, reason = runtime.queue_state(QUEUE)
        assert state == "paused_capacity"
        assert reason is not None
        assert "number 1 of this model has not arrived" in reason
        told = await answer(runtime, waiting.request)
        assert (told.status, told.category) == ("failed", "user")
        assert told.error is not None
        assert "number 1 of this model did not arrive" in told.error
        assert applied(await answer(runtime, (await ask(runtime, 4)).request)) == [4]
        late = await answer(runtime, (await ask(runtime, 1)).request)
        assert (late.status, late.category) == ("failed", "user")
        assert "cannot run sequence number 1" in str(late.error)
        await runtime.close()
        later = await world.runtime()
        assert applied(await answer(later, (await ask(later, 5)).request)) == [4, 5]
        await later.close()

    within(SOON, scenario)


@pytest.mark.parametrize("limit", [600.0, 0.5])
def test_a_gap_is_not_given_up_while_its_request_may_come_again_but_for_a_limit(limit: float) -> None:
    async def scenario() -> None:
        world = World(times=Times(gap_fail=0.02, gap_limit=limit))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        with runtime.arrivals.watch("ada") as answered:
            answered(503)
        waiting = await ask(runtime, 2)
        await asyncio.sleep(0.3)
        if limit > SOON:
            assert applied(await answer(runtime, (await ask(runtime, 1)).request)) == [1]
            assert applied(await answer(runtime, waiting.request)) == [1, 2]
        else:
            assert "number 1 of this model did not arrive" in str((await answer(runtime, waiting.request)).error)
        await runtime.close()

    within(SOON, scenario)


def test_clients_may_send_again_after_a_restart_before_a_gap_is_given_up() -> None:
    async def scenario() -> None:
        world = World(times=Times(gap_fail=0.02))
        await world.journal.submit(Submission("ada", QUEUE, "create", b"{}", 0))
        waiting, _ = await world.journal.submit(Submission("ada", QUEUE, "forward_backward", b"{}", 2))
        runtime = await world.runtime()
        await asyncio.sleep(0.3)
        assert applied(await answer(runtime, (await ask(runtime, 1)).request))
        assert (await answer(runtime, waiting.request)).error is None
        await runtime.close()

    within(SOON, scenario)


@pytest.mark.parametrize("number", [MAX_GAP + 2, 2**31 - 1, 2**62])
def test_a_number_far_above_the_next_is_turned_away_and_used_by_nobody(number: int) -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        for _ in range(2):
            with pytest.raises(Unprocessable, match=f"seq_id must be at most .* which is 1, got {number}"):
                await ask(runtime, number)
            await runtime.close()
            runtime = await world.runtime()  # which has no queue of it in memory
        assert await world.journal.pending() == []
        near = await ask(runtime, MAX_GAP + 1)
        assert applied(await answer(runtime, (await ask(runtime, 1)).request)) == [1]
        assert (await runtime.wait(near.request, "ada", 0.0)).status == "pending"
        await runtime.close()

    within(SOON, scenario)


def test_a_log_with_a_number_far_away_is_served_and_its_neighbours_go_on() -> None:
    async def scenario() -> None:
        world = World(times=Times(gap_fail=0.2))
        await world.journal.submit(Submission("ada", QUEUE, "create", b"{}", 0))
        far, _ = await world.journal.submit(Submission("ada", QUEUE, "forward_backward", b"{}", 2**62))
        runtime = await world.runtime()
        told = await answer(runtime, far.request)
        assert (told.status, told.category) == ("failed", "user")
        assert "too far above" in str(told.error)
        assert applied(await answer(runtime, (await ask(runtime, 1)).request)) == [1]
        await runtime.close()

    within(SOON, scenario)


def test_a_session_that_ends_frees_its_models_and_can_be_resumed() -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(3)]
        early = await ask(runtime, 9)
        await answer(runtime, asked[2].request)
        await runtime.finish_session("s")
        assert (await answer(runtime, early.request)).error == "its session was finished"
        async with asyncio.timeout(SOON):
            while ("detached", QUEUE) not in world.effects.said:
                await asyncio.sleep(0.01)
        assert world.plan.detached == [QUEUE]
        assert applied(await answer(runtime, (await ask(runtime, 3)).request)) == [1, 2, 3]
        await runtime.close()

    within(SOON, scenario)


def test_an_unloaded_model_takes_nothing_more() -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        await ask(runtime, 0, "create")
        await ask(runtime, 1)
        last = await runtime.submit_next(Submission("ada", QUEUE, "unload", b"{}", None))
        assert (await answer(runtime, last.request)).status == "done"
        told = await answer(runtime, (await ask(runtime, 3)).request)
        assert (told.error, told.category) == ("this model was unloaded", "user")
        assert world.engines[-1].models == {}
        await runtime.close()

    within(SOON, scenario)


def test_a_sample_is_cancelled_before_and_while_it_runs() -> None:
    async def scenario() -> None:
        world = World(Plan(seconds=0.05))
        runtime = await world.runtime()
        payload = b'{"tokens":[1]}'
        asked = [
            await runtime.submit(Submission("ada", "s:sample:0", "sample", payload, number)) for number in (7, 10**9, 3)
        ]
        await runtime.cancel(asked[1].request, "ada")
        with pytest.raises(NotFound):
            await runtime.cancel(asked[0].request, "bob")
        assert (await answer(runtime, asked[1].request)).status == "cancelled"
        assert (await answer(runtime, asked[0].request)).status == "done"
        assert (await answer(runtime, asked[2].request)).status == "done"
        await runtime.close()

    within(SOON, scenario)


def test_operations_that_the_engine_has_not_begun_are_cancelled_and_their_numbers_are_used_up() -> None:
    async def scenario() -> None:
        world = World(Plan(seconds=0.1))
        runtime = await world.runtime()
        asked = [await ask(runtime, 0, "create")] + [await ask(runtime, number) for number in (1, 2, 3, 5)]
        while not any(entry.running for entry in runtime.unfinished() if entry.operation.number == 1):
            await asyncio.sleep(0.01)
        shown = {each.operation.number: (each.in_engine, each.running) for each in runtime.unfinished()}
        assert shown == {1: (True, True), 2: (True, False), 3: (True, False), 5: (False, False)}
        assert await runtime.cancel_waiting(QUEUE) == Cancelled(cancelled=3, running=1)
        told = [await answer(runtime, each.request) for each in asked[1:]]
        assert [future.status for future in told] == ["done", "cancelled", "cancelled", "cancelled"]
        assert applied(await answer(runtime, (await ask(runtime, 4)).request)) == [1, 4]
        assert applied(await answer(runtime, (await ask(runtime, 6)).request)) == [1, 4, 6]
        assert await runtime.cancel_waiting(QUEUE) == Cancelled()
        await runtime.close()
        assert [number for _, number, _, replay in world.plan.runs if not replay] == [0, 1, 4, 6]

        runtime = await world.runtime()  # the next service sees the same
        assert [(await answer(runtime, each.request)).status for each in asked[2:]] == ["cancelled"] * 3
        assert applied(await answer(runtime, (await ask(runtime, 7)).request)) == [1, 4, 6, 7]
        await runtime.close()

    within(SOON, scenario)


def test_an_operation_is_cancelled_if_the_engine_dies_before_it_says_whether_it_has_begun() -> None:
    async def scenario() -> None:
        world = World(Plan(seconds=0.1, silent=True))
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)
        asked = [await ask(runtime, number) for number in (1, 2, 3)]
        await runtime.cancel(asked[1].request, "ada")
        assert (await runtime.wait(asked[1].request, "ada", 0.01)).status == "pending", "the engine has not answered"
        world.engines[-1].kill()
        told = [await answer(runtime, each.request) for each in asked]
        assert [future.status for future in told] == ["done", "cancelled", "done"]
        assert applied(told[2]) == [1, 3]
        await runtime.close()

    within(SOON, scenario)


def test_an_inflight_sample_uses_the_weights_of_the_moment() -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        payload = b'{"tokens":[1],"inflight":"s:train:0"}'
        first = await runtime.submit(Submission("ada", "s:sample:0", "sample", payload, 1))
        assert "no inflight weights" in str((await answer(runtime, first.request)).error)
        world.effects.inflight = "checkpoints/b"
        second = await runtime.submit(Submission("ada", "s:sample:0", "sample", payload, 2))
        told = await answer(runtime, second.request)
        assert told.result is not None
        assert b"checkpoints/b" in told.result
        await runtime.close()

    within(SOON, scenario)


def test_a_poll_holds_and_then_says_that_it_is_pending() -> None:
    async def scenario() -> None:
        runtime = await World().runtime()
        early = await ask(runtime, 5)
        future = await runtime.wait(early.request, "ada", 0.05)
        assert future.status == "pending"
        with pytest.raises(NotFound):
            await runtime.wait(early.request, "bob", 0.05)
        with pytest.raises((NotFound, Gone)):
            await runtime.wait("nothing", "ada", 0.05)
        await runtime.close()

    within(SOON, scenario)


def test_a_service_whose_engine_nobody_looks_after_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        await answer(runtime, (await ask(runtime, 0, "create")).request)

        async def fails(blamed: set[int], why: str) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(runtime, "engine_down", fails)
        world.engines[-1].kill()
        await asyncio.wait_for(runtime.lost.wait(), SOON)
        with pytest.raises(Unavailable, match="the service failed"):
            await ask(runtime, 1)
        await runtime.close()

    within(SOON, scenario)


def test_a_tenants_polls_take_no_room_from_another() -> None:
    async def scenario() -> None:
        runtime = await World(limits=Limits(queued=3)).runtime()
        early = [await ask(runtime, 5, tenant=tenant, queue_id=f"{tenant}:train:0") for tenant in ("ada", "bob")]
        polls = [asyncio.create_task(runtime.wait(early[0].request, "ada", SOON)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="you have 3, the service has 3"):
            await runtime.wait(early[0].request, "ada", SOON)
        assert (await runtime.wait(early[1].request, "bob", 0.01)).status == "pending"
        polls.pop().cancel()
        await asyncio.sleep(0)
        assert (await runtime.wait(early[0].request, "ada", 0.01)).status == "pending"
        assert runtime.futures.polls == 2
        for poll in polls:
            poll.cancel()
        await asyncio.wait(polls)
        assert (runtime.futures.polls, runtime.futures._polls_of) == (0, {})
        await runtime.close()

    within(SOON, scenario)


def test_a_tenant_has_a_bound_on_what_waits() -> None:
    async def scenario() -> None:
        runtime = await World(limits=Limits(queued=2)).runtime()
        await ask(runtime, 5)
        await ask(runtime, 6)
        with pytest.raises(Busy):
            await ask(runtime, 7)
        await ask(runtime, 5, tenant="bob", queue_id="b:train:0")
        assert not (await ask(runtime, 6)).fresh
        assert (await runtime.submit_next(Submission("ada", QUEUE, "unload", b"{}", None))).fresh
        await runtime.close()

    within(SOON, scenario)


def test_a_drain_takes_nothing_new_snapshots_and_lets_waiters_go() -> None:
    async def scenario() -> None:
        world = World(Plan(seconds=0.02))
        runtime = await world.runtime()
        asked = [await ask(runtime, n, "create" if n == 0 else "forward_backward") for n in range(40)]
        await answer(runtime, asked[2].request)
        poll = asyncio.create_task(runtime.wait(asked[39].request, "ada", SOON))
        await asyncio.sleep(0)
        world.plan.seconds = 0.0
        await runtime.drain()
        with pytest.raises(Unavailable):
            await ask(runtime, 41)
        assert (await poll).status in ("pending", "done")
        await runtime.close()
        assert world.plan.drained == 1
        later = await world.runtime()
        assert applied(await answer(later, asked[39].request)) == list(range(1, 40))
        await later.close()

    within(SOON, scenario)


def test_a_client_that_goes_away_while_it_submits_leaves_a_known_operation() -> None:
    async def scenario() -> None:
        world = World()
        runtime = await world.runtime()
        task = asyncio.create_task(ask(runtime, 0, "create"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert applied(await answer(runtime, (await ask(runtime, 1)).request)) == [1]
        await runtime.close()

    within(SOON, scenario)
