"""Random histories: bursts out of order, failures, deaths of the engine, restarts of the service, samples and cancels.

What is checked is exact: each operation that is done was applied once, behind all before it that are done and before
all others; every future is over in the end; nothing is left in the books.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from server_runtime import SOON, Plan, World, answer, applied, ask, within

from twinkle_server.operations import Future, Submission
from twinkle_server.runtime.core import Runtime

QUEUES = ("s:train:0", "s:train:1", "t:train:0")


@dataclass
class History:
    """A random history.

    Attributes:
        asked: ids of futures, by queue and number.
        samples: ids of sampling requests.
        following: next number of each queue.
    """

    seed: int
    asked: dict[tuple[str, int], str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    following: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0))

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.world = World(
            Plan(
                seed=self.seed,
                deaths=self.draw.randrange(7),
                chance=self.draw.choice([0.02, 0.1, 0.3]),
                snapshot_every=self.draw.randrange(1, 8),
                fail=frozenset(self.draw.sample(range(1, 15), self.draw.randrange(3))),
            )
        )

    async def live(self) -> None:
        """Let one service after another work, and end."""
        for _ in range(self.draw.randrange(1, 4)):
            runtime = await self.world.runtime()
            for _ in range(self.draw.randrange(12)):
                await self.act(runtime)
            if self.draw.random() < 0.3:
                await runtime.drain()
            await runtime.close()

    async def act(self, runtime: Runtime) -> None:
        """Do something."""
        queue_id, chance = self.draw.choice(QUEUES), self.draw.random()
        if chance < 0.6:
            await self.burst(runtime, queue_id)
        elif chance < 0.8:
            await self.sample(runtime)
        elif chance < 0.85:
            await runtime.finish_session(self.draw.choice("st"))
        elif chance < 0.93:
            await asyncio.sleep(self.draw.random() * 0.003)
        elif runtime.supervisor.up:
            self.world.engines[-1].kill()

    async def burst(self, runtime: Runtime, queue_id: str) -> None:
        """Submit the next numbers of a queue, in any order."""
        count = self.draw.randrange(1, 5)
        numbers = list(range(self.following[queue_id], self.following[queue_id] + count))
        self.following[queue_id] += count
        self.draw.shuffle(numbers)
        for number in numbers:
            kind = "create" if number == 0 else "optim_step"
            self.asked[queue_id, number] = (await ask(runtime, number, kind, queue_id)).request
        if self.draw.random() < 0.4:  # some wait, some are in the engine, and some have begun
            asked = [request for (name, number), request in self.asked.items() if name == queue_id and number]
            for request in self.draw.sample(asked, min(2, len(asked))):
                await runtime.cancel(request, "ada")

    async def sample(self, runtime: Runtime) -> None:
        """Submit a sampling request, and perhaps cancel one."""
        submission = Submission("ada", "s:sample:0", "sample", b'{"tokens":[1]}', 10**9 + len(self.samples))
        self.samples.append((await runtime.submit(submission)).request)
        if self.draw.random() < 0.3:
            await runtime.cancel(self.draw.choice(self.samples), "ada")

    async def check(self) -> None:
        """Let a last service take up what is left, and compare."""
        self.world.plan.deaths = 0
        runtime = await self.world.runtime()
        told = {key: await answer(runtime, request) for key, request in self.asked.items()}
        for request in self.samples:
            assert (await answer(runtime, request)).status in ("done", "cancelled", "failed")
        for (queue_id, number), future in told.items():
            if future.status == "done" and number > 0:
                assert applied(future) == [n for n in range(1, number + 1) if told[queue_id, n].status == "done"]
            elif future.status == "failed":
                assert _excused(future), future
        await runtime.outcomes.flush()
        assert (len(runtime.futures), len(runtime.dispatcher.in_flight), runtime.dispatcher.restoring) == (0, 0, 0)
        await runtime.close()


def _excused(future: Future) -> bool:
    words = ("twice", "told to fail", "its creation failed", "session was finished")
    return any(word in str(future.error) for word in words)


def _check(seed: int) -> None:
    async def scenario() -> None:
        history = History(seed)
        await history.live()
        await history.check()

    within(3 * SOON, scenario)


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_history_is_what_it_should_be(seed: int) -> None:
    _check(seed)


@pytest.mark.soak
def test_thousands_of_random_histories_are_what_they_should_be() -> None:
    for seed in range(1000, 4000):
        _check(seed)
