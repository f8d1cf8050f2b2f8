"""One simulation: the service's lives one after another, the network before it, and what goes wrong with both."""

import asyncio
import gc
import hashlib
import itertools
import logging
import random
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import structlog
from service_simulation.disk import Disk, SimulatedDatabase, Torn, Unwritable, crash, remove, shared_engine, use_disk
from service_simulation.engine import SimulatedEngine
from service_simulation.service import Answer, Call, Counted, Life
from service_simulation.virtual import PROCESS, Clock, Killed, VirtualLoop, replaced_modules, run_as

from twinkle_server import failpoints
from twinkle_server.errors import Busy
from twinkle_server.operations import Outcome
from twinkle_server.runtime import core
from twinkle_server.runtime.supervision import EngineFailed
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.store import database, open_store
from twinkle_server.store.inspection import DATABASE

MEMORY = Path("/dev/shm")
"""Where data folders are, if the system has it: a simulated disk needs no real one."""
TIMES = Times(
    poll=20.0, gap_pause=3.0, gap_fail=60.0, gap_limit=300.0, session=300.0, deadline=60.0, drain=20.0, start=600.0,
    upkeep=120.0, trash=1e5, kept_result=1e7, read_result=1e7, kept_record=1e7, kept_audit=1e8, kept_run=1e7,
)  # fmt: skip
_templates: list[bytes] = []


@dataclass(slots=True)
class Faults:
    """How often what goes wrong; probabilities, drawn from the seed.

    Attributes:
        lose: a request or an answer is lost, each.
        repeat: a request arrives twice.
        late: a message takes seconds and not milliseconds.
        kill_service: at each place that `failpoints` names.
        kill_engine: likewise.
        tear: a kill of the service at a commit is a power failure.
        full: the disk takes nothing, at each place likewise.
        read: a read of the database fails.
        seconds: between kills at any moment; 0 is never.
        jump: the wall clock is set, or everything stands still, at each such moment.
        scarce: every so many calls the engine has no memory; 0 is never.
        slow: seconds that a turn of the engine takes at most.
        refuse: the result of a forward pass or a sampling request is nothing that the log can hold.
        window: bytes that may be on their way to the engine.
        most: kills of the service, and as many of engines; a service that is killed for ever gets nothing done.
    """

    lose: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    kill_service: float = 0.0
    kill_engine: float = 0.0
    tear: float = 0.0
    full: float = 0.0
    read: float = 0.0
    seconds: float = 0.0
    jump: float = 0.0
    scarce: int = 0
    slow: float = 0.01
    refuse: float = 0.0
    window: int = 2**26
    most: int = 0

    @classmethod
    def drawn(cls, draw: random.Random) -> "Faults":
        """Return faults of a kind that the seed chooses: some simulations have none, some have all."""
        some = draw.choice([0.0, 0.5, 1.0, 1.0])

        def chance(*values: float) -> float:
            return some * draw.choice(values)

        return cls(
            lose=chance(0.0, 0.02, 0.1), repeat=chance(0.0, 0.05, 0.2), late=chance(0.0, 0.02),
            kill_service=chance(0.0, 0.004, 0.02), kill_engine=chance(0.0, 0.004, 0.02), tear=draw.choice([0.3, 1.0]),
            full=chance(0.0, 0.0, 0.02), read=chance(0.0, 0.0, 0.03),
            seconds=draw.choice([0.0, 2.0, 10.0]) if some else 0.0, jump=chance(0.0, 0.5),
            scarce=draw.choice([0, 0, 7]) if some else 0, slow=draw.choice([0.002, 0.05, 0.5]),
            refuse=chance(0.0, 0.0, 0.05), window=draw.choice([1500, 6000, 2**26]), most=draw.choice([1, 3, 8]),
        )  # fmt: skip


def forget_template() -> None:
    """Make the database of the next simulation anew."""
    _templates.clear()


class Lost(ConnectionError):
    """A request that got no answer."""


