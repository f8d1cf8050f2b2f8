"""The engine's process: started, watched, ended when it hangs, and started anew when it dies."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from twinkle_server.engine import messages
from twinkle_server.engine.messages import AsyncLink, LinkClosed, Message
from twinkle_server.environment import scrubbed
from twinkle_server.operations import ModelInfo
from twinkle_server.settings import Settings, Times

_engine_log = logging.getLogger("twinkle_server.engine")
_LAST_WORDS = 20
_LINE = 4096
_FAREWELL = 2.0


class Child(Protocol):
    """A running engine."""

    def put(self, message: Message) -> None:
        """Send without waiting for room."""

    async def room(self) -> None:
        """Wait until there is room."""

    async def receive(self) -> Message:
        """Return the next message; raises `LinkClosed` when the engine is gone."""

    def kill(self) -> None:
        """End it at once."""

    async def wait(self) -> str:
        """Wait until it is gone, and return how it ended, for the log."""

    @property
    def last_words(self) -> str:
        """The last lines that it wrote."""


def is_stopped(pid: int | None) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP, say); False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class ChildProcess:
    """An engine in a process of its own, which ends when this one does."""

    def __init__(self, process: asyncio.subprocess.Process, link: AsyncLink) -> None:
        self._process = process
        self._link = link
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._listening = asyncio.create_task(self._listen())
        self.put = link.put
        self.room = link.room
        self.receive = link.receive

    @classmethod
    async def start(cls, settings: Settings, *, first: bool = True) -> "ChildProcess":
        """Start the engine.

        Args:
            settings: of the service.
            first: False for one that takes another's place; a failpoint that a test set is not for it, or no engine
                would ever get past that place.
        """
        environment = scrubbed(os.environ)
        if not first:
            environment.pop("FAILPOINT", None)
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "twinkle_server.engine", str(theirs.fileno()), settings.dump()),
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            return cls(process, await AsyncLink.open(ours))
        except BaseException:
            ours.close()
            process.kill()
            raise

    @property
    def pid(self) -> int:
        """Number of its process."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self._last_words)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # the library's own would reap it, and lose how it ended

    async def wait(self) -> str:
        """Wait until it is gone, and return how it ended, for the log."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listening, _FAREWELL)
        self._link.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    async def _listen(self) -> None:
        stream, rest = self._process.stdout, ""
        while stream is not None and (data := await stream.read(_LINE)):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            if len(rest) > _LINE:
                lines, rest = [*lines, rest], ""
            for line in lines:
                self._last_words.append(line)
                _engine_log.warning("%s", line)
        if rest:
            self._last_words.append(rest)
            _engine_log.warning("%s", rest)


_log = logging.getLogger(__name__)
PAUSES = (0.0, 0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before an engine is started again, by how many in a row died before they had done anything."""
_STEADY = 60.0  # seconds after which an engine's death is not counted with the ones before
DIED = "the engine died"
StartChild = Callable[[bool], Awaitable[Child]]


class EngineFailed(Exception):
    """The engine ended before it was ready for the first time; its last words are in the log."""


class Listener(Protocol):
    """Who is told what happens to the engine."""

    @property
    def waiting(self) -> int:
        """Number of things that the engine was asked for and did not answer."""

    def engine_up(self, child: Child, info: ModelInfo) -> None:
        """It is ready."""

    async def engine_down(self, blamed: set[int], why: str) -> None:
        """It is gone; `blamed` was under way."""

    def message(self, message: Message) -> None:
        """It said something about operations or models."""


