"""Supervision of the engine process: it is started, monitored, killed when it hangs, and restarted when it dies."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
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
        """Send without waiting for buffer space."""

    async def room(self) -> None:
        """Wait until the buffer has space."""

    async def receive(self) -> Message:
        """Return the next message; raises `LinkClosed` when the engine has ended."""

    def kill(self) -> None:
        """Kill the process."""

    async def wait(self) -> str:
        """Wait until the process has ended, and return how it ended, for the log."""

    @property
    def last_words(self) -> str:
        """The last lines of its output."""


def is_stopped(pid: int | None) -> bool:
    """Return whether a process is stopped by a signal (for example SIGSTOP); False where this cannot be determined."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class ChildProcess:
    """An engine in a separate process, which ends together with this one."""

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
            first: False for a restart, which ignores the failpoint of the environment; otherwise every engine would
                stop there.
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
        """Process id."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._last_words)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # asyncio's `kill` would reap the process and lose its exit status

    async def wait(self) -> str:
        """Wait until the process has ended, and return how it ended, for the log."""
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
"""Seconds before an engine is restarted, by the number of consecutive engines that died before any pass."""
_STEADY = 60.0  # seconds after which a death does not count as consecutive
DIED = "the engine died"
StartChild = Callable[[bool], Awaitable[Child]]


class EngineFailed(Exception):
    """The first engine ended before it was ready; the log has its last output."""


class Listener(Protocol):
    """Receives the events of the engine."""

    @property
    def waiting(self) -> int:
        """Number of unanswered requests to the engine."""

    def engine_up(self, child: Child, info: ModelInfo) -> None:
        """The engine is ready."""

    async def engine_down(self, blamed: set[int], why: str) -> None:
        """The engine died; the operations `blamed` were running."""

    def message(self, message: Message) -> None:
        """The engine sent a message about operations or models."""


class Supervisor:
    """Keeps one engine running.

    Args:
        start_child: starts an engine; its argument is False for a restart.
        listener: receives the events of the engine.
        times: the settings `start`, `deadline`, `drain`, `silent` and `stopped` are used.
    """

    def __init__(self, start_child: StartChild, listener: Listener, times: Times) -> None:
        self._start_child = start_child
        self._listener = listener
        self._times = times
        self._child: Child | None = None
        self._under_way: set[int] = set()
        self._last_progress = 0.0
        self._worked = False
        self._why: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._first_ready: asyncio.Future[None] | None = None
        self._ending = self._failed_at_start = False
        self._last_heartbeat: float | None = None
        self.up = False
        self.restarts = 0
        self.troubled: str | None = None
        self.passed: Callable[[Mapping[str, Any]], None] = lambda figures: None
        self.began: Callable[[Collection[int]], None] = lambda operations: None

    def start(self) -> asyncio.Task[None]:
        """Start the engine, and return the task that supervises it."""
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
        """Let the current pass end and models be snapshotted, within `times.drain`; the engine is not restarted."""
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
        """Stop the engine for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._first_ready is not None:
            self._first_ready.cancel()

    @property
    def silent(self) -> float | None:
        """Seconds since the last heartbeat of the engine if above the limit, else None."""
        if not self.up or self._last_heartbeat is None:
            return None
        seconds = time.monotonic() - self._last_heartbeat
        return seconds if seconds > self._times.silent else None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, if there is one."""
        return getattr(self._child, "pid", None)

    async def _run(self) -> None:
        deaths = 0
        while True:
            begin, self._worked = time.monotonic(), False
            await self._live(first=self.restarts == 0)
            if self._failed_at_start:
                return
            deaths = 1 if self._worked or time.monotonic() - begin > _STEADY else deaths + 1
            if self._ending:
                self._drained.set()
                return
            self.restarts += 1
            await asyncio.sleep(PAUSES[min(deaths - 1, len(PAUSES) - 1)])

    async def _live(self, first: bool) -> None:
        """Run one engine from start to end."""
        self._under_way, self._why, self._last_heartbeat = set(), None, None
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
            lists = {name: tuple(value) for name, value in info.items() if isinstance(value, list)}
            self._ready(child, ModelInfo(**{**info, **lists}))
            watch = asyncio.create_task(self._watch(child))
            while True:
                self._handle(await child.receive())
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
        self.up, self.troubled, self._last_progress = True, None, time.monotonic()
        self._listener.engine_up(child, info)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(None)

    def _died(self, end: str, last_words: str) -> None:
        self.troubled = self._why or f"the engine died ({end})"
        if self._first_ready is not None and not self._first_ready.done():
            self._failed_at_start = True  # a restart would fail in the same way
            output = f":\n{last_words}" if last_words else ""
            self._first_ready.set_exception(EngineFailed(f"the engine ended before it was ready ({end}){output}"))
            self._first_ready.exception()  # marks it as retrieved; there may be no waiter
            return
        _log.error("%s, %s; %d operations were in flight", self._why or DIED, end, len(self._under_way))

    def _handle(self, message: Message) -> None:
        if self._last_heartbeat is not None or message.type == messages.ALIVE:
            self._last_heartbeat = time.monotonic()
        if message.type == messages.ALIVE:
            return  # a heartbeat is no sign of progress
        self._last_progress = time.monotonic()
        if message.type == messages.BEGIN:
            self._under_way = set(message.head["ids"])
            self.began(self._under_way)
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
        """Kill an engine with unanswered requests whose pass takes too long or whose process is stopped.

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
            elif now - max(self._last_progress, idle_since or 0.0) > limit and not self._ending:
                self._why = f"a pass took longer than {limit:g} s"
            else:
                await asyncio.sleep(pause)
        child.kill()
