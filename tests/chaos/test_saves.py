"""Checkpoints that are being written or copied when a process is killed are there whole and exact, or not yet."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from server_clients import PATIENCE, Client, Trainer
from server_fates import READY_SECONDS, Fate, counting_service
from server_history import State, read_ledger
from server_proxy import Proxy, proxied
from server_raw import Raw, row
from serving import Served

from twinkle_server.engine.files import TEMPORARY, verify

MODELS = 4
KILLS = 50
"""Of one soak test; there are ten."""


@dataclass
class Saved:
    """What was acknowledged.

    Attributes:
        states: what each checkpoint must hold, by its path.
        open: saves and copies that were under way when a process was killed.
    """

    states: dict[str, State] = field(default_factory=dict)
    open: int = 0


class Ordered(Fate):
    """Kills a process when it is told to: the service, or else its engine."""

    def __init__(self) -> None:
        super().__init__()
        self._orders: asyncio.Queue[tuple[bool, asyncio.Event]] = asyncio.Queue()

    async def kill(self, whole: bool) -> None:
        """Order a kill, and wait for it."""
        done = asyncio.Event()
        self._orders.put_nowait((whole, done))
        await asyncio.wait_for(done.wait(), PATIENCE)

    async def act(self, service: Served) -> None:
        whole, done = await self._orders.get()
        assert await asyncio.to_thread(service.kill if whole else service.kill_engine) is not False
        done.set()


@pytest.mark.full
def test_a_kill_while_saving_leaves_checkpoints_whole_and_exact(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 0, 6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_five_hundred_kills_while_saving_leave_checkpoints_whole_and_exact(tmp_path: Path, seed: int) -> None:
    kill_while_saving(tmp_path, seed, KILLS)


def kill_while_saving(folder: Path, seed: int, kills: int) -> None:
    with counting_service(folder) as service:
        service.wait_ready()
        fate = Ordered()
        saved = asyncio.run(kill_and_save(service, random.Random(seed), kills, fate))
        print(f"{kills} kills, {saved.open} saves and copies were under way, {len(saved.states)} checkpoints")
        assert saved.open >= kills / 2, "most kills came when nothing was being saved"
        for place in (folder / "data" / "checkpoints").iterdir():
            if not place.name.startswith(TEMPORARY):
                verify(place)  # whatever has a name of its own is whole
        with Raw(service.url) as raw:
            assert listed(raw) == set(saved.states)
            assert {path: held(raw, path) for path in saved.states} == {
                path: (state.applied, ()) for path, state in saved.states.items()
            }
        assert fate.slowest <= READY_SECONDS


async def kill_and_save(service: Served, draw: random.Random, kills: int, fate: Ordered) -> Saved:
    """Save all models at once, time and again, and kill the engine or, every fifth time, the service meanwhile."""
    proxy, saved = Proxy(service.url), Saved()
    async with proxied(proxy), Client(proxy.url) as client:
        watching = asyncio.create_task(fate.watch(service, proxy))
        try:
            session = await client.session()
            trainers = [await Trainer(client, session, at, 1000 * (at + 1)).create() for at in range(MODELS)]
            span = await undisturbed(trainers, saved)
            for at in range(kills):
                await asyncio.gather(*(work for trainer in trainers for work in (trainer.train(), trainer.step())))
                tasks = [asyncio.ensure_future(trainer.save()) for trainer in trainers]
                if at % 5 == 4:
                    tasks += [asyncio.ensure_future(copied(client, session, 100 + at, saved))]
                await asyncio.sleep(draw.uniform(0, span))
                await fate.kill(at % 5 == 4)
                saved.open += sum(not task.done() for task in tasks)
                saved.states.update(await asyncio.gather(*tasks))
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
    assert fate.deaths == kills // 5
    return saved


async def undisturbed(trainers: list[Trainer], saved: Saved) -> float:
    """Save once and return how long that takes; the second time, for the first makes folders."""
    for _ in range(2):
        start = time.monotonic()
        saved.states.update(await asyncio.gather(*(trainer.save() for trainer in trainers)))
    return time.monotonic() - start


async def copied(client: Client, session: str, number: int, saved: Saved) -> tuple[str, State]:
    """Copy the checkpoint that was saved last."""
    path, state = list(saved.states.items())[-1]
    return await client.copy(session, number, path), state


def listed(raw: Raw) -> set[str]:
    """Return the path of every checkpoint there is."""
    found: set[str] = set()
    while page := raw.get("/checkpoints", limit=100, offset=len(found))["checkpoints"]:
        found |= {entry["tinker_path"] for entry in page}
    return found


def held(raw: Raw, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a model made from a checkpoint has applied, and has pending."""
    pending, applied = read_ledger(raw.load(path).forward([row([1, 2])]))
    return tuple(applied), tuple(pending)
