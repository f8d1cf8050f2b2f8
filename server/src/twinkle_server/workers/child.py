"""The service's end of a worker process: frames with deadlines, memory limit, and exit status."""

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

from twinkle_server.workers.framing import HEADER, BadFrame, Frames

_TICK: Final = 0.05
"""Seconds between two checks of the memory of a process that computes."""
_TRANSFER: Final = 5.0
"""Seconds after the deadline in which a response may still be transferred: the engine may have been busy."""
_CHUNK: Final = 2**20
_MOST_TEXT: Final = 2**20
_LEAST_BODY: Final = 2**20
"""Minimum limit for the tensors of a response in bytes; gradients are at most as large as the tensors sent."""
_LATE: Final = "did not answer in time"
_LINUX: Final = sys.platform.startswith("linux")


class Ended(Exception):
    """A process has ended or must be ended: it crashed, exceeded a limit, or sent an invalid response.

    Attributes:
        slow: whether it exceeded a deadline, which a retry may not.
    """

    def __init__(self, what: str, *, slow: bool = False) -> None:
        super().__init__(what)
        self.slow = slow


class Child:
    """A worker process, as seen by the engine.

    Args:
        link: socket to the process, which has the other end.
        parent: the process that forks it and reaps it; None for the first, which the engine starts itself.
        memory: limit for its resident memory in bytes, beyond that at its start.
        frames: reads and writes frames.
        started: ends the first process, and returns its exit status.
        most_body: limit for the body of a response in bytes, unless a larger request was sent.
    """

    def __init__(
        self, link: socket.socket, parent: "Child | None", memory: int, frames: Frames,
        started: Callable[[], int | None] | None = None, most_body: int = _LEAST_BODY,
    ) -> None:  # fmt: skip
        link.setblocking(False)
        self._link, self._parent, self._memory, self._started = link, parent, memory, started
        self._codec = frames
        self._out = memoryview(b"")
        self._in = bytearray()
        self._frames: list[dict[str, Any]] = []
        self._base: int | None = None
        self._most_body = most_body
        self.pid: int | None = None
        self.ended = False

    @classmethod
    def fork(cls, parent: "Child", memory: int, until: float) -> "Child":
        """Fork a process from another, without waiting for it.

        Raises:
            Ended: the parent has ended.
        """
        ours, theirs = socket.socketpair()
        try:
            parent.send({"do": "fork", "memory": memory}, until, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(ours, parent, memory, parent._codec, most_body=parent._most_body)

    def send(self, request: Mapping[str, Any], until: float, descriptor: int | None = None) -> None:
        """Send a frame.

        Raises:
            Ended: the process has ended, or does not accept the frame in time.
        """
        frame = memoryview(self._codec.pack(request))
        self._most_body = max(self._most_body, len(frame))
        if descriptor is not None:
            self._pump(until, lambda: False, once=True)
            try:
                frame = frame[socket.send_fds(self._link, [frame[: HEADER.size]], [descriptor]) :]
            except OSError as error:
                raise Ended("has ended") from error
        self._out = frame
        self._pump(until, lambda: not self._out)

    def receive(self, until: float, wanted: Callable[[Mapping[str, Any]], bool] = lambda frame: True) -> dict[str, Any]:
        """Return the next frame that is wanted; other frames are dropped.

        Raises:
            Ended: the process has ended, is late, exceeds its memory limit, or sends an invalid frame.
        """
        last = max(until, time.monotonic()) + _TRANSFER
        while time.monotonic() < last:
            self._pump(until, lambda: bool(self._frames), last=last)
            frame = self._frames.pop(0)
            if wanted(frame):
                return frame
        raise Ended(_LATE, slow=True)

    def settle(self, until: float) -> None:
        """Wait for the process id of the process.

        Raises:
            Ended: see `receive`.
        """
        if self.pid is not None:
            return
        pid = self.receive(until).get("pid")
        expected = None if self._parent is None else self._parent.pid
        if not isinstance(pid, int) or (_LINUX and expected is not None and _status(pid).get("PPid") != expected):
            raise Ended("did not send its process id")
        self.pid = pid
        self._base = _resident(pid)

    @property
    def lost(self) -> bool:
        """Whether the process has closed its end of the socket."""
        try:
            self._pump(0.0, lambda: True, once=True)
        except Ended:
            return True
        return False

    @property
    def ready(self) -> bool:
        """Whether an unread frame has arrived."""
        with contextlib.suppress(Ended):
            self._pump(0.0, lambda: True, once=True)
        return bool(self._frames)

    def end(self) -> str:
        """Kill the process if it has not ended, and return how it ended."""
        if self.ended:
            return "has ended"
        with contextlib.suppress(Ended):
            self.settle(time.monotonic())  # its process id may not have been read yet
        self.ended = True
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
        if parent is None or parent.ended or pid is None:
            return None
        until = time.monotonic() + 3.0
        try:
            parent.send({"do": "reap", "pid": pid}, until)
            status = parent.receive(until, lambda frame: frame.get("pid") == pid).get("status")
        except Ended:
            return None
        return status if isinstance(status, int) else None

    def _pump(self, until: float, done: Callable[[], bool], *, once: bool = False, last: float | None = None) -> None:
        """Send and receive until `done`; does both at once, so that neither end blocks the other.

        Args:
            until: deadline, unless data is being transferred.
            done: whether to return.
            once: poll once without waiting.
            last: deadline even if data is being transferred.
        """
        last = max(until, time.monotonic()) + _TRANSFER if last is None else last
        poll = select.poll()
        while not self.ended:
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
        raise Ended("has ended")

    def _write(self) -> None:
        try:
            self._out = self._out[self._link.send(self._out[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise Ended("has ended") from error

    def _read(self) -> None:
        try:
            data = self._link.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise Ended("has ended") from error
        if not data:
            raise Ended("has ended")
        self._in += data
        while len(self._in) >= HEADER.size:
            text, body = HEADER.unpack_from(self._in)
            if text > _MOST_TEXT or body > self._most_body:
                raise Ended(self._codec.invalid)
            end = HEADER.size + text + body
            if len(self._in) < end:
                return
            try:
                frame = self._codec.unpack(
                    bytes(self._in[HEADER.size : HEADER.size + text]), self._in[end - body : end]
                )
            except BadFrame as error:
                raise Ended(self._codec.invalid) from error
            self._frames.append(frame)
            del self._in[:end]

    def check(self) -> None:
        """Check the memory limit.

        Raises:
            Ended: the process exceeds it, or has ended while another process holds its end of the socket.
        """
        if not _LINUX or self.pid is None or self._base is None:
            return
        status = _status(self.pid)
        if status.get("State", "Z") == "Z":
            raise Ended("has ended")
        if _anonymous(status) - self._base > self._memory:
            raise Ended(more_memory(self._memory))


def more_memory(limit: int) -> str:
    """Return the error text for a process that exceeds its memory limit."""
    return f"took more than {limit / 2**20:.0f} MiB of memory, the limit of this service"


def _status(pid: int) -> dict[str, Any]:
    """Return fields of `/proc/PID/status`; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {
        "State": fields.get("State", "Z")[:1],
        "PPid": int(fields.get("PPid", "0")),
        **{name: int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem")},
    }


def _anonymous(status: Mapping[str, Any]) -> int:
    return int(status.get("RssAnon", 0)) + int(status.get("RssShmem", 0))


def _resident(pid: int) -> int | None:
    return _anonymous(_status(pid)) if _LINUX else None


def _how(status: int | None) -> str:
    """Describe an exit status."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with the exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
