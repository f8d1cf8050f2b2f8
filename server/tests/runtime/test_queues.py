"""A queue gives numbers out in order and without gaps, each once."""

from hypothesis import given
from hypothesis import strategies as st

from twinkle_server.runtime.queues import SequenceOrder


@given(st.permutations(range(16)), st.sets(st.integers(0, 15)), st.integers(0, 5))
def test_whatever_the_order_of_arrival_what_is_given_out_is_in_order(
    order: list[int], used: set[int], behind: int
) -> None:
    queue_id: SequenceOrder[int] = SequenceOrder(behind)
    given_out: list[int] = []
    for number in order:
        if number in used:
            queue_id.use_up(number)
        else:
            assert queue_id.arrive(number, number, 0.0) == (number >= behind)
            assert not queue_id.arrive(number, number, 0.0)
        while queue_id.ready:
            given_out.append(queue_id.ready.popleft())
        assert given_out == sorted(given_out)
    assert given_out == [number for number in range(behind, 16) if number not in used]
    assert queue_id.idle
    assert queue_id.following == 16


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_a_gap_is_named_by_its_first_number_and_since_its_oldest_waiter(arrived: set[int], used: set[int]) -> None:
    queue_id: SequenceOrder[int] = SequenceOrder()
    for when, number in enumerate(sorted(arrived)):
        queue_id.arrive(number, number, float(when))
    for number in used:
        queue_id.use_up(number)
    gap = queue_id.gap()
    first = next(number for number in range(22) if number not in arrived | used)
    waiting = [number for number in arrived - used if number > first]
    assert (gap is None) == (not waiting)
    if gap is not None:
        assert gap.number == first
        assert gap.waiting == len(waiting)
        assert queue_id.missing() == [n for n in range(first, min(waiting)) if n not in used | arrived]


@given(st.sets(st.integers(1, 20), min_size=1), st.sets(st.integers(1, 20)))
def test_giving_up_a_gap_drops_what_waits_right_behind_it_and_goes_on(arrived: set[int], used: set[int]) -> None:
    queue_id: SequenceOrder[int] = SequenceOrder()
    for number in arrived:
        queue_id.arrive(number, number, 0.0)
    for number in used:
        queue_id.use_up(number)
    dropped: list[int] = []
    for _ in range(30):
        if queue_id.gap() is None:
            break
        behind = queue_id.give_up()
        assert behind == sorted(behind)
        assert not queue_id.ready
        dropped += behind
    assert queue_id.gap() is None
    assert sorted(dropped) == sorted(arrived - used)
    following = queue_id.following
    assert queue_id.arrive(following, following, 0.0)
    assert list(queue_id.ready) == [following]


def test_a_closed_queue_gives_back_all_that_waited_in_order() -> None:
    queue_id: SequenceOrder[str] = SequenceOrder()
    for number in (5, 0, 3, 1):
        queue_id.arrive(number, str(number), 0.0)
    assert queue_id.drop_all() == ["0", "1", "3", "5"]
    assert queue_id.idle
    assert queue_id.arrive(2, "2", 0.0)
    assert list(queue_id.ready) == ["2"]


def test_a_number_that_waits_and_is_used_up_is_gone() -> None:
    queue_id: SequenceOrder[str] = SequenceOrder()
    queue_id.arrive(1, "1", 0.0)
    assert queue_id.holds(1)
    queue_id.use_up(1)
    assert not queue_id.holds(1)
    queue_id.arrive(0, "0", 0.0)
    assert list(queue_id.ready) == ["0"]
    assert queue_id.following == 2


@given(st.integers(2**20, 2**62), st.integers(0, 5))
def test_a_number_that_is_far_away_costs_no_more_than_a_near_one(far: int, next_one: int) -> None:
    queue_id: SequenceOrder[str] = SequenceOrder()
    for number in range(next_one):
        queue_id.use_up(number)
    queue_id.arrive(far, "far", 0.0)
    queue_id.arrive(next_one + 2, "near", 0.0)
    assert queue_id.drop_far(100) == ["far"]
    assert queue_id.missing() == [next_one, next_one + 1]
    assert queue_id.give_up() == ["near"]
    queue_id.arrive(far + 1, "far", 0.0)
    assert len(queue_id.hole()) == far + 1 - queue_id.following
    assert queue_id.give_up() == ["far"]
    assert queue_id.following == far + 2
