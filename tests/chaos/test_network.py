"""A network that loses, delays, repeats and reorders changes nothing: once, in order, for nobody else."""

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_clients import Client, Trainer, follow
from server_history import none_foreign
from server_proxy import NONE, Fault, Proxy, proxied
from serving import Served, ledger

WORDS = ("train", "train", "train", "step", "step", "read", "save", "sample", "load", "big")
Programs = Sequence[Sequence[str]]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    times = {"poll": 1.0, "gap_pause": 5.0, "gap_fail": 120.0}
    service = ledger(tmp_path_factory.mktemp("chaos") / "data", {"times": times, "snapshot_steps": 3}).start()
    yield service
    service.stop()


def weather(seed: int, bad: float) -> Proxy:
    """Return a proxy that is bad to so large a part of all requests: half of it lost answers."""
    draw = random.Random(seed)

    def plan(number: int, path: str) -> Fault:
        if draw.random() >= bad:
            return NONE
        kind = draw.random()
        if kind < 0.5:
            return Fault(mute=True)
        if kind < 0.65:
            return Fault(lost=True)
        if kind < 0.8:
            return Fault(repeats=draw.randint(1, 2))
        return Fault(delay=draw.uniform(0.005, 0.08))

    return Proxy("", plan)


async def live(url: str, programs: Programs, proxy: Proxy, ahead: int) -> int:
    """Let clients do their programs through a proxy, check all histories, and return how many requests were sent."""
    proxy.upstream = url
    async with proxied(proxy):
        clients = [Client(proxy.url) for _ in programs]
        trainers = [Trainer(client, await client.session(), 0, 1000 * (at + 1)) for at, client in enumerate(clients)]
        async with asyncio.TaskGroup() as tasks:
            for trainer, program in zip(trainers, programs, strict=True):
                tasks.create_task(run(trainer, program, ahead))
        for trainer in trainers:
            trainer.history.check()
        none_foreign([trainer.history for trainer in trainers])
        for client in clients:
            await client.http.aclose()
        return sum(client.sent for client in clients)


async def run(trainer: Trainer, program: Sequence[str], ahead: int) -> None:
    await trainer.create()
    await follow(trainer, program, ahead)


programs = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=14), min_size=2, max_size=4)
bound = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@settings(bound, max_examples=12)
@given(programs=programs, seed=st.integers(0, 2**32), ahead=st.integers(2, 8))
@example(programs=[["train", "step"] * 6, ["train", "save", "step", "load", "read"]], seed=1, ahead=8)
@example(programs=[["train", "sample", "step", "sample", "read"]] * 3, seed=2, ahead=6)
def test_every_operation_is_done_once_in_order_and_for_its_model_alone(
    counting: Served, programs: Programs, seed: int, ahead: int
) -> None:
    asyncio.run(live(counting.url, programs, weather(seed, 0.4), ahead))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_operations_on_a_bad_network(counting: Served) -> None:
    draw = random.Random(0)
    done = 0
    for seed in range(200):
        if done >= 10_000:
            break
        chosen = [[draw.choice(WORDS) for _ in range(40)] for _ in range(4)]
        done += sum(map(len, chosen))
        asyncio.run(live(counting.url, chosen, weather(seed, 0.2), 8))
    assert done >= 10_000


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


@pytest.mark.parametrize("order", permuted(16, 8), ids=lambda order: "-".join(map(str, order)))
def test_any_order_of_arrival_is_the_order_of_numbers(counting: Served, order: list[int]) -> None:
    asyncio.run(arrive(counting.url, order))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_orders_of_arrival(counting: Served) -> None:
    for order in permuted(16, 1000):
        asyncio.run(arrive(counting.url, order))
