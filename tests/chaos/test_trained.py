"""Kills of a service that really trains: what comes out is what comes out of one that nobody disturbs."""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from server_clients import Client
from server_fates import READY_SECONDS, Fate, Killer
from server_proxy import Proxy, proxied
from server_raw import LORA, arrays, pass_body, row
from serving import Served, pool

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

STEPS = 10
RANKS = (4, 8, 8)
"""Of the models that learn at once."""
PAUSE = 8.0
"""Most seconds from one kill to the next, so that an engine with torch comes up in between, or does not."""
ROUNDING = {"MKL_CBWR": "COMPATIBLE"}
"""Lets products of float32 round by their shapes on every processor, as they do by themselves on most."""


@contextmanager
def training_service(folder: Path, model: Path, **settings: Any) -> Iterator[Served]:
    times = {"poll": 1.0, "gap_fail": 120.0, **settings.pop("times", {"snapshot": 1.0})}
    given = {"times": times, "snapshot_steps": 3, "pass_tokens": 40, **settings}
    service = pool(folder / "data", model, given, **ROUNDING).start()
    try:
        yield service
    finally:
        service.kill()


class Learner:
    """One model, trained by requests that are sent ahead.

    Args:
        client: sends them.
        model: the base model's folder.
        number: of the model, from which its rank and its rows follow.
        ahead: operations that are sent before the first of them is answered.

    Attributes:
        answers: what its passes gave, in order.
    """

    def __init__(self, client: Client, model: Path, number: int, ahead: int = 8) -> None:
        self.client, self.model, self.number, self.ahead = client, model, number, ahead
        self.answers: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._draw = np.random.default_rng(number)
        self._last = 3 * STEPS

    async def learn(self) -> None:
        """Train from the beginning to the end."""
        session = await self.client.session()
        self.queue_id, gate = f"{session}:train:0", asyncio.Semaphore(self.ahead)
        lora = {**LORA, "rank": RANKS[self.number], "seed": self.number}
        made = {"session_id": session, "model_seq_id": 0, "base_model": str(self.model), "lora_config": lora}
        await self.client.do("/create_model", made)

        async def one(path: str, number: int, body: Any, kind: str) -> None:
            async with gate:
                found = await self.client.do(path, body, kind)
            if kind == "pass":
                self.answers[number] = arrays(found)

        async with asyncio.TaskGroup() as tasks:
            for step in range(STEPS):
                for half in (1, 2):
                    number = 3 * step + half
                    rows = [row(self._draw.integers(5, 100, length).tolist()) for length in (16, 9, 21)[half - 1 :]]
                    tasks.create_task(one("/forward_backward", number, pass_body(self.queue_id, number, rows), "pass"))
                adam = {"learning_rate": 1e-2}
                body = {"model_id": self.queue_id, "seq_id": 3 * step + 3, "adam_params": adam}
                tasks.create_task(one("/optim_step", 3 * step + 3, body, "json"))

    async def look(self) -> np.ndarray[Any, Any]:
        """Return the log-probabilities of a row that the model was not trained on."""
        self._last += 1
        rows = [row(np.random.default_rng(99).integers(5, 100, 24).tolist())]
        body = pass_body(self.queue_id, self._last, rows, forward_only=True)
        return arrays(await self.client.do("/forward_backward", body, "pass"))[0]


async def learning(
    service: Served, model: Path, fate: Fate, numbers: Sequence[int], **more: Any
) -> tuple[list[Learner], list[np.ndarray[Any, Any]]]:
    """Let models learn at once while fate does to the service what it does; then look at each, and nothing beside it.

    All are looked at once more after the service was killed, and made again from what the log says.
    """
    proxy = Proxy(service.url)
    async with proxied(proxy), Client(proxy.url) as client:
        watching = asyncio.create_task(fate.watch(service, proxy))
        learners = [Learner(client, model, number, **more) for number in numbers]
        try:
            await asyncio.gather(*(learner.learn() for learner in learners))
            found = [await learner.look() for learner in learners]
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended
        fate.check_futures(client.waits)
        await asyncio.to_thread(service.kill)
        await asyncio.to_thread(service.start)
        proxy.upstream = service.url
        for learner, before in zip(learners, found, strict=True):
            assert np.array_equal(await learner.look(), before), "made again, it is the model that it was"
    return learners, found


def alone(folder: Path, seed: int, kills: int) -> Killer:
    """Train one model undisturbed, and again while everything is killed, and compare all its answers to the bit."""
    model = tiny_model(folder / "tiny" / "v1", "qwen3")
    with training_service(folder / "calm", model) as service:
        [calm], expected = asyncio.run(learning(service, model, Fate(), [0]))
    fate, rounds = Killer(seed, kills, PAUSE), 0
    with training_service(folder / "killed", model) as service:
        while fate.left and rounds < 4 * kills:
            rounds += 1
            [killed], found = asyncio.run(learning(service, model, fate, [0], ahead=1 + 7 * (rounds % 2)))
            assert calm.answers.keys() == killed.answers.keys()
            for number, answer in calm.answers.items():
                assert all(map(np.array_equal, answer, killed.answers[number])), f"operation {number}, round {rounds}"
            assert np.array_equal(found[0], expected[0])
    assert not fate.left
    return fate


@pytest.mark.timeout(1200)
def test_kills_while_a_model_trains_alone_change_no_bit(tmp_path: Path) -> None:
    alone(tmp_path, 0, 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_ten_kills_while_a_model_trains_alone_change_no_bit(tmp_path: Path, seed: int) -> None:
    fate = alone(tmp_path, seed, 10)
    assert fate.fastest <= READY_SECONDS  # torch is most of it, and takes what the machine has left for it


@pytest.mark.timeout(1200)
def test_models_that_shared_passes_are_made_again_to_the_bit(tmp_path: Path) -> None:
    """No snapshot is there: all that they learned together is done again from the log, which says with whom."""
    model = tiny_model(tmp_path / "tiny" / "v1", "qwen3")
    settings = {"times": {"snapshot": 1e6}, "snapshot_steps": 10**6, "pass_tokens": 512}
    with training_service(tmp_path, model, **settings) as service:
        asyncio.run(learning(service, model, Fate(), range(3)))
        with closing(sqlite3.connect(service.data / "twinkle.db")) as database:
            records = [orjson.loads(data) for (data,) in database.execute("SELECT data FROM compositions")]
    assert len(records) == 3 * 2 * STEPS
    assert any(len(entry["parts"]) > 1 for record in records for entry in record), "they shared passes"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_models_that_learned_together_among_kills_are_made_again_to_the_bit(tmp_path: Path, seed: int) -> None:
    model, fate, rounds = tiny_model(tmp_path / "tiny" / "v1", "qwen3"), Killer(seed, 10, PAUSE), 0
    with training_service(tmp_path, model, pass_tokens=512) as service:
        while fate.left and rounds < 40:
            rounds += 1
            asyncio.run(learning(service, model, fate, range(3)))
    assert not fate.left
