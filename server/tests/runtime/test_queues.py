"""A lane gives numbers out in order and without gaps, each once."""

from hypothesis import given
from hypothesis import strategies as st

from twinkle_server.runtime.queues import SequenceOrder


@given(st.permutations(range(16)), st.sets(st.integers(0, 15)), st.integers(0, 5))
def test_whatever_the_order_of_arrival_what_is_given_out_is_in_order(
    order: list[int], used: set[int], behind: int
) -> None:
    lane: SequenceOrder[int] = SequenceOrder(behind)
    given_out: list[int] = []
    for number in order:
        if number in used:
            lane.use_up(number)
        else:
            assert lane.arrive(number, number, 0.0) == (number >= behind)
            assert not lane.arrive(number, number, 0.0)
        while lane.ready:
            given_out.append(lane.ready.popleft())
        assert given_out == sorted(given_out)
    assert given_out == [number for number in range(behind, 16) if number not in used]
    assert lane.idle
    assert lane.following == 16


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_a_gap_is_named_by_its_first_number_and_since_its_oldest_waiter(arrived: set[int], used: set[int]) -> None:
    lane: SequenceOrder[int] = SequenceOrder()
    for when, number in enumerate(sorted(arrived)):
        lane.arrive(number, number, float(when))
    for number in used:
        lane.use_up(number)
    gap = lane.gap()
    first = next(number for number in range(22) if number not in arrived | used)
    waiting = [number for number in arrived - used if number > first]
    assert (gap is None) == (not waiting)
    if gap is not None:
        assert gap.number == first
        assert gap.waiting == len(waiting)
        assert lane.missing() == [n for n in range(first, min(waiting)) if n not in used | arrived]


@given(st.sets(st.integers(1, 20), min_size=1), st.sets(st.integers(1, 20)))
def test_giving_up_a_gap_drops_what_waits_right_behind_it_and_goes_on(arrived: set[int], used: set[int]) -> None:
    lane: SequenceOrder[int] = SequenceOrder()
    for number in arrived:
        lane.arrive(number, number, 0.0)
    for number in used:
        lane.use_up(number)
    dropped: list[int] = []
    for _ in range(30):
        if lane.gap() is None:
            break
        behind = lane.give_up()
        assert behind == sorted(behind)
        assert not lane.ready
        dropped += behind
    assert lane.gap() is None
    assert sorted(dropped) == sorted(arrived - used)
    following = lane.following
    assert lane.arrive(following, following, 0.0)
    assert list(lane.ready) == [following]


def test_a_closed_lane_gives_back_all_that_waited_in_order() -> None:
    lane: SequenceOrder[str] = SequenceOrder()
    for number in (5, 0, 3, 1):
        lane.arrive(number, str(number), 0.0)
    assert lane.drop_all() == ["0", "1", "3", "5"]
    assert lane.idle
    assert lane.arrive(2, "2", 0.0)
    assert list(lane.ready) == ["2"]


def test_a_number_that_waits_and_is_used_up_is_gone() -> None:
    lane: SequenceOrder[str] = SequenceOrder()
    lane.arrive(1, "1", 0.0)
    assert lane.holds(1)
    lane.use_up(1)
    assert not lane.holds(1)
    lane.arrive(0, "0", 0.0)
    assert list(lane.ready) == ["0"]
    assert lane.following == 2


@given(st.integers(2**20, 2**62), st.integers(0, 5))
def test_a_number_that_is_far_away_costs_no_more_than_a_near_one(far: int, next_one: int) -> None:
    lane: SequenceOrder[str] = SequenceOrder()
    for number in range(next_one):
        lane.use_up(number)
    lane.arrive(far, "far", 0.0)
    lane.arrive(next_one + 2, "near", 0.0)
    assert lane.drop_far(100) == ["far"]
    assert lane.missing() == [next_one, next_one + 1]
    assert lane.give_up() == ["near"]
    lane.arrive(far + 1, "far", 0.0)
    assert len(lane.hole()) == far + 1 - lane.following
    assert lane.give_up() == ["far"]
    assert lane.following == far + 2
