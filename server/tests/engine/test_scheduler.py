"""What shares a turn: order within a lane, fairness among tenants, and sizes, whatever arrives when."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_server.engine.composition import Composition
from twinkle_server.engine.queues import Lanes, Task
from twinkle_server.engine.scheduler import Alternation, Scheduler

KINDS = ["create", "forward", "forward_backward", "forward_backward", "optim_step", "save", "load", "unload"]


def task(
    lane: str, number: int, kind: str = "forward_backward", tokens: int = 1, tenant: str = "t", **more: bool
) -> Task:
    return Task(number, lane, number, kind, tenant, tokens, **more)


def everything(scheduler: Scheduler, budget: int = 100, limit: int = 10_000) -> list[list[Task]]:
    turns = []
    while turn := scheduler.next(budget):
        turns.append(turn)
        assert len(turns) < limit
    return turns


@st.composite
def waiting(draw: st.DrawFn) -> list[Task]:
    lanes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=6))
    tasks = []
    for lane, (tenant, count) in enumerate(lanes):
        for number in range(count):
            kind, tokens = draw(st.sampled_from(KINDS)), draw(st.integers(1, 300))
            alone = draw(st.integers(0, 9)) == 0
            tasks.append(Task(len(tasks), f"lane{lane}", number, kind, f"tenant{tenant}", tokens, alone))
    rest = list(tasks)
    order = []
    while rest:  # lanes come interleaved, each in order
        heads = list({item.lane: item for item in reversed(rest)}.values())
        chosen = draw(st.sampled_from(heads))
        rest.remove(chosen)
        order.append(chosen)
    return order


@settings(deadline=None, max_examples=50)
@given(waiting(), st.integers(1, 400), st.data())
def test_each_task_runs_once_and_each_lane_in_order_whenever_they_come(
    tasks: list[Task], budget: int, data: st.DataObject
) -> None:
    lanes, coming = Lanes(), list(tasks)
    scheduler = Scheduler(lanes)
    ran: list[Task] = []
    while coming or lanes:
        for _ in range(data.draw(st.integers(0 if lanes else 1, 4))):
            if coming:
                lanes.add(coming.pop(0))
        ran += scheduler.next(budget)
    numbers: dict[str, list[int]] = {}
    for item in ran:
        numbers.setdefault(item.lane, []).append(item.number)
    assert all(found == list(range(len(found))) for found in numbers.values())
    assert sorted(item.id for item in ran) == sorted(item.id for item in tasks)


@settings(deadline=None, max_examples=50)
@given(waiting(), st.integers(1, 400))
def test_a_turn_is_one_pass_one_step_or_one_task(tasks: list[Task], budget: int) -> None:
    lanes = Lanes()
    for item in tasks:
        lanes.add(item)
    for turn in everything(Scheduler(lanes), budget):
        if len(turn) == 1:
            continue
        assert all(item.fuses for item in turn) or all(item.steps for item in turn)
        if turn[0].fuses:
            assert sum(item.tokens for item in turn) <= budget
        else:
            assert len({item.lane for item in turn}) == len(turn)


@settings(deadline=None, max_examples=50)
@given(waiting(), st.integers(1, 400))
def test_a_pass_of_one_tenant_ends_only_where_there_is_no_room_for_what_is_next(tasks: list[Task], budget: int) -> None:
    lanes = Lanes()
    for item in tasks:
        item.tenant = "one"
        lanes.add(item)
    scheduler = Scheduler(lanes)
    while turn := scheduler.next(budget):
        if turn[0].fuses:
            room = budget - sum(item.tokens for item in turn)
            left = [head for head in lanes.heads() if head.fuses]
            assert not left or any(head.tokens > room for head in left)


def test_consecutive_passes_of_a_lane_share_a_pass_up_to_its_barrier() -> None:
    lanes = Lanes()
    for number, kind in enumerate(
        ["forward_backward", "forward", "forward_backward", "optim_step", "forward_backward"]
    ):
        lanes.add(task("a", number, kind))
    assert [[item.number for item in turn] for turn in everything(Scheduler(lanes))] == [[0, 1, 2], [3], [4]]


def test_steps_of_several_lanes_are_one_turn_and_so_are_their_passes() -> None:
    lanes = Lanes()
    for lane in "abc":
        for number, kind in enumerate(["forward_backward", "optim_step", "forward_backward", "optim_step"]):
            lanes.add(task(lane, number, kind, tenant=lane))
    turns = everything(Scheduler(lanes))
    assert [(turn[0].kind, len(turn)) for turn in turns] == [("forward_backward", 3), ("optim_step", 3)] * 2


def test_an_operation_above_the_budget_goes_alone_and_is_not_starved() -> None:
    lanes = Lanes()
    lanes.add(task("big", 0, tokens=5000, tenant="big"))
    for number in range(300):
        lanes.add(task("small", number, tokens=10, tenant="small"))
    turns = everything(Scheduler(lanes), budget=100)
    place = next(at for at, turn in enumerate(turns) if turn[0].lane == "big")
    assert len(turns[place]) == 1
    small_before = sum(item.tokens for turn in turns[:place] for item in turn)
    assert small_before <= 3000, "both had about the same tokens by then, or the small one was done"


def test_what_was_under_way_in_a_crash_is_alone() -> None:
    lanes = Lanes()
    lanes.add(task("a", 0, alone=True))
    lanes.add(task("a", 1))
    lanes.add(task("b", 2, alone=True, kind="optim_step"))
    lanes.add(task("c", 3, kind="optim_step"))
    lanes.add(task("d", 4))
    turns = everything(Scheduler(lanes))
    assert all(len(turn) == 1 for turn in turns if any(item.alone for item in turn))
    assert sorted(item.number for turn in turns for item in turn) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sizes", [(100, 100), (10, 500), (5, 3000), (64, 65)])
@pytest.mark.parametrize("budget", [256, 1000, 4096])
def test_equal_tenants_get_equal_tokens_whatever_their_operations_and_lanes(
    sizes: tuple[int, int], budget: int
) -> None:
    lanes = Lanes()
    number = 0
    for tenant, (size, models) in enumerate([(sizes[0], 1), (sizes[1], 1), (sizes[0], 8), (sizes[1], 3)]):
        for model in range(models):
            for _ in range(200_000 // size // models):
                number += 1
                lanes.add(task(f"{tenant}-{model}", number, tokens=size, tenant=f"{tenant}"))
    scheduler, served = Scheduler(lanes), Counter[str]()
    while max(served.values(), default=0) < 50_000:
        for item in scheduler.next(budget):
            served[item.tenant] += item.tokens
    assert max(served.values()) / min(served.values()) <= 1.25, served


def test_a_tenant_that_comes_late_has_its_share_at_once() -> None:
    lanes = Lanes()
    for number in range(1000):
        lanes.add(task("old", number, tokens=50, tenant="old"))
    scheduler = Scheduler(lanes)
    for _ in range(20):
        scheduler.next(500)
    for number in range(1000, 1100):
        lanes.add(task("new", number, tokens=50, tenant="new"))
    served = Counter(item.tenant for _ in range(4) for item in scheduler.next(500))
    assert abs(served["old"] - served["new"]) <= 2


def test_a_tenant_with_many_barriers_does_not_keep_others_from_their_passes() -> None:
    lanes = Lanes()
    for number in range(50):
        lanes.add(task(f"greedy{number}", number, "save", tenant="greedy"))
    for number in range(50, 60):
        lanes.add(task("modest", number, tokens=100, tenant="modest"))
    turns = everything(Scheduler(lanes), budget=100)
    kinds = [turn[0].kind for turn in turns[:20]]
    assert kinds == ["save", "forward_backward"] * 10


def test_lanes_of_a_tenant_take_turns() -> None:
    lanes = Lanes()
    for number in range(20):
        lanes.add(task("first", number, tokens=10))
    for number in range(20, 40):
        lanes.add(task("second", number, tokens=10))
    turn = Scheduler(lanes).next(100)
    assert Counter(item.lane for item in turn) == {"first": 5, "second": 5}


def test_a_held_lane_gives_nothing_until_it_is_released() -> None:
    lanes = Lanes()
    lanes.add(task("a", 0))
    lanes.hold("a")
    assert not lanes
    assert Scheduler(lanes).next(10) == []
    lanes.release("a")
    assert [item.number for item in Scheduler(lanes).next(10)] == [0]


def recorded(lane: str, number: int, passed: int, **more: bool) -> Task:
    composition = Composition([{"pass": passed, "parts": []}])
    return Task(number, lane, number, "forward_backward", "t", replay=True, composition=composition, **more)


def test_what_shared_a_pass_shares_it_again_and_the_earliest_pass_is_first() -> None:
    lanes = Lanes()
    for lane, passed in (("a", 7), ("b", 5), ("c", 7), ("c", 9), ("d", 5)):
        lanes.add(recorded(lane, passed, passed))
    turns = everything(Scheduler(lanes))
    assert [(sorted(item.lane for item in turn), turn[0].number) for turn in turns] == [
        (["b", "d"], 5), (["a", "c"], 7), (["c"], 9)
    ]  # fmt: skip


def test_what_is_new_has_every_other_pass_while_others_are_composed_again_and_shares_none_with_them() -> None:
    lanes = Lanes()
    for number in range(3):
        lanes.add(recorded("old", number, number + 1))
        lanes.add(task(f"new{number}", 0, tokens=60))
    turns = everything(Scheduler(lanes))
    assert [[item.lane for item in turn] for turn in turns] == [["old"], ["new0"], ["old"], ["new1"], ["old"], ["new2"]]


def test_what_killed_an_engine_while_it_was_done_again_shares_no_pass_even_then() -> None:
    lanes = Lanes()
    lanes.add(recorded("a", 0, 5, alone=True))
    lanes.add(recorded("b", 0, 5))
    assert [len(turn) for turn in everything(Scheduler(lanes))] == [1, 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0.001, 0.1)), min_size=50, max_size=50))
def test_training_has_half_of_the_time_and_a_decode_step_waits_for_one_turn(times: list[tuple[float, float]]) -> None:
    alternation = Alternation(seconds=0.5)
    training = decoding = waited = 0.0
    for train, decode in times:
        if alternation.decodes(training=True, sampling=True):
            alternation.took(decode, decoding=True)
            decoding, waited = decoding + decode, 0.0
        else:
            alternation.took(train, decoding=False)
            training, waited = training + train, waited + train
        assert waited <= 0.1 + 0.5, "no longer than one decode step that is made up for, and one pass"
        assert decoding <= training + 0.1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0.01, 0.25), st.floats(0.001, 5.0)), min_size=50, max_size=50))
def test_a_decode_step_waits_no_longer_however_long_the_ones_before_it_took(times: list[tuple[float, float]]) -> None:
    alternation = Alternation(seconds=0.5)
    waited = 0.0
    for train, decode in times:
        if alternation.decodes(training=True, sampling=True):
            alternation.took(decode, decoding=True)
            waited = 0.0
        else:
            alternation.took(train, decoding=False)
            waited += train
        assert waited <= 0.5 + 0.25, "that a piece takes longer than the one before it is known only afterwards"


def test_training_has_a_turn_between_any_two_long_decode_steps() -> None:
    alternation, turns = Alternation(seconds=0.5), []
    for _ in range(20):
        decodes = alternation.decodes(training=True, sampling=True)
        alternation.took(5.0 if decodes else 0.4, decoding=decodes)
        turns.append(decodes)
    assert turns == [True, False] * 10


def test_no_more_models_step_together_than_were_asked_for() -> None:
    lanes = Lanes()
    for lane in range(10):
        lanes.add(task(f"{lane}", 0, "optim_step"))
        lanes.add(task(f"{lane}", 1, tokens=10))
    scheduler, turns = Scheduler(lanes), []
    while turn := scheduler.next(100, steps=4):
        turns.append(turn)
    assert [(turn[0].kind, len(turn)) for turn in turns] == [
        ("optim_step", 4), ("optim_step", 4), ("optim_step", 2), ("forward_backward", 10)
    ]  # fmt: skip


def test_who_works_alone_owes_nothing_later() -> None:
    alternation = Alternation(seconds=0.5)
    for _ in range(100):
        assert alternation.decodes(training=False, sampling=True)
        alternation.took(1.0, decoding=True)
    assert not alternation.decodes(training=True, sampling=False)
    assert alternation.decodes(training=True, sampling=True)
