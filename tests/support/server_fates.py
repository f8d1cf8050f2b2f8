"""What befalls a service while clients work: it dies by itself, or is killed, and comes back; and what then holds."""

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from server_clients import Client, Trainer, Wait, follow
from server_history import History, none_foreign
from server_proxy import Proxy, proxied
from serving import Served, ledger

READY_SECONDS = 120.0
"""A service that is not ready so long after a death hangs; on an idle machine it is ready in 2 to 5 s."""
RESOLVED_SECONDS = 240.0
"""A future that is open so long after the last time that the service came back is lost."""
ENGINE_DIED = "the engine died, killed by SIGKILL"


@contextmanager
def counting_service(folder: Path, extra: dict[str, Any] | None = None, **environment: str) -> Iterator[Served]:
    """A service that counts and snapshots often, started and ended in any case."""
    times = {"poll": 1.0, "gap_pause": 5.0, "gap_fail": 120.0, "snapshot": 1.0}
    limits = {"small_bytes": 512}  # so that payloads and results of some operations go to files
    settings = {"times": times, "limits": limits, "snapshot_steps": 1, "extra": extra or {}}
    service = ledger(folder / "data", settings).start(wait=False, **environment)
    try:
        yield service
    finally:
        service.kill()


class Fate:
    """Starts a service again whenever it died by itself.

    Attributes:
        deaths: of the service.
        slowest: seconds from a start to readiness; `fastest` likewise.
        longest: seconds that a future was open since the service last came back.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self.slowest = self.longest = 0.0
        self.fastest = math.inf
        self._back: list[float] = []
        self._logs: list[str] = []

    async def watch(self, service: Served, proxy: Proxy) -> None:
        """Do to the service what there is to do, for ever."""
        while True:
            await asyncio.sleep(0.02)
            await self.act(service)
            if not service.alive:
                self.deaths += 1
                self._logs.append(service.log())
                start = time.monotonic()
                await asyncio.to_thread(service.start)
                self._back.append(time.monotonic())
                self.slowest = max(self.slowest, self._back[-1] - start)
                self.fastest = min(self.fastest, self._back[-1] - start)
                proxy.upstream = service.url

    async def act(self, service: Served) -> None:
        """Do nothing but wait."""

    def engine_died(self, service: Served) -> bool:
        """Return whether an engine was killed, in this life of the service or an earlier one."""
        return ENGINE_DIED in service.log() or any(ENGINE_DIED in log for log in self._logs)

    def check(self, waits: Sequence[Wait]) -> None:
        """Demand that the service came back, and futures ended, in the time that they have for it."""
        self.check_futures(waits)
        assert self.slowest <= READY_SECONDS, f"the service was ready after {self.slowest:.1f} s"

    def check_futures(self, waits: Sequence[Wait]) -> None:
        """Demand that futures ended in the time that they have for it."""
        for wait in waits:
            begin = max([wait.begin, *(back for back in self._back if back <= wait.end)])
            self.longest = max(self.longest, wait.end - begin)
        assert self.longest <= RESOLVED_SECONDS, f"a future was over {self.longest:.1f} s after the restart"


class Killer(Fate):
    """Kills the engine and the whole service, in turn at random, a number of times.

    Args:
        seed: of the draw.
        kills: in all; as many of each, or one more of the service.
        pause: most seconds from one to the next.
    """

    def __init__(self, seed: int, kills: int, pause: float = 0.6) -> None:
        super().__init__()
        self._draw, self._pause = random.Random(seed), pause
        self._due: float | None = None  # of the next one, which comes in the next round if this one ends before
        self.left = [["service", "engine"][at % 2] for at in range(kills)]
        self._draw.shuffle(self.left)

    async def act(self, service: Served) -> None:
        """Kill what is next, if there is any that runs."""
        self._due = self._due or time.monotonic() + self._draw.uniform(0.05, self._pause)
        await asyncio.sleep(self._due - time.monotonic())
        self._due = None
        if self.left and service.alive and await asyncio.to_thread(self._kill, service):
            self.left.pop()

    def _kill(self, service: Served) -> bool:
        if self.left[-1] == "engine":
            return service.kill_engine()
        service.kill()
        return True


async def survive(
    service: Served, programs: Sequence[Sequence[str]], fate: Fate, proxy: Proxy | None = None, ahead: int = 4
) -> list[History]:
    """Let clients work while fate does to the service what it does; then check and return every history."""
    proxy = proxy or Proxy("")
    proxy.upstream = service.url
    async with proxied(proxy), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(proxy.url)) for _ in programs]
        watching = asyncio.create_task(fate.watch(service, proxy))
        try:
            trainers = [
                Trainer(client, await client.session(), 0, 1000 * (at + 1)) for at, client in enumerate(clients)
            ]
            async with asyncio.TaskGroup() as tasks:
                for trainer, program in zip(trainers, programs, strict=True):
                    tasks.create_task(_live(trainer, program, ahead))
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
    histories = [trainer.history for trainer in trainers]
    for history in histories:
        history.check()
    none_foreign(histories)
    fate.check([wait for client in clients for wait in client.waits])
    return histories


async def _live(trainer: Trainer, program: Sequence[str], ahead: int) -> None:
    await trainer.create()
    await follow(trainer, program, ahead)


def survive_all(
    service: Served, programs: Sequence[Sequence[str]], fate: Killer, rounds: int = 8, proxy: Proxy | None = None
) -> int:
    """Let clients work, again and again, until all kills were done; return how many operations changed something."""
    done = 0
    for _ in range(rounds):
        histories = asyncio.run(survive(service, programs, fate, proxy))
        done += sum(history.changes for history in histories)
        if not fate.left:
            return done
    raise AssertionError(f"{len(fate.left)} kills were not done in {rounds} rounds")