class Supervisor:
    """Keeps one engine running.

    Args:
        start_child: starts an engine; False says that it takes another's place.
        listener: see there.
        times: `start`, `deadline`, `drain`, `silent` and `stopped` count.
    """

    def __init__(self, start_child: StartChild, listener: Listener, times: Times) -> None:
        self._start_child = start_child
        self._listener = listener
        self._times = times
        self._child: Child | None = None
        self._under_way: set[int] = set()
        self._heard = 0.0
        self._worked = False
        self._why: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._first_ready: asyncio.Future[None] | None = None
        self._ending = self._hopeless = False
        self._alive: float | None = None
        self.up = False
        self.restarts = 0
        self.troubled: str | None = None
        self.passed: Callable[[Mapping[str, Any]], None] = lambda figures: None

    def start(self) -> asyncio.Task[None]:
        """Start the engine; returns the task that looks after it."""
        self._first_ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="engine")
        return self._task

    async def wait_ready(self) -> None:
        """Wait until the first engine is ready.

        Raises:
            EngineFailed: it ended before that.
        """
        if self._first_ready is not None:
            await asyncio.shield(self._first_ready)

    async def drain(self) -> None:
        """Let the pass that runs end, and models be snapshotted; at most `times.drain`. No other engine is started."""
        self._ending = True
        try:
            async with asyncio.timeout(self._times.drain):
                if self._child is not None and self.up:
                    self._child.put(Message(messages.DRAIN))
                    await self._drained.wait()
        except (TimeoutError, LinkClosed):
            _log.warning(
                "the engine did not stop within %g s; its unfinished operations run again after the next start",
                self._times.drain,
            )

    async def stop(self) -> None:
        """End the engine, and do not start another."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._first_ready is not None:
            self._first_ready.cancel()

    @property
    def silent(self) -> float | None:
        """Seconds since the engine's last sign of life, if they are too many: the process was stopped, say."""
        if not self.up or self._alive is None:
            return None
        seconds = time.monotonic() - self._alive
        return seconds if seconds > self._times.silent else None

    @property
    def pid(self) -> int | None:
        """The engine's process, if it has one."""
        return getattr(self._child, "pid", None)

    async def _run(self) -> None:
        deaths = 0
        while True:
            begin, self._worked = time.monotonic(), False
            await self._live(first=self.restarts == 0)
            if self._hopeless:
                return
            deaths = 1 if self._worked or time.monotonic() - begin > _STEADY else deaths + 1
            if self._ending:
                self._drained.set()
                return
            self.restarts += 1
            await asyncio.sleep(PAUSES[min(deaths - 1, len(PAUSES) - 1)])

    async def _live(self, first: bool) -> None:
        """Run one engine from its start to its end."""
        self._under_way, self._why, self._alive = set(), None, None
        try:
            child = self._child = await self._start_child(first)
        except OSError as error:
            self._died(f"it could not be started: {error}", "")
            return
        watch: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._times.start):
                ready = await child.receive()
            info = ready.head["info"]
            self._ready(
                child, ModelInfo(**{**info, "losses": tuple(info["losses"]), "paths": tuple(info.get("paths", ()))})
            )
            watch = asyncio.create_task(self._watch(child))
            while True:
                self._hear(await child.receive())
        except LinkClosed:
            pass
        except TimeoutError:
            self._why = f"the engine was not ready within {self._times.start:g} s"
        except Exception:
            _log.exception("cannot process a message of the engine")
        finally:
            self.up = False
            child.kill()
            if watch is not None:
                watch.cancel()
            end = await child.wait()
            self._child = None
        self._died(end, child.last_words)
        await self._listener.engine_down(self._under_way, self._why or DIED)

    def _ready(self, child: Child, info: ModelInfo) -> None:
        self.up, self.troubled, self._heard = True, None, time.monotonic()
        self._listener.engine_up(child, info)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(None)

    def _died(self, end: str, last_words: str) -> None:
        self.troubled = self._why or f"the engine died ({end})"
        if self._first_ready is not None and not self._first_ready.done():
            self._hopeless = True  # another one would fail likewise
            said = f":\n{last_words}" if last_words else ""
            self._first_ready.set_exception(EngineFailed(f"the engine ended before it was ready ({end}){said}"))
            self._first_ready.exception()  # who waits raises it; nobody has to
            return
        _log.error("%s, %s; %d operations were in flight", self._why or DIED, end, len(self._under_way))

    def _hear(self, message: Message) -> None:
        if self._alive is not None or message.type == messages.ALIVE:
            self._alive = time.monotonic()
        if message.type == messages.ALIVE:
            return  # which says nothing of the work
        self._heard = time.monotonic()
        if message.type == messages.BEGIN:
            self._under_way = set(message.head["ids"])
        elif message.type == messages.PASSED:
            self.troubled, self._worked = None, True
            self.passed(message.head)
        elif message.type == messages.DRAINED:
            self._drained.set()
        else:
            if message.type == messages.DONE:
                self._under_way.discard(message.head["id"])
            self._listener.message(message)

    async def _watch(self, child: Child) -> None:
        """End an engine that owes an answer, and works at a pass for too long or was stopped.

        How long it is stopped is counted in rounds of this loop: where the service was stopped with it, none passes.
        """
        limit, most = self._times.deadline, self._times.stopped
        pause = min(1.0, limit / 8, most / 8)
        idle_since: float | None = None
        stopped = 0.0
        while not self._why:
            now, waiting = time.monotonic(), self._listener.waiting
            if not waiting:
                idle_since = now
            stopped = stopped + pause if waiting and is_stopped(self.pid) else 0.0
            if stopped > most and not self._ending:
                self._why = f"the engine's process was stopped for longer than {most:g} s"
            elif now - max(self._heard, idle_since or 0.0) > limit and not self._ending:
                self._why = f"a pass took longer than {limit:g} s"
            else:
                await asyncio.sleep(pause)
        child.kill()
