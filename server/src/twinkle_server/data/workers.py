"""`DataWorkers`: the processes in which data resources live: started, limited, and replaced.

Every method blocks, and is called from a thread of its family.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from twinkle_server.data.limits import DataLimits
from twinkle_server.data.rules import Rules
from twinkle_server.errors import Busy
from twinkle_server.workers.child import Child, Ended, more_memory
from twinkle_server.workers.framing import PlainFrames
from twinkle_server.workers.starting import start_first

_MODULE: Final = "twinkle_server.data.process"
_ENVIRONMENT: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # counts towards the limit, and is returned to the system
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process with threads cannot be forked safely
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_PAUSE: Final = 10.0
_SIGKILL: Final = "was killed by SIGKILL"


class WorkerEnded(Exception):
    """The process of a resource has ended; the message says why."""


class DataWorkers:
    """Starts the processes of data resources.

    Args:
        limits: of the processes.
        rules: what requests may name.
    """

    def __init__(self, limits: DataLimits, rules: Rules) -> None:
        self.limits = limits
        self._rules = rules
        self._lock = threading.Lock()
        self._first: Child | None = None
        self._failed_until = 0.0
        self._closed = False

    def fork(self) -> "DataWorker":
        """Return a new process.

        Raises:
            Busy: the service cannot start one at present.
        """
        for last in (False, True):
            with self._lock:
                first = self._started()
                until = time.monotonic() + self.limits.start
                try:
                    child = Child.fork(first, self.limits.memory, until)
                    child.settle(until)
                except (Ended, OSError) as error:
                    self._drop()
                    if last:
                        raise Busy("the service cannot start a worker for data at present", 5.0) from error
                else:
                    return DataWorker(child, self)
        raise AssertionError

    def end(self, child: Child) -> str:
        """End a process, and return how it ended; only one thread at a time may speak to the parent of processes."""
        with self._lock:
            return child.end()

    def close(self) -> None:
        """End the first process; its children see that and end, too."""
        with self._lock:
            self._closed = True
            self._drop()

    def _started(self) -> Child:
        if self._closed:
            raise Busy("the service is shutting down", 5.0)
        if self._first is None or self._first.ended:
            if time.monotonic() < self._failed_until:
                raise Busy("the service cannot start a worker for data at present", _PAUSE)
            answer = 2 * self.limits.answer_bytes
            child = start_first(_MODULE, PlainFrames(), [self._rules.dump()], _ENVIRONMENT, answer)
            try:
                child.receive(time.monotonic() + self.limits.start, lambda frame: "pid" in frame)
            except Ended as error:
                child.end()
                self._failed_until = time.monotonic() + _PAUSE
                raise Busy("the service cannot start a worker for data at present; see its log", _PAUSE) from error
            self._first = child
        return self._first

    def _drop(self) -> None:
        if self._first is not None:
            self._first.end()
            self._first = None


class DataWorker:
    """One process with resources.

    Args:
        child: the process.
        workers: ends it.
    """

    def __init__(self, child: Child, workers: DataWorkers) -> None:
        self._child, self._workers = child, workers
        self._calls = 0

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make a call, and return the response, with an `error` if it failed.

        Raises:
            WorkerEnded: the process crashed or exceeded a limit, and was ended.
        """
        limits = self._workers.limits
        self._calls += 1
        number, until = self._calls, time.monotonic() + limits.seconds
        try:
            self._child.send({**request, "id": number}, until)
            answer = self._child.receive(until, lambda frame: frame.get("id") == number)
        except Ended as error:
            raise WorkerEnded(self._reason(error)) from error
        if answer.get("error", {}).get("memory"):
            self._workers.end(self._child)  # its memory may never be freed
            raise WorkerEnded(answer["error"].get("too_large") or f"it {more_memory(limits.memory)}")
        return answer

    def _reason(self, error: Ended) -> str:
        end, reason = self._workers.end(self._child), str(error)
        if error.slow:
            return f"a call took longer than {self._workers.limits.seconds:g} s, the limit of this service"
        if reason != "has ended":
            return f"its process {reason}"
        hint = ", by itself or because the memory of the machine ran out" if end == _SIGKILL else ""
        return f"its process {end}{hint}"

    def kill(self) -> None:
        """Kill the process while another thread waits for it; its id stays reserved until `end`."""
        if self._child.pid is not None and not self._child.ended:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process."""
        self._workers.end(self._child)
