"""A network that loses, delays, repeats and reorders changes nothing: once, in order, for nobody else."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_clients import Client, Trainer
from server_fates import Fate, Killer, counting_service, survive, survive_all
from server_history import History
from server_proxy import weather
from serving import Served, ledger

WORDS = ("train", "train", "train", "step", "step", "read", "save", "sample", "load", "big", "copy")
SHARES = {"mute": 0.10, "repeats": 0.05, "delay": 0.05}
Programs = Sequence[Sequence[str]]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    times = {"poll": 1.0, "gap_pause": 5.0, "gap_fail": 120.0}
    service = ledger(tmp_path_factory.mktemp("chaos") / "data", {"times": times, "snapshot_steps": 3}).start()
    yield service
    service.stop()


def changes(histories: Sequence[History]) -> int:
    return sum(history.changes for history in histories)


programs = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=14), min_size=2, max_size=4)
bound = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@pytest.mark.full
@settings(bound, max_examples=12)
@given(programs=programs, seed=st.integers(0, 2**32), ahead=st.integers(2, 8))
@example(programs=[["train", "step"] * 6, ["train", "save", "step", "copy", "load", "read"]], seed=1, ahead=8)
@example(programs=[["train", "sample", "step", "sample", "read"]] * 3, seed=2, ahead=6)
def test_every_operation_is_done_once_in_order_and_for_its_model_alone(
    counting: Served, programs: Programs, seed: int, ahead: int
) -> None:
    bad = weather(seed, mute=0.2, lost=0.06, repeats=0.06, delay=0.08)
    asyncio.run(survive(counting, programs, Fate(), bad, ahead))


@pytest.mark.full
def test_a_bad_network_before_a_service_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    chosen = [["train", "step", "save", "copy", "big", "sample", "train", "step", "load", "read"] * 2] * 3
    with counting_service(tmp_path) as service:
        service.wait_ready()
        proxy = weather(3, **SHARES)
        survive_all(service, chosen, Killer(3, 3), proxy=proxy)
    assert min(proxy.befell[name] for name in SHARES) > 0, "the network was good"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_operations_on_a_bad_network(counting: Served) -> None:
    draw, befell, seen, done, fate = random.Random(0), Counter[str](), 0, 0, Fate()
    for seed in range(400):
        if done >= 10_000:
            break
        chosen = [[draw.choice(WORDS) for _ in range(40)] for _ in range(12)]
        proxy = weather(seed, **SHARES)
        done += changes(asyncio.run(survive(counting, chosen, fate, proxy, 8)))
        befell, seen = befell + proxy.befell, seen + proxy.seen
    shares = {name: befell[name] / seen for name in SHARES}
    print(f"{done} operations in {seen} requests, {shares}; every future over after {fate.longest:.1f} s at most")
    assert done >= 10_000
    assert shares == pytest.approx(SHARES, rel=0.1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_kills_behind_a_bad_network(tmp_path: Path) -> None:
    done, fate, draw = 0, Killer(17, 40), random.Random(17)
    with counting_service(tmp_path) as service:
        service.wait_ready()
        chosen = [[draw.choice(WORDS) for _ in range(40)] for _ in range(4)]
        done = survive_all(service, chosen, fate, rounds=40, proxy=weather(17, **SHARES))
    print(f"{done} operations; ready after {fate.slowest:.1f} s, futures over after {fate.longest:.1f} s at most")


def permuted(count: int, examples: int) -> list[list[int]]:
    draw = random.Random(7)
    return [draw.sample(range(1, count + 1), count) for _ in range(examples)]


async def arrive(url: str, order: Sequence[int]) -> None:
    """Submit a program's operations in an order of arrival, and check that they ran by their numbers."""
    async with Client(url) as client:
        trainer = Trainer(client, await client.session(), 0, 10)
        await trainer.create()
        makers = (trainer.train, trainer.read, trainer.step)
        work = {number: makers[(number - 1) % 3]() for number in range(1, len(order) + 1)}
        tasks = []
        for number in order:
            tasks.append(asyncio.ensure_future(work[number]))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await trainer.read()
        trainer.history.check()


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", permuted(16, 8), ids=lambda order: "-".join(map(str, order)))
def test_any_order_of_arrival_is_the_order_of_numbers(counting: Served, order: list[int]) -> None:
    asyncio.run(arrive(counting.url, order))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_orders_of_arrival(counting: Served) -> None:
    for order in permuted(16, 1000):
        asyncio.run(arrive(counting.url, order))
