"""The engine's process: started with a socket and nothing secret, read to its end, stopped or killed."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Protocol

from twinkle_server.engine.messages import Message
from twinkle_server.environment import scrubbed
from twinkle_server.link import AsyncLink
from twinkle_server.settings import Settings

_log = logging.getLogger("twinkle_server.engine")
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
                _log.warning("%s", line)
        if rest:
            self._last_words.append(rest)
            _log.warning("%s", rest)
