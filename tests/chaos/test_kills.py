"""Kills of the service and of its engine, at random and at every failpoint, lose nothing that was acknowledged."""

import ast
import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_clients import Client, Trainer, follow
from server_failpoints import REACH, SOURCE, failpoints
from server_history import none_foreign
from server_proxy import Proxy, proxied
from serving import Served, ledger

PROGRAM = ["train", "step", "big", "save", "train", "step", "read", "sample", "load", "train", "step", "save", "big"]
VISITS = {"store.before_commit": (1, 20), "store.after_commit": (6, 45)}
# Functions that rename without a failpoint, and why none is needed.
WITHOUT = {
    "observe/presence.py:announce": "tells where a server listens; without it, status reads the database",
    "checkpoints/sweep.py:_remove": "removes what nothing names",
}
READY_SECONDS = 10.0
RESOLVED_SECONDS = 60.0


@contextmanager
def served(folder: Path, **environment: str) -> Iterator[Served]:
    """A service that counts and snapshots often, ended in any case."""
    times = {"poll": 1.0, "gap_pause": 5.0, "gap_fail": 120.0, "snapshot": 1.0}
    limits = {"small_bytes": 512}  # so that payloads and results of some operations go to files
    service = ledger(folder / "data", {"times": times, "limits": limits, "snapshot_steps": 1})
    service.start(wait=False, **environment)
    try:
        yield service
    finally:
        service.kill()


async def survive(service: Served, programs: Sequence[Sequence[str]], fate: "Fate") -> None:
    """Let clients work while fate does to the service what it does; then check every history."""
    async with proxied(Proxy(service.url)) as proxy:
        clients = [Client(proxy.url) for _ in programs]
        watching = asyncio.create_task(fate.watch(service, proxy))
        try:
            trainers = [
                Trainer(client, await client.session(), 0, 1000 * (at + 1)) for at, client in enumerate(clients)
            ]
            async with asyncio.TaskGroup() as tasks:
                for trainer, program in zip(trainers, programs, strict=True):
                    tasks.create_task(run(trainer, program))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for client in clients:
                await client.http.aclose()
    for trainer in trainers:
        trainer.history.check()
    none_foreign([trainer.history for trainer in trainers])


async def run(trainer: Trainer, program: Sequence[str]) -> None:
    await trainer.create()
    await follow(trainer, program)


class Fate:
    """Starts a service again whenever it died by itself."""

    def __init__(self) -> None:
        self.deaths = 0
        self.slowest = 0.0

    async def watch(self, service: Served, proxy: Proxy) -> None:
        while True:
            await asyncio.sleep(0.02)
            await self.act(service)
            if not service.alive:
                self.deaths += 1
                start = time.monotonic()
                await asyncio.to_thread(service.start)
                self.slowest = max(self.slowest, time.monotonic() - start)
                proxy.upstream = service.url

    async def act(self, service: Served) -> None:
        """Do nothing but wait."""


class Killer(Fate):
    """Kills the engine, or the whole service, a number of times at random."""

    def __init__(self, seed: int, kills: int) -> None:
        super().__init__()
        self.draw, self.left = random.Random(seed), kills

    async def act(self, service: Served) -> None:
        await asyncio.sleep(self.draw.uniform(0.05, 0.6))
        if self.left:
            self.left -= 1
            await asyncio.to_thread(service.kill if self.draw.random() < 0.5 else service.kill_engine)


def test_failpoints_have_names_of_their_own() -> None:
    found = [
        name
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "failpoints.py"
        for name in re.findall(REACH, path.read_text("utf-8"))
    ]
    assert sorted(found) == failpoints(), "a name is there twice"
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+", name) for name in found)
    source = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py") if path.name != "failpoints.py")
    assert len(re.findall(r"\breach\(", source)) == len(found), "a name is not a literal: nothing would cover it"


def test_every_commit_and_rename_has_a_failpoint() -> None:
    bare = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lacks_failpoint(ast.unparse(node)):
                bare.add(f"{path.relative_to(SOURCE)}:{node.name}")
    assert bare == set(WITHOUT)


def lacks_failpoint(function: str) -> bool:
    """Return whether a function commits or renames, and says nowhere that it is about to."""
    acts = re.search(r"\.rename\(|os\.replace\(|\.hardlink_to\(|'COMMIT'|work\.replace\(", function)
    return bool(acts) and "reach('" not in function


@pytest.mark.parametrize(
    ("name", "visit"), [(name, visit) for name in failpoints() for visit in VISITS.get(name, (1,))]
)
def test_a_death_at_any_failpoint_loses_nothing(tmp_path: Path, name: str, visit: int) -> None:
    die_at(tmp_path, name, visit)


def die_at(folder: Path, name: str, visit: int) -> None:
    """Let the service, or its engine, die at a failpoint, and demand that it did and that nothing was lost."""
    with served(folder, FAILPOINT=f"{name}:{visit}") as service:
        fate = Fate()
        first = started(service)
        engine = service.engine() if first else None
        asyncio.run(survive(service, [PROGRAM, PROGRAM[3:]], fate))
        died = not first or fate.deaths > 0 or service.engine() != engine
        assert died, f"nothing reached {name} a {visit}. time: extend the program"
        assert fate.slowest <= READY_SECONDS
        assert service.stop() == 0


def started(service: Served) -> bool:
    """Wait until the service is ready; if the failpoint killed it before, start it anew and return False."""
    try:
        service.wait_ready(20)
    except AssertionError:
        assert not service.alive, service.log()
        service.start()
        return False
    return True


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", failpoints())
def test_a_death_at_later_visits_loses_nothing(tmp_path: Path, name: str) -> None:
    for visit in range(2, 12):
        with served(tmp_path / str(visit), FAILPOINT=f"{name}:{visit}") as service:
            if not started(service):
                continue
            asyncio.run(survive(service, [PROGRAM, PROGRAM[3:]], Fate()))


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        service.wait_ready()
        fate = Killer(0, 4)
        asyncio.run(survive(service, [PROGRAM * 2, PROGRAM, PROGRAM[5:]], fate))
        assert fate.slowest <= READY_SECONDS


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_random_kills_lose_nothing(tmp_path: Path) -> None:
    for seed in range(20):
        with served(tmp_path / str(seed)) as service:
            service.wait_ready()
            asyncio.run(survive(service, [PROGRAM * 4, PROGRAM * 3, PROGRAM * 2], Killer(100 + seed, 5)))


def test_sigterm_under_load_loses_nothing(tmp_path: Path) -> None:
    drain(tmp_path, 2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_fifty_drains_lose_nothing(tmp_path: Path) -> None:
    drain(tmp_path, 50)


def drain(folder: Path, times: int) -> None:
    class Terminator(Fate):
        left = times

        async def act(self, service: Served) -> None:
            await asyncio.sleep(0.3)
            if self.left:
                self.left -= 1
                assert await asyncio.to_thread(service.stop) == 0

    with served(folder) as service:
        service.wait_ready()
        fate = Terminator()
        rounds = 0
        while fate.left and rounds < 4 * times:
            rounds += 1
            asyncio.run(survive(service, [PROGRAM * 2, PROGRAM], fate))
        assert fate.left == 0