class World:
    """Everything that a simulation has.

    Args:
        seed: of all random numbers.
        root: an empty folder for data folders.
        trace: called with each line of the trace, beside the hash.

    Attributes:
        faults: what goes wrong at the moment; none of it while the world ends.
        planned: what went wrong before.
        trainers: models of all clients of the Tinker protocol.
        natives: sessions of native clients.
        deaths: of engines, however they came.
        kills: of the service.
        stops: of the service while clients worked.
        requests: that reached the service.
        samples: sampling operations that clients asked for.
        look: called at some requests, to check what must hold at any moment.
        problems: what must not be.
        suspects: operations that were under way when an engine died, and the life of the service.
        blamed: how often, where they were not repeated.
        counted: what each life counted.
        aged: results were thrown away because they were too old.
        all_gone: nothing of any model is kept.
        expects_loss: the lease was taken away.
    """

    def __init__(self, seed: int, root: Path, trace: Callable[[str], None] | None = None) -> None:
        self.seed, self.root = seed, root
        draw = random.Random(f"world {seed}")
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock, random.Random(f"threads {seed}"))
        self.ids = random.Random(f"ids {seed}")
        self.disk = Disk(random.Random(f"disk {seed}"))
        self.disk.refuses, self.disk.unreadable = self.refuses, self.unreadable
        self.network = random.Random(f"network {seed}")
        self.chance = random.Random(f"faults {seed}")
        self.engines = random.Random(f"engine {seed}")
        self.faults = Faults.drawn(draw)
        self.settings = Settings(
            "ledger", root, name="ledger/model",
            snapshot_steps=draw.choice([1, 2, 20]), pass_tokens=draw.choice([16, 512]),
            times=replace(TIMES, snapshot=draw.choice([0.5, 5.0, 1e4])),
            limits=Limits(small_bytes=draw.choice([300, 1200, 10**6]), queued=draw.choice([4, 4096])),
        )  # fmt: skip
        self.planned = self.faults
        self.trainers: list[Any] = []
        self.natives: list[Any] = []
        self._tokens = itertools.count(1000)
        self.life: Life | None = None
        self.engine: SimulatedEngine | None = None
        self.look: Callable[[Life], None] = lambda life: None
        self.deaths = self.kills = self.stops = self.requests = self.starts = self.samples = 0
        self.problems: list[str] = []
        self.suspects: dict[int, Life] = {}
        self.blamed: Counter[int] = Counter()
        self.counted: list[Counted] = []
        self.aged = self.all_gone = self.expects_loss = False
        self._torn: Torn | None = None
        self._up = asyncio.Event()
        self._hash = hashlib.sha256()
        self._trace = trace
        self._data = root / "data-0"
        self._data.mkdir(mode=0o700)
        self._prepare()

    def _prepare(self) -> None:
        """Put an empty database in place, which is made once for all simulations of this process."""
        if not _templates:
            with tempfile.TemporaryDirectory() as folder:
                open_store(Path(folder) / "data").close()
                _templates.append((Path(folder) / "data" / DATABASE).read_bytes())
        (self._data / DATABASE).write_bytes(_templates[0])

    # The trace

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        line = f"{self.clock.now:12.4f} {line}"
        self._hash.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def fingerprint(self) -> str:
        """Return the hash of the trace so far."""
        return self._hash.hexdigest()

    def problem(self, what: str) -> None:
        """Note what must not be."""
        self.note(f"PROBLEM {what}")
        self.problems.append(what)

    def next_token(self) -> int:
        """Return a token that no other row of this simulation begins with."""
        return next(self._tokens)

    @property
    def data(self) -> Path:
        """The data folder, as the last life left it."""
        return self._data

    def end(self) -> None:
        """Cancel whatever still runs."""
        for process in (self.life and self.life.process, self.engine and self.engine.process):
            if process:
                process.end()
        for _ in range(10):
            left = sorted(asyncio.all_tasks(self.loop), key=lambda task: task.get_name())
            if not left:
                break
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))

    # The service

    async def start(self) -> None:
        """Start a life of the service on the directory as it is, and wait until it answers."""
        self.starts += 1
        life = self.life = Life(replace(self.settings, data=self._data), self._start_engine)
        use_disk(self.disk)
        self.note(f"start {self.starts}")
        try:
            await run_as(life.process, life.start())
            if life.counted is not None:
                self.counted.append(life.counted)
        except (Killed, asyncio.CancelledError):
            if life.process.alive:
                raise
            return
        except Busy:
            if not (self.faults.full or self.faults.read):
                raise
            self.kill_service("the disk fails at the start")
            return
        self._up.set()

    async def stop(self) -> None:
        """End the life of the service as a signal does."""
        life = self.life
        assert life is not None
        self._up.clear()
        self.note("stop")
        try:
            await run_as(life.process, life.stop())
        except (Killed, asyncio.CancelledError):
            if life.process.alive:
                raise
            return
        except Busy:
            if not (self.planned.full or self.planned.read):
                raise
            self.kill_service("the disk fails at the end")
            return
        life.process.end()

    async def _start_engine(self, first: bool) -> SimulatedEngine:
        if not first and self.chance.random() < self.faults.kill_engine:
            if self.life is not None:
                self.life.refused += 1
            raise OSError(12, "Cannot allocate memory")
        faults, settings = self.faults, replace(self.settings, data=self._data)
        engine = SimulatedEngine(settings, self.engines, faults.slow, faults.scarce, self._died)
        self.engine = engine
        if self.life is not None:
            self.life.engines.append(engine)
        engine.suspects = self._suspect
        engine.cleared = lambda operation: self.suspects.pop(operation, None) and None
        await asyncio.sleep(self.engines.random())
        process = PROCESS.set(engine.process)
        try:
            engine.start()
        finally:
            PROCESS.reset(process)
        self.note("engine starts")
        return engine

    @property
    def excuses(self) -> tuple[str, ...]:
        """Parts of error texts that are excused by what happened."""
        found = ("twice while", "died twice") if self.deaths >= 2 else ()
        if self.planned.full or self.planned.scarce:
            found += ("The service's disk failed", "not enough memory", "not enough memory for this operation")
        if self.settings.limits.queued < 10:  # its request may be turned away for as long as numbers may be missing
            found += ("did not arrive within 30",)
        if self.planned.refuse:
            found += ("the result could not be written",)
        return found

    def _suspect(self, operation: int, alone: bool) -> None:
        """Check that what was under way when an engine died runs alone, and nothing else does."""
        if alone and operation not in self.suspects and operation not in self.blamed:
            self.problem(f"operation {operation} runs alone")
        if not alone and self.suspects.get(operation) is self.life:
            self.problem(f"operation {operation} killed an engine, and runs with others")

    def _died(self, why: str) -> None:
        self.deaths += 1
        life, engine = self.life, self.engine
        if life is not None and engine is not None and life.answering:
            life.hung += why == "killed by the service"
            for operation in engine.under_way & _unfinished(life):  # else it was cancelled
                self.suspects[operation] = life
                if operation not in engine.replayed:
                    self.blamed[operation] += 1
        self.note(f"engine dies: {why}")

    def kill_engine(self, why: str) -> None:
        """Kill the engine that runs, if one does."""
        if self.engine is not None:
            self.engine.die(why)

    def kill_service(self, why: str) -> None:
        """Kill the service and its engine at this moment; the next life finds what the disk has."""
        life = self.life
        if life is None or not life.process.alive:
            return
        self.kills += 1
        self.kill_engine("the service is gone")
        target = self.root / f"data-{self.kills}"
        torn = crash(self.disk, self._data, target, self._torn)
        self._torn = None
        self.note(f"service dies: {why} {torn}")
        self._up.clear()
        life.answering = False
        life.process.end()
        life.ended.set()
        if life.store is not None and life.store.lease is not None:
            life.store.lease.drop()  # as the kernel unlocks it
        old, self._data = self._data, target
        databases, self.disk.databases = self.disk.databases, []
        self.loop.call_soon(self._bury, databases, old)

    def _bury(self, databases: list[SimulatedDatabase], old: Path) -> None:
        for opened in databases:
            opened.abandon()
        remove(old)

    async def keep_alive(self) -> None:
        """Start the service whenever it is gone, for ever."""
        while True:
            await self.start()
            life = self.life
            assert life is not None
            await self._until_ready(life)
            await life.ended.wait()
            await asyncio.sleep(self.chance.random() * 3)

    async def _until_ready(self, life: Life) -> None:
        """Wait for the first engine; a service whose first engine died exits, as `serve` does."""
        if life.service is None or not life.process.alive:
            return
        try:
            await run_as(life.process, life.service.wait_ready())
        except EngineFailed as error:
            self.note(f"no engine: {error}")
            await self.stop()
        except (Killed, asyncio.CancelledError):
            if life.process.alive and life.answering:
                raise

    # What goes wrong

    def reach(self, place: str) -> None:
        """Decide what happens at a place that `failpoints` names."""
        process = PROCESS.get()
        if process is None:
            return
        if not process.alive:
            raise Killed("its process is gone")
        service = self.life is not None and process is self.life.process
        if not service and (self.engine is None or process is not self.engine.process):
            raise Killed("its process is gone")
        self._fail(place, service)

    def _fail(self, place: str, service: bool) -> None:
        chance, faults = self.chance, self.faults
        if self._torn is not None and place == "store.after_commit":
            self.kill_service("power failure in a commit")
            raise Killed(place)
        if self._may_kill(service) and chance.random() < (faults.kill_service if service else faults.kill_engine):
            if service and place == "store.before_commit" and chance.random() < faults.tear:
                self._torn = Torn(self._data)
                return
            if service:
                self.kill_service(place)
            else:
                self.kill_engine(place)
            raise Killed(place)
        if place in _WRITES and chance.random() < faults.full:
            self.note(f"disk full at {place}")
            raise OSError(28, "No space left on device")

    def refuses(self, outcome: Outcome) -> bool:
        """Return whether the log cannot hold the result of a pass or a sampling request; always the same ones."""
        if outcome.result is None or outcome.result.startswith(b"{"):
            return False
        return zlib.crc32(f"{self.seed} {outcome.operation}".encode()) / 2**32 < self.faults.refuse

    def unreadable(self) -> bool:
        """Return whether a read of the service fails now."""
        if not self.faults.read or PROCESS.get() is None or self.chance.random() >= self.faults.read:
            return False
        self.note("a read of the database fails")
        return True

    def lets_go(self, life: Life | None) -> bool:
        """Return whether a life of the service lets go of everybody who waits: it ends, or has ended."""
        here = life is self.life and life is not None and life.answering and life.service is not None
        return not here or life.service.runtime_status.draining or life.service.lost.is_set()

    def _answers(self) -> bool:
        return self.life is not None and self.life.answering

    def _may_kill(self, service: bool) -> bool:
        return (self.kills if service else self.deaths - self.kills) < self.faults.most

    async def disturb(self) -> None:
        """Kill processes and set clocks at any moment, for ever."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / (self.faults.seconds or 5.0)))
            if self.chance.random() < self.faults.jump:
                self._jump()
            elif self.chance.random() < 0.1 and self.stops < self.faults.most and self._answers():
                self.stops += 1
                await self.stop()
            elif self.faults.seconds and self._may_kill(service := self.chance.random() < 0.5):
                (self.kill_service if service else self.kill_engine)("at a random moment")

    def _jump(self) -> None:
        if self.chance.random() < 0.3:
            seconds = self.chance.choice([1.0, 20.0, 100.0])
            self.clock.now += seconds
            self.note(f"everything stood still for {seconds} s")
        else:
            seconds = self.chance.choice([-60.0, 60.0, 3600.0, 86400.0])
            self.clock.offset += seconds
            self.note(f"the wall clock is set by {seconds} s")

    def calm(self) -> None:
        """Let nothing go wrong any more."""
        self.faults = Faults(slow=0.001)
        self._torn = None

    # The network

    async def transmit(self, call: Call) -> Answer:
        """Send a request once.

        Raises:
            Lost: no answer came.
        """
        draw, faults = self.network, self.faults
        if draw.random() < faults.lose:
            await asyncio.sleep(2.0)
            raise Lost("the request was lost")
        await asyncio.sleep(self._latency())
        if draw.random() < faults.repeat:
            self.loop.call_later(self._latency() * 3, self._arrive_again, call)
        life = self.life
        if life is None or not life.answering:
            await self._up.wait()
            await asyncio.sleep(self._latency())
            raise Lost("nothing listens")
        answering, since = life.serve(call), self.clock.now
        self.requests += 1
        if self.requests % 6 == 0:
            self.look(life)
        await asyncio.wait([answering])  # the end of its process cancels it
        if answering.cancelled() or isinstance(answering.exception(), Killed):
            raise Lost("the connection broke")
        answer = replace(answering.result(), seconds=self.clock.now - since, life=life)
        self.note(f"{call.tenant} {call.path} {answer.status} {zlib.crc32(answer.body):08x}")
        if draw.random() < faults.lose:
            await asyncio.sleep(2.0)
            raise Lost("the answer was lost")
        await asyncio.sleep(self._latency())
        return answer

    def _arrive_again(self, call: Call) -> None:
        if self.life is not None and self.life.answering:
            self.requests += 1
            self.life.serve(call).add_done_callback(_retrieved)

    def _latency(self) -> float:
        late = self.network.random() < self.faults.late
        return self.network.random() * (4.0 if late else 0.005)


_WRITES = frozenset({"store.before_commit", "blob.before_rename", "files.before_write", "files.before_rename"})


def _unfinished(life: "Life") -> set[int]:
    """Return the operations that an engine has, or has been sent and that were taken back to run again."""
    if life.service is None:
        return set()
    dispatcher = life.service.dispatcher
    ready = {operation.id for queue in dispatcher.queues.values() for operation in queue.order.ready}
    return ready | dispatcher.in_flight.keys()


def _retrieved(task: "asyncio.Task[Answer]") -> None:
    if not task.cancelled():
        task.exception()


class _Errors(logging.Handler):
    """Notes lines of the log that say that something unexpected happened."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if not record.name.startswith("twinkle_server"):
            return
        message = (
            record.msg["event"] if isinstance(record.msg, dict) else record.getMessage()
        )  # its fields have the real time
        line = f"{record.levelname} {record.name}: {message}"
        error = record.exc_info[1] if record.exc_info else None
        self._world.note(f"log {line.splitlines()[0]}" + (f" [{error!r}]" if error else ""))
        if error is not None and not _is_expected(error) and not self._world.expects_loss:
            self._world.problem(f"{line.splitlines()[0]}: {error!r}")


