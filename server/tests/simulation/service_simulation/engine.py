"""The engine's process: the real host, scheduler, queues and snapshots over an engine that counts, in the same loop."""

import asyncio
import concurrent.futures
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ledger_engine import Faults, LedgerEngine
from service_simulation.virtual import Killed, Process

from twinkle.engine import AdapterRef
from twinkle.errors import CapacityError, EngineFault
from twinkle_server.engine import messages
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.host import Host
from twinkle_server.engine.losses.catalog import Losses
from twinkle_server.engine.messages import SIZES, LinkClosed, Message
from twinkle_server.settings import Settings

DIE, HANG, FATAL, ERROR, BREAK = range(101, 106)
"""First tokens of rows that do this to the engine; `ERROR` fails the row's operation alone, `BREAK` the whole pass."""
_BEAT = 4.0
_APART = 1e-6
"""Seconds between two messages: timers that are due at the same time are called in any order."""
_losses: list[Losses] = []


class Hung(BaseException):
    """The engine never comes back from this call."""


class SimulatedLedger(LedgerEngine):
    """A ledger that lacks memory at times when an adapter is restored, too."""

    def __init__(self, draw: random.Random, settings: Settings, scarce: int) -> None:
        super().__init__("ledger", settings.pass_tokens)
        self.faults = SimulatedFaults(memory_every=scarce, error=(ERROR,))
        self._draw, self._scarce = draw, scarce

    def restore(self, adapter: AdapterRef, folder: Path) -> None:
        """See `Engine`."""
        if self._scarce and self._draw.random() < 0.2:
            raise CapacityError("there is no memory for an adapter") from MemoryError()
        super().restore(adapter, folder)


class SimulatedFaults(Faults):
    """Faults that end a simulated process instead of this one."""

    def strike(self, token: int) -> None:
        """Do what a row of this first token does."""
        if token == DIE:
            raise Killed("a row killed the engine")
        if token == HANG:
            raise Hung("a row never ends")
        if token == FATAL:
            raise EngineFault("a row is fatal")
        if token == BREAK:
            raise RuntimeError("a row breaks its pass")


