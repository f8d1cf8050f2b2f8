"""Calls that may hang or fill the memory, in a process of their own, which is killed when their time is over.

A thread cannot be killed, and neither a thread nor a signal ends a computation inside C, such as that of 9**9**9.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from twinkle.errors import TwinkleError
from twinkle_registry.files import import_file

_LENGTH = struct.Struct(">Q")
_START_SECONDS = 120.0
_ORPHAN_SECONDS = 1.0
_LONGEST_SECONDS = 1e6  # what threads can wait for


class WorkerError(Exception):
    """A call in the other process raised, or the process ended; the message says which."""


class WorkerBroken(TwinkleError, RuntimeError):
    """The other process cannot start; the message says why."""


class Worker:
    """One other process, started at the first call and again after it was killed. Calls of several threads wait.

    Functions and arguments are pickled, so a function has to stand in a module that can be imported, or in a
    file that the registry has imported (`./rewards.py:Name`).

    Args:
        prepare: called in the process when it starts, such as for slow imports; its time does not count.
        memory: address space in bytes that the process may have; None is no limit.
    """

    def __init__(self, prepare: Callable[[], object] | None = None, memory: int | None = None) -> None:
        self._prepare = prepare
        self._memory = memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finish: Callable[[], object] = int
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"prepare": self._prepare, "memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def call(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        """Return what the function returns in the other process.

        Raises:
            TimeoutError: it took longer; the process is gone.
            WorkerError: it raised, or cannot be sent there, or the process ended.
            WorkerBroken: the process cannot start.
        """
        try:
            message = _packed(seconds, function, args)
        except Exception as error:  # pickle raises any error of the object's parts
            raise WorkerError(f"it cannot be sent to another process: {type(error).__name__}: {error}") from error
        with self._lock:
            return self._ask(self._running(), message, seconds)

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            self._discard()

    def _running(self) -> "subprocess.Popen[bytes]":
        mine = self._owner == os.getpid()  # after a fork the pipes are those of the parent
        if mine and self._process is not None and self._process.poll() is None:
            return self._process
        if mine:
            self._discard()
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._memory or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._process, self._owner = process, os.getpid()
        self._finish = weakref.finalize(self, _end, process, self._owner)
        try:
            self._ask(process, _packed(_START_SECONDS, self._prepare or int, ()), _START_SECONDS)
        except (TimeoutError, WorkerError) as error:
            raise WorkerBroken(f"the process for calls with a time limit cannot start: {error}") from error
        return process

    def _ask(self, process: "subprocess.Popen[bytes]", message: bytes, seconds: float) -> Any:
        overdue = threading.Event()

        def kill() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(min(seconds, _LONGEST_SECONDS), kill)
        timer.daemon = True
        timer.start()
        reply = None
        try:
            with contextlib.suppress(OSError):
                _write(process.stdin, message)
                reply = _read(process.stdout)
        finally:
            timer.cancel()
            if reply is None or overdue.is_set():
                self._discard()
        if reply is not None:
            fine, value = pickle.loads(reply)
            if fine:
                return value
            raise WorkerError(value)
        if overdue.is_set():
            raise TimeoutError(f"it took longer than {seconds:g} s, and its process was killed")
        raise WorkerError(f"its process ended with code {process.returncode}")

    def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._finish()  # once, here or at the end of this process


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not yet written cannot be
            pipe.close()  # type: ignore[union-attr]


def _write(pipe: IO[bytes] | None, message: bytes) -> None:
    assert pipe is not None
    pipe.write(_LENGTH.pack(len(message)) + message)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes | None:
    """Return one message; None where the other side is gone."""
    assert pipe is not None
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    message = pipe.read(_LENGTH.unpack(head)[0])
    return message if len(message) == _LENGTH.unpack(head)[0] else None


def _packed(*call: Any) -> bytes:
    """Return a message with a call, and the paths of files that may define it (`./rewards.py:Name`)."""
    inside = f"{import_file.__module__}."
    files = {name: module.__file__ for name, module in list(sys.modules.items()) if name.startswith(inside)}
    return pickle.dumps((files, pickle.dumps(call)))


def _unpacked(message: bytes) -> Any:
    """Return the call in a message; a file that defines it is imported first."""
    files, call = pickle.loads(message)
    while True:
        try:
            return pickle.loads(call)
        except ModuleNotFoundError as error:
            if error.name not in files:
                raise
            import_file(files.pop(error.name), context="a reward in a process of its own")


def _answer(message: bytes) -> bytes:
    try:
        seconds, function, args = _unpacked(message)
        with Path(os.devnull).open("w") as nowhere:
            # If the parent is killed, only this ends a computation in C; it does not need the interpreter.
            faulthandler.dump_traceback_later(min(seconds, _LONGEST_SECONDS) + _ORPHAN_SECONDS, exit=True, file=nowhere)
            try:
                return pickle.dumps((True, function(*args)))
            finally:
                faulthandler.cancel_dump_traceback_later()
    except BaseException as error:  # the error is the result of the call; the process continues
        return pickle.dumps((False, f"it raised {type(error).__name__}: {error}"[:500]))


def _serve(memory: int) -> None:
    """Answer calls until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    if memory:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # What a call prints or reads must not touch the messages.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    while (message := _read(incoming)) is not None:
        _write(outgoing, _answer(message))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
