"""What shares a turn: order within a queue, fairness among tenants, and sizes, whatever arrives when."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_server.engine.queues import Composition, Task, TaskQueues
from twinkle_server.engine.scheduler import Alternation, Scheduler

KINDS = ["create", "forward", "forward_backward", "forward_backward", "optim_step", "save", "load", "unload"]


def task(
    queue_id: str, number: int, kind: str = "forward_backward", tokens: int = 1, tenant: str = "t", **more: bool
) -> Task:
    return Task(number, queue_id, number, kind, tenant, tokens, **more)


def everything(scheduler: Scheduler, budget: int = 100, limit: int = 10_000) -> list[list[Task]]:
    turns = []
    while turn := scheduler.next(budget):
        turns.append(turn)
        assert len(turns) < limit
    return turns


@st.composite
def waiting(draw: st.DrawFn) -> list[Task]:
    queues = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=6))
    tasks = []
    for queue_id, (tenant, count) in enumerate(queues):
        for number in range(count):
            kind, tokens = draw(st.sampled_from(KINDS)), draw(st.integers(1, 300))
            alone = draw(st.integers(0, 9)) == 0
            tasks.append(Task(len(tasks), f"queue{queue_id}", number, kind, f"tenant{tenant}", tokens, alone))
    rest = list(tasks)
    order = []
    while rest:  # queues come interleaved, each in order
        heads = list({item.queue_id: item for item in reversed(rest)}.values())
        chosen = draw(st.sampled_from(heads))
        rest.remove(chosen)
        order.append(chosen)
    return order


@pytest.mark.full
@settings(deadline=None, max_examples=50)
@given(waiting(), st.integers(1, 400), st.data())
def test_each_task_runs_once_and_each_queue_in_order_whenever_they_come(
    tasks: list[Task], budget: int, data: st.DataObject
) -> None:
    queues, coming = TaskQueues(), list(tasks)
    scheduler = Scheduler(queues)
    ran: list[Task] = []
    while coming or queues:
        for _ in range(data.draw(st.integers(0 if queues else 1, 4))):
            if coming:
                queues.add(coming.pop(0))
        ran += scheduler.next(budget)
    numbers: dict[str, list[int]] = {}
    for item in ran:
        numbers.setdefault(item.queue_id, []).append(item.number)
    assert all(found == list(range(len(found))) for found in numbers.values())
    assert sorted(item.id for item in ran) == sorted(item.id for item in tasks)


@settings(deadline=None, max_examples=50)
@given(waiting(), st.integers(1, 400))
def test_a_turn_is_one_pass_one_step_or_one_task(tasks: list[Task], budget: int) -> None:
    queues = TaskQueues()
    for item in tasks:
        queues.add(item)
    for turn in everything(Scheduler(queues), budget):
        if len(turn) == 1:
            continue
        assert all(item.fuses for item in turn) or all(item.steps for item in turn)
        if turn[0].fuses:
            assert sum(item.tokens for item in turn) <= budget
        else:
            assert len({item.queue_id for item in turn}) == len(turn)


@settings(deadline=None, max_examples=50)
@given(waiting(), st.integers(1, 400))
def test_a_pass_of_one_tenant_ends_only_where_there_is_no_room_for_what_is_next(tasks: list[Task], budget: int) -> None:
    queues = TaskQueues()
    for item in tasks:
        item.tenant = "one"
        queues.add(item)
    scheduler = Scheduler(queues)
    while turn := scheduler.next(budget):
        if turn[0].fuses:
            room = budget - sum(item.tokens for item in turn)
            left = [head for head in queues.heads() if head.fuses]
            assert not left or any(head.tokens > room for head in left)


def test_consecutive_passes_of_a_queue_share_a_pass_up_to_its_barrier() -> None:
    queues = TaskQueues()
    for number, kind in enumerate(
        ["forward_backward", "forward", "forward_backward", "optim_step", "forward_backward"]
    ):
        queues.add(task("a", number, kind))
    assert [[item.number for item in turn] for turn in everything(Scheduler(queues))] == [[0, 1, 2], [3], [4]]


def test_steps_of_several_queues_are_one_turn_and_so_are_their_passes() -> None:
    queues = TaskQueues()
    for queue_id in "abc":
        for number, kind in enumerate(["forward_backward", "optim_step", "forward_backward", "optim_step"]):
            queues.add(task(queue_id, number, kind, tenant=queue_id))
    turns = everything(Scheduler(queues))
    assert [(turn[0].kind, len(turn)) for turn in turns] == [("forward_backward", 3), ("optim_step", 3)] * 2


def test_an_operation_above_the_budget_goes_alone_and_is_not_starved() -> None:
    queues = TaskQueues()
    queues.add(task("big", 0, tokens=5000, tenant="big"))
    for number in range(300):
        queues.add(task("small", number, tokens=10, tenant="small"))
    turns = everything(Scheduler(queues), budget=100)
    place = next(at for at, turn in enumerate(turns) if turn[0].queue_id == "big")
    assert len(turns[place]) == 1
    small_before = sum(item.tokens for turn in turns[:place] for item in turn)
    assert small_before <= 3000, "both had about the same tokens by then, or the small one was done"


def test_what_was_under_way_in_a_crash_is_alone() -> None:
    queues = TaskQueues()
    queues.add(task("a", 0, alone=True))
    queues.add(task("a", 1))
    queues.add(task("b", 2, alone=True, kind="optim_step"))
    queues.add(task("c", 3, kind="optim_step"))
    queues.add(task("d", 4))
    turns = everything(Scheduler(queues))
    assert all(len(turn) == 1 for turn in turns if any(item.alone for item in turn))
    assert sorted(item.number for turn in turns for item in turn) == [0, 1, 2, 3, 4]


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", [(100, 100), (10, 500), (5, 3000), (64, 65)])
@pytest.mark.parametrize("budget", [256, 1000, 4096])
def test_equal_tenants_get_equal_tokens_whatever_their_operations_and_queues(
    sizes: tuple[int, int], budget: int
) -> None:
    queues = TaskQueues()
    number = 0
    for tenant, (size, models) in enumerate([(sizes[0], 1), (sizes[1], 1), (sizes[0], 8), (sizes[1], 3)]):
        for model in range(models):
            for _ in range(200_000 // size // models):
                number += 1
                queues.add(task(f"{tenant}-{model}", number, tokens=size, tenant=f"{tenant}"))
    scheduler, served = Scheduler(queues), Counter[str]()
    while max(served.values(), default=0) < 50_000:
        for item in scheduler.next(budget):
            served[item.tenant] += item.tokens
    assert max(served.values()) / min(served.values()) <= 1.25, served


def test_a_tenant_that_comes_late_has_its_share_at_once() -> None:
    queues = TaskQueues()
    for number in range(1000):
        queues.add(task("old", number, tokens=50, tenant="old"))
    scheduler = Scheduler(queues)
    for _ in range(20):
        scheduler.next(500)
    for number in range(1000, 1100):
        queues.add(task("new", number, tokens=50, tenant="new"))
    served = Counter(item.tenant for _ in range(4) for item in scheduler.next(500))
    assert abs(served["old"] - served["new"]) <= 2


def test_a_tenant_with_many_barriers_does_not_keep_others_from_their_passes() -> None:
    queues = TaskQueues()
    for number in range(50):
        queues.add(task(f"greedy{number}", number, "save", tenant="greedy"))
    for number in range(50, 60):
        queues.add(task("modest", number, tokens=100, tenant="modest"))
    turns = everything(Scheduler(queues), budget=100)
    kinds = [turn[0].kind for turn in turns[:20]]
    assert kinds == ["save", "forward_backward"] * 10


def test_queues_of_a_tenant_take_turns() -> None:
    queues = TaskQueues()
    for number in range(20):
        queues.add(task("first", number, tokens=10))
    for number in range(20, 40):
        queues.add(task("second", number, tokens=10))
    turn = Scheduler(queues).next(100)
    assert Counter(item.queue_id for item in turn) == {"first": 5, "second": 5}


def test_a_held_queue_gives_nothing_until_it_is_released() -> None:
    queues = TaskQueues()
    queues.add(task("a", 0))
    queues.hold("a")
    assert not queues
    assert Scheduler(queues).next(10) == []
    queues.release("a")
    assert [item.number for item in Scheduler(queues).next(10)] == [0]


def recorded(queue_id: str, number: int, passed: int, **more: bool) -> Task:
    composition = Composition([{"pass": passed, "parts": []}])
    return Task(number, queue_id, number, "forward_backward", "t", replay=True, composition=composition, **more)


def test_what_shared_a_pass_shares_it_again_and_the_earliest_pass_is_first() -> None:
    queues = TaskQueues()
    for queue_id, passed in (("a", 7), ("b", 5), ("c", 7), ("c", 9), ("d", 5)):
        queues.add(recorded(queue_id, passed, passed))
    turns = everything(Scheduler(queues))
    assert [(sorted(item.queue_id for item in turn), turn[0].number) for turn in turns] == [
        (["b", "d"], 5), (["a", "c"], 7), (["c"], 9)
    ]  # fmt: skip


def test_what_is_new_has_every_other_pass_while_others_are_composed_again_and_shares_none_with_them() -> None:
    queues = TaskQueues()
    for number in range(3):
        queues.add(recorded("old", number, number + 1))
        queues.add(task(f"new{number}", 0, tokens=60))
    turns = everything(Scheduler(queues))
    assert [[item.queue_id for item in turn] for turn in turns] == [
        ["old"],
        ["new0"],
        ["old"],
        ["new1"],
        ["old"],
        ["new2"],
    ]


def test_what_killed_an_engine_while_it_was_done_again_shares_no_pass_even_then() -> None:
    queues = TaskQueues()
    queues.add(recorded("a", 0, 5, alone=True))
    queues.add(recorded("b", 0, 5))
    assert [len(turn) for turn in everything(Scheduler(queues))] == [1, 1]


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
    queues = TaskQueues()
    for queue_id in range(10):
        queues.add(task(f"{queue_id}", 0, "optim_step"))
        queues.add(task(f"{queue_id}", 1, tokens=10))
    scheduler, turns = Scheduler(queues), []
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