def _drop(*_arguments: Any) -> Any:
    raise structlog.DropEvent


def _is_expected(error: BaseException | None) -> bool:
    from twinkle.errors import CapacityError, EngineFault

    while error is not None:
        if isinstance(error, OSError | Busy | Unwritable | CapacityError | EngineFault | MemoryError):
            return True
        if (isinstance(error, RuntimeError) and "the ledger was told" in str(error)) or "a row breaks" in str(error):
            return True
        error = error.__cause__
    return False


@contextmanager
def world_of(seed: int, trace: Callable[[str], None] | None = None) -> Iterator[World]:
    """Make the world of a seed, with the service's modules on its clock, and remove it."""
    folder = tempfile.mkdtemp(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None)
    world = World(seed, Path(folder), trace)
    handler, logger = _Errors(world), logging.getLogger("twinkle_server")
    before, level, propagate = failpoints.watch(world.reach), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    lines = structlog.get_config()["processors"]
    structlog.configure(processors=[_drop])
    world.loop.set_exception_handler(lambda loop, context: _unhandled(world, context))
    asyncio.set_event_loop(world.loop)
    collects = gc.isenabled()
    gc.disable()  # so that nothing is destroyed at another moment than in another run of the seed
    try:
        with (
            replaced_modules(world.clock, world.ids),
            mock.patch.object(database, "engine", shared_engine),
            mock.patch.object(core, "_WINDOW", world.faults.window),
        ):
            yield world
    finally:
        failpoints.watch(before)
        world.end()
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        structlog.configure(processors=lines)
        for opened in list(world.disk.databases):
            opened.abandon()
        world.loop.close()
        asyncio.set_event_loop(None)
        if collects:
            gc.enable()
        remove(Path(folder))


def _unhandled(world: World, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not isinstance(error, Killed):
        world.problem(f"{context.get('message')}: {error!r}")
