"""A missing number may still come while a slow upload is under way, or a request was turned away for the moment."""

import pytest

from twinkle_server.runtime.arrivals import Arrivals

NEVER = float("-inf")


class Clock:
    """Shows what a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_quick_requests_that_were_answered_hold_nothing_up() -> None:
    clock = Clock()
    arrivals = Arrivals(35.0, clock)
    with arrivals.watch("ada") as answered:
        assert arrivals.expected_until("ada", 10.0) == NEVER
        answered(200)
    assert arrivals.expected_until("ada", 10.0) == NEVER


def test_a_slow_upload_is_waited_for_and_its_tenants_next_request_too() -> None:
    clock = Clock()
    arrivals = Arrivals(35.0, clock)
    with arrivals.watch("ada") as first:
        clock.now = 130.0
        assert arrivals.expected_until("ada", 10.0) == 140.0
        with arrivals.watch("ada") as second:  # a quick one beside it changes nothing
            second(200)
        assert arrivals.expected_until("ada", 10.0) == 140.0
        assert arrivals.expected_until("bob", 10.0) == NEVER
        first(200)
    clock.now = 200.0
    assert arrivals.expected_until("ada", 10.0) == 140.0


@pytest.mark.parametrize(
    ("status", "again"),
    [
        (0, True),
        (408, True),
        (429, True),
        (500, True),
        (503, True),
        (200, False),
        (400, False),
        (404, False),
        (409, False),
        (422, False),
    ],
)
def test_what_clients_send_again_is_waited_for(status: int, again: bool) -> None:
    clock = Clock()
    arrivals = Arrivals(35.0, clock)
    with arrivals.watch("ada") as answered:
        if status:
            answered(status)
    assert arrivals.expected_until("ada", 10.0) == (135.0 if again else NEVER)
    assert arrivals.expected_until("bob", 10.0) == NEVER


def test_everybody_may_send_again_after_a_restart() -> None:
    arrivals = Arrivals(35.0, Clock())
    arrivals.expect_resends()
    assert arrivals.expected_until("ada", 10.0) == 135.0


def test_it_remembers_a_bounded_number_of_tenants() -> None:
    clock = Clock()
    arrivals = Arrivals(35.0, clock)
    for number in range(5000):
        with arrivals.watch(str(number)) as answered:
            answered(429)
    assert arrivals.expected_until("0", 10.0) == NEVER
    assert arrivals.expected_until("4999", 10.0) == 135.0
