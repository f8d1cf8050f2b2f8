"""What counts as work of the engine that failed: all of a turn, by the service's fault, and not for ever."""

import pytest

from twinkle_server.operations import Category, Kind
from twinkle_server.runtime.status import FORGOTTEN, LastPass

End = tuple[Kind, Category | None]


class Clock:
    """Stands still."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def work(clock: Clock) -> LastPass:
    return LastPass(clock)


def turn(work: LastPass, *ends: End) -> None:
    """Let operations end, and their turn with them."""
    for kind, category in ends:
        work.ended(kind, category)
    work.passed("pass" if ends[0][0].startswith("forward") else ends[0][0])


@pytest.mark.parametrize("kind", ["forward", "forward_backward", "optim_step", "sample"])
def test_a_turn_that_failed_whole_is_trouble_until_one_of_its_kind_works(work: LastPass, kind: Kind) -> None:
    assert work.trouble is None
    turn(work, (kind, "server"), (kind, "server"))
    assert "failed as a whole" in str(work.trouble)
    turn(work, ("optim_step" if kind != "optim_step" else "forward", None))
    assert work.trouble is not None
    turn(work, (kind, "user"))
    assert work.trouble is not None, "who cannot ask well does not show that the engine works"
    turn(work, (kind, None), (kind, "server"))
    assert work.trouble is None


@pytest.mark.parametrize("ends", [[("forward", "user")], [("forward", "server"), ("forward_backward", None)]])
def test_users_faults_and_one_failure_among_others_are_none(work: LastPass, ends: list[End]) -> None:
    turn(work, *ends)
    assert work.trouble is None


@pytest.mark.parametrize("kind", ["create", "save", "load", "unload"])
def test_files_and_room_are_no_work_of_the_engine(work: LastPass, kind: Kind) -> None:
    turn(work, (kind, "server"))
    assert work.trouble is None


def test_a_probe_that_keeps_work_away_does_not_wait_for_work(work: LastPass, clock: Clock) -> None:
    turn(work, ("forward", "server"))
    clock.now += FORGOTTEN - 1
    assert work.trouble is not None
    turn(work, ("forward", "server"))
    clock.now += FORGOTTEN - 1
    assert work.trouble is not None
    clock.now += 2
    assert work.trouble is None


def test_a_new_engine_has_failed_at_nothing(work: LastPass) -> None:
    turn(work, ("forward", "server"))
    work.ended("forward", "server")
    work.reset()
    assert work.trouble is None
    turn(work, ("forward", "user"))
    assert work.trouble is None
