"""Runs the simulation of a seed: clients work, things go wrong, calm returns, and everything is compared."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from service_simulation.acts import ACTS, look_at_status
from service_simulation.checks import check_books, check_counts, check_directory, check_idle
from service_simulation.clients import Client, Trainer, follow
from service_simulation.native_clients import NativeSession
from service_simulation.parts.driving import drive_parts
from service_simulation.reference import Violation, demand
from service_simulation.virtual import run_as
from service_simulation.world import World, world_of


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation was.

    Attributes:
        seed: of it.
        fingerprint: hash of its trace.
        operations: that were accepted.
        requests: that reached the service.
        starts: of the service.
        deaths: of engines.
        seconds: of simulated time.
    """

    seed: int
    fingerprint: str
    operations: int
    requests: int
    starts: int
    deaths: int
    seconds: float


def simulate(seed: int, trace: Callable[[str], None] | None = None, size: int = 1) -> Report:
    """Run the simulation of a seed.

    Args:
        seed: of everything random.
        trace: called with each line of what happens.
        size: multiplies the number of operations.

    Raises:
        Violation: the service broke a promise.
    """
    drive_parts(seed)
    with world_of(seed, trace) as world:
        try:
            world.loop.run_until_complete(_Simulation(world, size).run())
        except BaseExceptionGroup as group:
            raise _first_of(group) from group
        demand(not world.problems, f"seed {seed}: {world.problems[:3]}")
        histories = [each.history for each in (*world.trainers, *world.natives)]
        operations = sum(len(history.events) + len(history.chats) for history in histories) + world.samples
        return Report(
            seed, world.fingerprint(), operations, world.requests, world.starts, world.deaths, world.clock.now - 1000.0
        )


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Simulation:
    def __init__(self, world: World, size: int) -> None:
        self._world, self._size = world, size
        self._draw = random.Random(f"clients {world.seed}")
        self._clients: list[Client] = []
        self._beating: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Let it all happen."""
        world = self._world
        world.look = check_books
        alive = asyncio.create_task(world.keep_alive())
        disturbing = asyncio.create_task(world.disturb())
        working = asyncio.create_task(self._work())
        try:
            await self._first(working, alive, disturbing)
            world.note("calm")
            world.calm()
            disturbing.cancel()
            await self._first(asyncio.create_task(self._settle()), alive)
            self._check()
            await self._first(asyncio.create_task(self._act()), alive)
            await self._first(asyncio.create_task(self._again()), alive)
            for beating in self._beating:
                if beating.done():
                    beating.result()
            alive.cancel()
            await world.stop()
            check_directory(world, self._clients)
        finally:
            for task in (alive, disturbing, working, *self._beating):
                task.cancel()

    async def _first(self, wanted: "asyncio.Task[None]", *others: "asyncio.Task[None]") -> None:
        """Wait for a task; the others must not end before it."""
        done, _ = await asyncio.wait({wanted, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in (wanted, *others):
            if task in done:
                await task

    async def _work(self) -> None:
        draw, world = self._draw, self._world
        tenants = ["ada", "bob", "eve"][: draw.choice([1, 2, 3])]
        async with asyncio.TaskGroup() as tasks:
            for tenant in tenants:
                for number in range(draw.choice([1, 1, 2])):
                    name = f"{tenant}-{number}"
                    client = Client(world, tenant, name, random.Random(f"{name} {world.seed}"))
                    self._clients.append(client)
                    tasks.create_task(self._session(client))
            for number in range(draw.choice([0, 1, 2])):
                tenant = f"native-{number}"
                session = NativeSession(world, tenant, random.Random(f"{tenant} {world.seed}"))
                tasks.create_task(self._native(session))

    async def _session(self, client: Client) -> None:
        await client.open()
        self._beating.append(asyncio.create_task(client.beat()))
        async with asyncio.TaskGroup() as tasks:
            for number in range(client.draw.choice([1, 1, 2, 3])):
                tasks.create_task(self._model(Trainer(client, number)))
        await client.check_again()

    async def _model(self, trainer: Trainer) -> None:
        self._world.trainers.append(trainer)
        if await trainer.create():
            await follow(trainer, self._size * trainer.draw.choice([5, 20, 40]))

    async def _native(self, session: NativeSession) -> None:
        if await session.open():
            self._beating.append(asyncio.create_task(session.beat()))
            await session.follow(self._size * session.draw.choice([5, 20, 40]))

    async def _settle(self) -> None:
        """Read every model once more."""
        for session in self._world.natives:
            if session.history.events[0].ending == "done" and not self._world.aged:
                await session.read()
            if not session.finished:
                await session.finish()
        for client in self._clients:
            for trainer in client.models:
                if not trainer.gone:
                    await trainer.read()
            await client.check_again()

    async def _act(self) -> None:
        """Do some of the things that need calm."""
        chosen = self._draw.sample(range(len(ACTS)), self._draw.choice([1, 2, 3]))
        for place in sorted(chosen):
            self._world.note(f"act {ACTS[place].__name__}")
            await ACTS[place](self._world, self._clients, self._draw)

    def _check(self) -> None:
        for each in (*self._world.trainers, *self._world.natives):
            each.history.check(self._world.excuses)

    async def _again(self) -> None:
        """End the service, start it anew from the disk alone, and read every model once more."""
        world = self._world
        await check_idle(world)
        await look_at_status(world, self._clients, self._draw)
        await asyncio.sleep(40.0)
        await check_idle(world)
        await check_counts(world)
        await world.stop()
        await self._settle()
        self._check()
        await check_idle(world)


__all__ = ("Report", "Violation", "run_as", "simulate")
