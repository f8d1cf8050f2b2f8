"""Kills of the service and of its engine, at random and at every failpoint, lose nothing that was acknowledged."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_failpoints import served_failpoints
from server_fates import Fate, Killer, counting_service, survive, survive_all
from serving import Served

PROGRAM = (
    *("train", "step", "big", "save", "train", "step", "read", "copy", "sample", "load", "train", "step", "save"),
    *("copy", "cancel", "big"),
)
SLOW = {"seconds_per_token": 0.0005}
"""A pass takes some time, so that what is behind it in the engine can be cancelled."""
VISITS = {"store.before_commit": (1, 20), "store.after_commit": (6, 45)}
# Where a failpoint is reached: checkpoints are published by the engine, and copies of them by the service itself.
IN_ENGINE, IN_SERVICE = {"engine", "files"}, {"blob", "effects", "files", "outcomes", "secret", "store"}
AT_THE_START = {"secret.before_link"}
FIRST = {("store.after_commit", 45), ("engine.after_pass", 1)}


def deaths() -> Iterator[Any]:
    """Yield each failpoint with the visit at which it kills; `make test` has one in each process."""
    for name in served_failpoints():
        for visit in VISITS.get(name, (1,)):
            marks = () if (name, visit) in FIRST else (pytest.mark.full,)
            yield pytest.param(name, visit, marks=marks, id=f"{name}-{visit}")


@pytest.mark.parametrize(("name", "visit"), list(deaths()))
def test_a_death_at_any_failpoint_loses_nothing(tmp_path: Path, name: str, visit: int) -> None:
    area = name.partition(".")[0]
    # Whether passes wait in the engine when their cancellation comes depends on the machine: ask often.
    first = ("cancel",) * 30 if name == "engine.after_withdraw" else ()
    engine, service = die_at(tmp_path, name, visit, [first + PROGRAM, PROGRAM[3:]])
    assert engine or area not in IN_ENGINE, f"the engine did not reach {name} a {visit}. time: extend the program"
    assert service or area not in IN_SERVICE, f"the service did not reach {name} a {visit}. time: extend the program"
    assert area in IN_ENGINE | IN_SERVICE, f"say which process reaches {name}"


def die_at(folder: Path, name: str, visit: int, programs: list[tuple[str, ...]]) -> tuple[bool, bool]:
    """Let service and engine die at a failpoint, demand that nothing was lost, and return which of them died."""
    with counting_service(folder, SLOW, FAILPOINT=f"{name}:{visit}") as service:
        fate = Fate()
        first = started(service)
        asyncio.run(survive(service, programs, fate))
        died = fate.engine_died(service), not first or fate.deaths > 0
        code = service.stop()
        if code == -signal.SIGKILL:  # the place lies on the way of the drain
            died = died[0], True
            service.start()
            service.wait_ready(120)
            code = service.stop()
        assert code == 0
    return died


def started(service: Served) -> bool:
    """Wait until the service is ready; if the failpoint killed it before, start it anew and return False."""
    try:
        service.wait_ready(120)
    except AssertionError:
        assert not service.alive, service.log()
        service.start()
        return False
    return True


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", served_failpoints())
def test_a_death_at_twenty_visits_loses_nothing(tmp_path: Path, name: str) -> None:
    programs = [PROGRAM * 2, PROGRAM[3:] * 2]
    reached = sum(any(die_at(tmp_path / str(visit), name, visit, programs)) for visit in range(1, 21))
    print(f"{name}: {reached} of 20 visits came")
    assert reached == 1 if name in AT_THE_START else reached >= 5


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    with counting_service(tmp_path, SLOW) as service:
        service.wait_ready()
        survive_all(service, [PROGRAM * 2, PROGRAM, PROGRAM[5:]], Killer(0, 4))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_random_kills_lose_nothing(tmp_path: Path) -> None:
    slowest = longest = done = 0.0
    for seed in range(10):
        with counting_service(tmp_path / str(seed)) as service:
            service.wait_ready()
            fate = Killer(100 + seed, 10)
            done += survive_all(service, [PROGRAM * 4, PROGRAM * 3, PROGRAM * 2], fate)
        slowest, longest = max(slowest, fate.slowest), max(longest, fate.longest)
    print(f"{done:.0f} operations; ready after {slowest:.1f} s, every future over after {longest:.1f} s at most")


@pytest.mark.full
def test_sigterm_under_load_loses_nothing(tmp_path: Path) -> None:
    drain(tmp_path, 2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_fifty_drains_lose_nothing(tmp_path: Path) -> None:
    drain(tmp_path, 50)


class Terminator(Killer):
    """Ends the service with SIGTERM, a number of times."""

    async def act(self, service: Served) -> None:
        await asyncio.sleep(0.3)
        if self.left and service.alive:
            assert await asyncio.to_thread(service.stop) == 0  # in the time that it has for it
            self.left.pop()


def drain(folder: Path, times: int) -> None:
    with counting_service(folder) as service:
        service.wait_ready()
        survive_all(service, [PROGRAM * 2, PROGRAM], Terminator(0, times), rounds=4 * times)
