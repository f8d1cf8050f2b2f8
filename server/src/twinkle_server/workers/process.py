"""The processes of a tree of workers: inner ones fork, and the leaves handle calls.

The first process imports what all need and forks. A process that was ended is thus replaced in milliseconds, and the
processes share most of their memory.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from twinkle_server.workers.framing import HEADER, Frames

_REAP_SECONDS: Final = 2.0
_GRACE: Final = {"first": 1.0, "fork": 0.2}
"""Seconds in which children may end by themselves after the service; those of the first process have children, too."""
_PR_SET_PDEATHSIG: Final = 1
_LINUX: Final = sys.platform.startswith("linux")


class Calls(Protocol):
    """Handles the calls of one process."""

    def do(self, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a call, and return the fields of the response; errors are returned as data."""


def run_first(link: socket.socket, frames: Frames, make_calls: Callable[[], Calls]) -> None:
    """Serve as the first process of a tree until the service closes the socket.

    Args:
        link: to the service.
        frames: reads and writes frames.
        make_calls: imports what all processes need, and returns what handles calls in each of them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # terminals send these to all processes; the closed socket ends this one
    _yield_to_others()
    calls = make_calls()
    gc.collect()
    gc.freeze()  # a collection would write to pages that all forks share
    Process(link, _GRACE["first"], frames, calls).run()


class Process:
    """One process of the tree.

    Args:
        link: to the service.
        grace: seconds in which its children may end by themselves after the service.
        frames: reads and writes frames.
        calls: handles calls; a fork continues with a copy of it.
    """

    def __init__(self, link: socket.socket, grace: float, frames: Frames, calls: Calls) -> None:
        self._link, self._grace, self._frames, self._calls = link, grace, frames, calls
        self._children: set[int] = set()

    def run(self) -> None:
        """Send the process id, and handle requests until the service closes the socket."""
        self._send({"pid": os.getpid()})
        while (received := self._receive(HEADER.size)) is not None:
            header, descriptors = received
            text, body = (self._read(size) for size in HEADER.unpack(header))
            if text is None or body is None:
                break
            request = self._frames.unpack(bytes(text), body)
            do = str(request.pop("do"))
            if do == "fork":
                self._fork(descriptors[0], int(request["memory"]))
            elif do == "reap":
                self._send(self._reap(int(request["pid"])))
            else:
                self._send({"id": request.pop("id"), **self._calls.do(do, request)})
        self._end_children()

    def _end_children(self) -> None:
        """Wait until the children end, which see their sockets closed; then kill them and their process groups."""
        end = time.monotonic() + self._grace
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT  # keeps process ids reserved until their groups are killed
        while time.monotonic() < end and any(os.waitid(os.P_PID, pid, how) is None for pid in self._children):
            time.sleep(0.005)
        for child in self._children:
            _end(child)

    def _fork(self, descriptor: int, memory: int) -> None:
        parent = os.getpid()
        child = os.fork()
        if child:
            os.close(descriptor)
            self._children.add(child)
            return
        status = 1
        try:
            self._link.close()
            _separate(parent, memory)
            Process(socket.socket(fileno=descriptor), _GRACE["fork"], self._frames, self._calls).run()
            status = 0
        finally:
            os._exit(status)

    def _reap(self, pid: int) -> dict[str, Any]:
        """Return the exit status of a child, which the service has killed if necessary."""
        end = time.monotonic() + _REAP_SECONDS
        while pid in self._children:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                return {"pid": pid, "status": os.waitstatus_to_exitcode(status)}
            if time.monotonic() > end:
                break
            time.sleep(0.001)
        return {"pid": pid, "status": None}

    def _send(self, answer: Mapping[str, Any]) -> None:
        self._link.sendall(self._frames.pack(answer))

    def _receive(self, size: int) -> tuple[bytes, list[int]] | None:
        """Return the header of a frame, and the descriptors received with it."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, size, 1)
        except OSError:
            return None
        if 0 < len(data) < size:
            data += bytes(self._read(size - len(data)) or b"")
        return (data, descriptors) if len(data) == size else None

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._link.recv_into(view)
            except OSError:
                return None
            if not count:
                return None
            view = view[count:]
        return data


def _yield_to_others() -> None:
    """Make the kernel kill this tree first when the machine runs out of memory, and disable core files."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if _LINUX:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("1000")


def _separate(parent: int, memory: int) -> None:
    """Isolate a fork: its own process group, no output, a memory limit; it ends with its parent.

    Args:
        parent: process id of the parent.
        memory: bytes that it may allocate beyond its present memory.
    """
    import resource

    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not _LINUX:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
        data = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _end(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except OSError:
            continue
