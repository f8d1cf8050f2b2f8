"""Python processes that have imported the service before they start: the import takes longer than most tests.

`Forked` is a `subprocess.Popen` of a Python command. One process, the forge, imports the service once; each command is
a fork of it, which runs the module or the script as the interpreter would. A fork differs from a process that is
started afresh only in its command line and its parent; tests of those, and of how people start a service, use `Popen`.
"""

import array
import atexit
import contextlib
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "twinkle_server.serve", "twinkle_server.cli.serve", "twinkle_server.cli.server", "twinkle_server.engine.host",
    "uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.lifespan.on", "numpy",
)  # fmt: skip
READ_AT_IMPORT = ("FAILPOINT",)
"""Variables that modules read when they are imported: a process that has one is started afresh."""
_LARGEST = 2**20


class Forked(subprocess.Popen[Any]):
    """A process of `[sys.executable, "-m", module, ...]` or `[sys.executable, script, ...]`."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        environment = os.environ if options.get("env") is None else options["env"]
        self._forged = args[0] == sys.executable and not any(name in environment for name in READ_AT_IMPORT)
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if not self._forged:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        pass_fds, cwd, environment, pipes = rest[3], rest[4], rest[5], rest[9:15]
        stdin, _, _, stdout, _, stderr = pipes
        heard, status = os.pipe()
        request = {
            "argv": [str(word) for word in args[1:]],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if environment is None else environment),
            "fds": [0, 1, 2, *pass_fds],
        }
        standard = [own if own >= 0 else number for number, own in enumerate((stdin, stdout, stderr))]
        try:
            self.pid = _forge().fork(request, [status, *standard, *pass_fds])
        except BaseException:
            os.close(heard)
            raise
        finally:
            os.close(status)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True
        self._heard = heard

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if not self._forged:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self._forged:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if self.returncode is not None or (wait_flags & os.WNOHANG and not select.select([self._heard], [], [], 0)[0]):
            return 0, 0
        status = int(os.read(self._heard, 32) or b"9")  # nothing: the forge was killed
        os.close(self._heard)
        return self.pid, status


class Forge:
    """The process that has imported the service, seen from outside."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Start a process and return its id."""
        socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)
        answer = self._link.recv(32)
        if not answer:
            raise RuntimeError(f"the forge has ended with {self._process.wait(60)}")
        return int(answer)

    def close(self) -> None:
        """End the forge; processes that it started go on."""
        self._link.close()
        self._process.wait(60)


@functools.cache
def _forge() -> Forge:
    forge = Forge()
    atexit.register(forge.close)
    return forge


def main(link: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the fork, and None in the forge when nobody asks any more."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready = select.select([link, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report(statuses)
        if link not in ready:
            continue
        data, descriptors = _received(link)
        if not data:
            return None
        status, *passed = descriptors
        pid = os.fork()
        if pid:
            statuses[pid] = status
            for descriptor in passed:
                os.close(descriptor)
            link.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        link.close()
        for descriptor in (woken, wake, status, *statuses.values()):
            os.close(descriptor)
        request: dict[str, Any] = json.loads(data)
        _arrange(passed, request["fds"])
        return request


def _received(link: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message; unlike those of `socket.recv_fds`, the descriptors are not lost if there are many."""
    space = socket.CMSG_SPACE(64 * array.array("i").itemsize)
    data, control, _, _ = link.recvmsg(_LARGEST, space)
    descriptors = array.array("i")
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    return data, descriptors.tolist()


def _report(statuses: dict[int, int]) -> None:
    """Tell who waits how the processes ended that have."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with contextlib.suppress(BrokenPipeError):
                os.write(statuses[pid], str(status).encode())
            os.close(statuses.pop(pid))


def _arrange(passed: list[int], wanted: list[int]) -> None:
    """Give descriptors the wanted numbers, and close them under their own."""
    above = max([*passed, *wanted]) + 1
    moved = []
    for place, descriptor in enumerate(passed):
        os.dup2(descriptor, above + place)
        moved.append(above + place)
    for descriptor in set(passed):
        os.close(descriptor)
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run(request: dict[str, Any]) -> None:
    """Run the module or the script of a request in this process."""
    random.seed()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    option, *rest = request["argv"]
    if option == "-m":
        module, *arguments = rest
        sys.argv = [module, *arguments]
        sys.path[0] = request["cwd"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        sys.path[0] = str(Path(option).parent)
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        asked = main(requests)
    if asked is not None:
        run(asked)
