"""The engine's end of one process of the tree: frames within a deadline, its memory, and how it ended."""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from twinkle_server.engine.losses.workers.frames import HEADER, BadFrame, pack, unpack

_TICK: Final = 0.05
"""Seconds between two looks at the memory of a process that computes."""
_TRANSFER: Final = 5.0
"""Seconds for which an answer may still flow when its time is over: the engine may have been busy until then."""
_CHUNK: Final = 2**20
_MOST_TEXT: Final = 2**20
_LEAST_BODY: Final = 2**20
"""Bytes of tensors that an answer may have though less was sent; gradients are no larger than what they are of."""
_LATE: Final = "did not answer in time"
_LINUX: Final = sys.platform.startswith("linux")


class Ended(Exception):
    """A process is gone, or must go: it crashed, took too long or too much memory, or answers nonsense.

    Attributes:
        slow: it ran into a deadline, which another time it may not.
    """

    def __init__(self, what: str, *, slow: bool = False) -> None:
        super().__init__(what)
        self.slow = slow


class Child:
    """One process, seen from the engine.

    Args:
        link: to it; the other end was given to it.
        parent: that forks it and knows how it ended; None for the first, which the engine has started itself.
        memory: bytes that it may have resident, beyond those that it had when it began.
        started: ends the first process, and returns its exit status.
    """

    def __init__(
        self, link: socket.socket, parent: "Child | None", memory: int,
        started: Callable[[], int | None] | None = None,
    ) -> None:  # fmt: skip
        link.setblocking(False)
        self._link, self._parent, self._memory, self._started = link, parent, memory, started
        self._out = memoryview(b"")
        self._in = bytearray()
        self._frames: list[dict[str, Any]] = []
        self._base: int | None = None
        self._most_body = _LEAST_BODY
        self.pid: int | None = None
        self.gone = False

    @classmethod
    def fork(cls, parent: "Child", memory: int, until: float) -> "Child":
        """Fork a process from another; it is not waited for.

        Raises:
            Ended: the other is gone.
        """
        ours, theirs = socket.socketpair()
        try:
            parent.send({"do": "fork", "memory": memory}, until, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(ours, parent, memory)

    def send(self, request: Mapping[str, Any], until: float, descriptor: int | None = None) -> None:
        """Send a frame whole.

        Raises:
            Ended: the process is gone, or does not take it in time.
        """
        frame = memoryview(pack(request))
        self._most_body = max(self._most_body, len(frame))
        if descriptor is not None:
            self._pump(until, lambda: False, once=True)
            try:
                frame = frame[socket.send_fds(self._link, [frame[: HEADER.size]], [descriptor]) :]
            except OSError as error:
                raise Ended("is gone") from error
        self._out = frame
        self._pump(until, lambda: not self._out)

    def receive(self, until: float, wanted: Callable[[Mapping[str, Any]], bool] = lambda frame: True) -> dict[str, Any]:
        """Return the next frame that is wanted; others are dropped.

        Raises:
            Ended: the process is gone, has sent no such frame in time, has too much memory, or sends something else.
        """
        last = max(until, time.monotonic()) + _TRANSFER
        while time.monotonic() < last:
            self._pump(until, lambda: bool(self._frames), last=last)
            frame = self._frames.pop(0)
            if wanted(frame):
                return frame
        raise Ended(_LATE, slow=True)

    def settle(self, until: float) -> None:
        """Wait until it has said which process it is.

        Raises:
            Ended: see `receive`.
        """
        if self.pid is not None:
            return
        pid = self.receive(until).get("pid")
        expected = None if self._parent is None else self._parent.pid
        if not isinstance(pid, int) or (_LINUX and expected is not None and _status(pid).get("PPid") != expected):
            raise Ended("did not say which process it is")
        self.pid = pid
        self._base = _resident(pid)

    @property
    def lost(self) -> bool:
        """Whether it has closed its end of the socket."""
        try:
            self._pump(0.0, lambda: True, once=True)
        except Ended:
            return True
        return False

    @property
    def ready(self) -> bool:
        """Whether a frame has arrived that nobody has read."""
        with contextlib.suppress(Ended):
            self._pump(0.0, lambda: True, once=True)
        return bool(self._frames)

    def end(self) -> str:
        """End it, if it has not ended by itself, and return how it did."""
        if self.gone:
            return "is gone"
        with contextlib.suppress(Ended):
            self.settle(time.monotonic())  # who has not been asked for anything may not have been heard yet
        self.gone = True
        pid = self.pid
        if pid is not None:
            for kill in (os.killpg, os.kill) if self._parent is not None else (os.kill,):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        self._link.close()
        return _how(self._exit_status(pid))

    def _exit_status(self, pid: int | None) -> int | None:
        if self._started is not None:
            return self._started()
        parent = self._parent
        if parent is None or parent.gone or pid is None:
            return None
        until = time.monotonic() + 3.0
        try:
            parent.send({"do": "reap", "pid": pid}, until)
            status = parent.receive(until, lambda frame: frame.get("pid") == pid).get("status")
        except Ended:
            return None
        return status if isinstance(status, int) else None

    def _pump(self, until: float, done: Callable[[], bool], *, once: bool = False, last: float | None = None) -> None:
        """Send and receive until `done`; a process that waits until its answer is read is never waited for in vain.

        Args:
            until: when it must be done, unless bytes flow.
            done: says whether it is.
            once: look once, and wait for nothing.
            last: when it must be done though bytes flow.
        """
        last = max(until, time.monotonic()) + _TRANSFER if last is None else last
        poll = select.poll()
        while not self.gone:
            if not once and done():
                return
            poll.register(self._link, select.POLLIN | (select.POLLOUT if self._out else 0))
            left = until - time.monotonic()
            events = poll.poll(0 if once else max(0.0, min(_TICK, left)) * 1000)
            for _, event in events:
                if event & select.POLLOUT:
                    self._write()
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._read()
            if once:
                return
            if not events:
                self.check()
                if left <= 0:
                    raise Ended(_LATE, slow=True)
            elif time.monotonic() > last:
                raise Ended(_LATE, slow=True)
        raise Ended("is gone")

    def _write(self) -> None:
        try:
            self._out = self._out[self._link.send(self._out[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise Ended("is gone") from error

    def _read(self) -> None:
        try:
            data = self._link.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise Ended("is gone") from error
        if not data:
            raise Ended("is gone")
        self._in += data
        while len(self._in) >= HEADER.size:
            text, body = HEADER.unpack_from(self._in)
            if text > _MOST_TEXT or body > self._most_body:
                raise Ended("returned an invalid loss")
            end = HEADER.size + text + body
            if len(self._in) < end:
                return
            try:
                frame = unpack(bytes(self._in[HEADER.size : HEADER.size + text]), self._in[end - body : end])
            except BadFrame as error:
                raise Ended("returned an invalid loss") from error
            self._frames.append(frame)
            del self._in[:end]

    def check(self) -> None:
        """Compare its memory with its limit.

        Raises:
            Ended: it has more, or it is gone and something else holds its end of the socket.
        """
        if not _LINUX or self.pid is None or self._base is None:
            return
        status = _status(self.pid)
        if status.get("State", "Z") == "Z":
            raise Ended("is gone")
        if _anonymous(status) - self._base > self._memory:
            raise Ended(more_memory(self._memory))


def more_memory(limit: int) -> str:
    """Return what is said of a process that takes more memory than its limit."""
    return f"took more than {limit / 2**20:.0f} MiB of memory, the limit of this service"


def _status(pid: int) -> dict[str, Any]:
    """Return what `/proc` says of a process; nothing if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return {}
    found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {
        "State": found.get("State", "Z")[:1],
        "PPid": int(found.get("PPid", "0")),
        **{name: int(found.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem")},
    }


def _anonymous(status: Mapping[str, Any]) -> int:
    return int(status.get("RssAnon", 0)) + int(status.get("RssShmem", 0))


def _resident(pid: int) -> int | None:
    return _anonymous(_status(pid)) if _LINUX else None


def _how(status: int | None) -> str:
    """Return how a process ended, for people."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with the exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
