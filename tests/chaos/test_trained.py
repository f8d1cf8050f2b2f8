"""Kills of a service that really trains: what comes out is what comes out of one that nobody disturbs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_clients import Client
from server_fates import READY_SECONDS, Fate, Killer
from server_proxy import Proxy, proxied
from server_raw import LORA, arrays, pass_body, row
from serving import Served, pool

from twinkle.testing import tiny_model

STEPS = 10
RANKS = (4, 8, 8)
"""Of the models that learn at once."""
KILLS = 10
PAUSE = 8.0
"""Most seconds from one kill to the next, so that an engine with torch comes up in between, or does not."""


@contextmanager
def training_service(folder: Path, model: Path) -> Iterator[Served]:
    times = {"poll": 1.0, "snapshot": 1.0, "gap_fail": 120.0}
    service = pool(folder / "data", model, {"times": times, "snapshot_steps": 3}).start()
    try:
        yield service
    finally:
        service.kill()


async def learn(client: Client, model: Path, number: int) -> np.ndarray[Any, Any]:
    """Train one model, sending eight operations ahead, and return the log-probabilities that it then has."""
    session = await client.session()
    lane, draw, gate = f"{session}:train:0", np.random.default_rng(number), asyncio.Semaphore(8)
    lora = {**LORA, "rank": RANKS[number], "seed": number}
    made = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": lora}
    await client.do("/create_model", made)
    passed = row(draw.integers(5, 100, 24).tolist())

    async def one(path: str, body: Any, kind: str) -> None:
        async with gate:
            await client.do(path, body, kind)

    async with asyncio.TaskGroup() as tasks:
        for step in range(STEPS):
            for half in (1, 2):
                rows = [row(draw.integers(5, 100, 16).tolist())]
                body = pass_body(lane, 3 * step + half, rows)
                tasks.create_task(one("/forward_backward", body, "pass"))
            adam = {"learning_rate": 1e-2}
            body = {"model_id": lane, "seq_id": 3 * step + 3, "adam_params": adam}
            tasks.create_task(one("/optim_step", body, "json"))
    output = await client.do("/forward_backward", pass_body(lane, 3 * STEPS + 1, [passed], forward_only=True), "pass")
    return arrays(output)[0]


async def all_learn(service: Served, model: Path, fate: Fate) -> list[np.ndarray[Any, Any]]:
    """Let all models learn at once, while fate does to the service what it does."""
    proxy = Proxy(service.url)
    async with proxied(proxy), Client(proxy.url) as client:
        watching = asyncio.create_task(fate.watch(service, proxy))
        try:
            found = await asyncio.gather(*(learn(client, model, number) for number in range(len(RANKS))))
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
    fate.check_futures(client.waits)
    return found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_twenty_random_kills_while_training_change_no_number(tmp_path: Path, seed: int) -> None:
    model = tiny_model(tmp_path / "tiny" / "v1", "qwen3")
    with training_service(tmp_path / "calm", model) as service:
        expected = asyncio.run(all_learn(service, model, Fate()))
    fate, furthest, rounds = Killer(seed, KILLS, PAUSE), 0.0, 0
    with training_service(tmp_path / "killed", model) as service:
        while fate.left and rounds < 4 * KILLS:
            rounds += 1
            found = asyncio.run(all_learn(service, model, fate))
            furthest = max(furthest, *(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)))
    ready = f"{fate.fastest:.1f} to {fate.slowest:.1f} s"
    print(f"{KILLS} kills in {rounds} rounds: logprobs differ by {furthest:.1e} at most; ready after {ready}")
    assert not fate.left
    assert furthest <= 1e-5
    assert fate.fastest <= READY_SECONDS  # torch is most of it, and takes what the machine has left for it
