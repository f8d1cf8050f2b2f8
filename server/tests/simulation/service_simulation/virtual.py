"""Virtual time, threads without threads, processes that can be killed, and random ids that follow from the seed."""

import asyncio
import contextlib
import heapq
import itertools
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

START = 2_000_000_000.0
"""Wall-clock time at which a simulation begins; later than the real time of any file that it writes."""
_PACKAGES = ("twinkle_server", "twinkle_client", "ledger_engine")
_RESOLUTION = 1e-7
"""Seconds within which timers count as due at the same time."""


class Killed(BaseException):
    """The process that runs this code was killed at this point."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set, but the simulation has not ended."""


class Still(random.Random):
    """Random numbers of which delays are made: none."""

    def random(self) -> float:
        """Return 0."""
        return 0.0


class Process:
    """A process of the simulation: the tasks and timers that end when it is killed.

    Args:
        name: shown in the trace.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def end(self) -> None:
        """Cancel its tasks; its timers are not called any more."""
        self.alive = False
        for task in list(self.tasks):
            task.cancel()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process whose code runs; None is a client, or the simulation itself."""


class Clock:
    """Time that passes only when the loop has nothing else to do. The wall clock may be set; the other one may not."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.offset = START - self.now
        self._ticks = 0

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        return self.now

    def wall(self) -> float:
        """See `time.time`."""
        return self.now + self.offset

    def perf_counter(self) -> float:
        """See `time.perf_counter`; each call takes a millisecond, so that work takes time."""
        self._ticks += 1
        return self.now + self._ticks / 1000

    def module(self) -> SimpleNamespace:
        """Return what stands for the module `time`."""
        return SimpleNamespace(
            time=self.wall,
            time_ns=lambda: int(self.wall() * 1e9),
            monotonic=self.monotonic,
            perf_counter=self.perf_counter,
            sleep=lambda seconds: None,
            gmtime=time.gmtime,
            strftime=time.strftime,
        )


def seeded_secrets(draw: random.Random) -> SimpleNamespace:
    """Return what stands for the module `secrets`."""
    return SimpleNamespace(
        token_hex=lambda size=32: draw.randbytes(size).hex(),
        token_bytes=lambda size=32: draw.randbytes(size),
        token_urlsafe=lambda size=32: draw.randbytes(size).hex(),
        randbits=draw.getrandbits,
        compare_digest=secrets.compare_digest,
    )


@contextlib.contextmanager
def replaced_modules(clock: Clock, draw: random.Random) -> Iterator[None]:
    """Give the modules of service and client the simulated clock and random numbers."""
    uuids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=draw.randbytes(16).hex()))
    stand_ins: dict[Any, Any] = {time: clock.module(), secrets: seeded_secrets(draw), uuid: uuids}
    replaced: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES:
            continue
        for attribute in ("time", "secrets", "uuid"):
            original = vars(module).get(attribute)
            if original is time or original is secrets or original is uuid:
                replaced.append((module, attribute, original))
                setattr(module, attribute, stand_ins[original])
    try:
        yield
    finally:
        for module, attribute, original in replaced:
            setattr(module, attribute, original)


class _Handle:
    """A callback of the loop; a timer if it has a time."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_process", "_when")

    def __init__(self, callback: Any, args: Any, context: Any, process: Process | None, when: float) -> None:
        self._callback, self._args = callback, args
        self._context = copy_context() if context is None else context  # an empty context is false
        self._process, self._when, self._cancelled = process, when, False

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        self._cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        """See `asyncio.Handle`."""
        return self._cancelled

    def when(self) -> float:
        """See `asyncio.TimerHandle`."""
        return self._when


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on a virtual clock, without files, sockets or threads.

    What would run on a thread runs in the loop, after a random delay, so that it interleaves with other tasks. Timers
    that are due at the same time are called in the order in which they were set.

    Args:
        clock: advanced to the next timer when nothing is ready.
        draw: gives the delays.
    """

    def __init__(self, clock: Clock, draw: random.Random) -> None:
        super().__init__()
        self.clock, self._draw = clock, draw
        self._timers: list[tuple[float, int, _Handle]] = []
        self._count = itertools.count()
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """See `Clock.monotonic`."""
        return self.clock.now

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no files."""

    def _write_to_self(self) -> None:
        """Do nothing: there are no other threads."""

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """See `asyncio.AbstractEventLoop`; the checks of the base class are left out, because they take long."""
        handle = _Handle(callback, args, context, None, 0.0)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        """Set a timer; see `call_at`."""
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        """Set a timer, which is not called if the process that set it has been killed."""
        process = PROCESS.get() if context is None else context.get(PROCESS)
        handle = _Handle(callback, args, context, process, when)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, let time pass until the next timer."""
        ready, timers, clock = self._ready, self._timers, self.clock  # type: ignore[attr-defined]
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Deadlock("nothing is ready, and no timer is set")
            clock.now = max(clock.now, timers[0][0])
        limit = clock.now + _RESOLUTION
        while timers and timers[0][0] < limit:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled or (handle._process is not None and not handle._process.alive):
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"callback {handle._callback}", "exception": error})

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run a function as if on a thread; `executor` is not used."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                value = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self.call_later(self._draw.random() * 0.002, run)
        return future


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
        if not process.alive:
            task.cancel()
    return task


async def run_as(process: Process, coroutine: Any) -> Any:
    """Run a coroutine as code of a process, and return its result."""
    token = PROCESS.set(process)
    try:
        task = asyncio.create_task(coroutine)
    finally:
        PROCESS.reset(token)
    return await task