class Later(concurrent.futures.Executor):
    """Runs functions one at a time, each a moment after it was submitted, or after the one before."""

    def __init__(self, engine: "SimulatedEngine") -> None:
        self._engine = engine
        self._free = 0.0

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> concurrent.futures.Future[Any]:
        """Run a function soon."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                value = work(*args, **options)
            except Exception as error:
                future.set_exception(error)
            except Killed:
                self._engine.die("killed while it wrote a file")
                return
            else:
                future.set_result(value)
            self._engine.wake.set()

        loop = asyncio.get_running_loop()
        self._free = max(self._free, loop.time()) + self._engine.draw.random() * 0.02
        loop.call_at(self._free, run)
        return future


class _Link:
    """What the host sends through."""

    def __init__(self, engine: "SimulatedEngine") -> None:
        self.send = engine.send

    def __iter__(self) -> Iterator[Message]:
        return iter(())


class SimulatedEngine:
    """A `Child` of the service: messages arrive in order, after a moment; everything is lost when it dies.

    Args:
        settings: of the service.
        draw: gives the times that turns and messages take.
        slow: seconds that a turn takes at most.
        scarce: every so many calls the engine has no memory; 0 is never.
        died: called once, with the reason.
    """

    def __init__(
        self, settings: Settings, draw: random.Random, slow: float, scarce: int, died: Callable[[str], None]
    ) -> None:
        self.process = Process("engine")
        self.draw, self._slow, self._died = draw, slow, died
        self.last_words = ""
        self.sent: Counter[str] = Counter()
        self.under_way: set[int] = set()
        self.replayed: set[int] = set()
        self.sizes = 0
        self.failed = False
        self.suspects: Callable[[int, bool], None] = lambda number, alone: None
        self.cleared: Callable[[int], None] = lambda number: None
        self.wake = asyncio.Event()
        self._outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._arrival = self._departure = 0.0
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._settings, self._scarce = settings, scarce
        self._service = contextvars.copy_context()

    def start(self) -> None:
        """Begin; called as code of its process."""
        if not _losses:
            _losses.append(Losses())
        engine = SimulatedLedger(self.draw, self._settings, self._scarce)
        executor = Executor(engine, self._settings.served_name, _losses[0])
        self.host = Host(executor, _Link(self), self._settings, lambda number, name: Later(self))
        self.send(Message(messages.READY, {"info": asdict(executor.describe())}))
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._beat())]

    # As the service sees it

    def put(self, message: Message) -> None:
        """See `supervision.Child`."""
        if not self.process.alive:
            raise LinkClosed("the engine closed the socket")
        self._arrival = self._soon(self._arrival)
        asyncio.get_running_loop().call_at(self._arrival, self._arrive, _copied(message))

    async def room(self) -> None:
        """See `supervision.Child`."""
        if not self.process.alive:
            raise LinkClosed("the engine closed the socket")
        await asyncio.sleep(0)

    async def receive(self) -> Message:
        """See `supervision.Child`."""
        message = await self._outbox.get()
        if message is None:
            raise LinkClosed("the engine closed the socket")
        return message

    def kill(self) -> None:
        """See `supervision.Child`."""
        self.die("killed by the service")

    async def wait(self) -> str:
        """See `supervision.Child`."""
        return await self._over

    # As it runs

    def send(self, message: Message) -> None:
        """Send a message to the service; one that was sent arrives although the engine dies."""
        if self.process.alive:
            self._count(message)
            self._departure = self._soon(self._departure)
            self._deliver(_copied(message))

    def _count(self, message: Message) -> None:
        """Note what the service must know."""
        self.sent[message.type] += 1
        if message.type == messages.BEGIN:
            self.under_way = set(message.head["ids"])
        elif message.type == messages.DONE:
            self.under_way.discard(message.head["id"])
            if message.head["id"] in self.replayed and message.head.get("error") is None:
                self.cleared(message.head["id"])
            self.failed = self.failed or message.head.get("error") is not None
        elif message.type == messages.SNAPSHOTTED:
            self.sizes += message.head["size"]

    def _deliver(self, message: Message | None) -> None:
        """Let the service have a message; only the end of the service's process prevents that."""
        loop = asyncio.get_running_loop()
        loop.call_at(self._departure, self._outbox.put_nowait, message, context=self._service.copy())

    def die(self, why: str) -> None:
        """End the process at this moment."""
        if not self.process.alive:
            return
        self.process.end()
        self._died(why)
        if not self._over.done():
            self._over.set_result(why)
        self._departure = self._soon(self._departure)
        self._deliver(None)

    def _arrive(self, message: Message) -> None:
        if self.process.alive:
            if message.type == messages.RUN:
                if message.head["replay"]:
                    self.replayed.add(message.head["id"])
                self.suspects(message.head["id"], message.head["alone"])
            self.host.receive(message)
            self.wake.set()

    def _soon(self, after: float) -> float:
        return max(after, asyncio.get_running_loop().time()) + self.draw.random() ** 4 * 0.01 + _APART

    async def _run(self) -> None:
        try:
            while True:
                pause = self.host.pause()
                if pause != 0.0:
                    try:
                        async with asyncio.timeout(pause):
                            await self.wake.wait()
                    except TimeoutError:
                        pass
                self.wake.clear()
                await asyncio.sleep(self.draw.random() ** 3 * self._slow)
                if self.host.pause() == 0.0:
                    self.host.turn()
        except Killed as error:
            self.die(str(error))
        except EngineFault as error:
            self.die(str(error))
        except Hung:
            await asyncio.Event().wait()

    async def _beat(self) -> None:
        while True:
            self.send(Message(messages.ALIVE))
            await asyncio.sleep(_BEAT)


def _copied(message: Message) -> Message:
    """Return a message as the other end reads it from the socket."""
    frame = message.pack()
    head, body = SIZES.unpack(frame[: SIZES.size])
    return Message.unpack(frame[SIZES.size :][:head], frame[SIZES.size + head :][:body])
