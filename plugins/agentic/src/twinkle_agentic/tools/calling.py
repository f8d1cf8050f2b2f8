"""Calls that may fail, hang or return junk: each one ends, within a time, in a text or an error."""

import json
import math
import threading
from collections.abc import Callable
from typing import Any

from twinkle.errors import ArgumentError


class Hung(Exception):
    """A call has not returned in time, or is not begun because too many have not."""


class TimedCalls:
    """Runs functions in threads of their own, and stops waiting after a time.

    Python cannot end a thread: one that hangs stays until its function returns or the process ends, and holds what it
    holds. So there are never more than `max_threads`, hung ones included; where all of them hang, calls are refused at
    once. Code that may hang should run in a process or a service that its tool can stop.
    """

    def __init__(self, time_limit: float | None, max_threads: int) -> None:
        """Set the limits.

        Args:
            time_limit: seconds to wait for a call, and before it for a thread; None runs it in the caller's thread, for
                as long as it takes.
            max_threads: how many there may be at one time.
        """
        limited = time_limit is None or (isinstance(time_limit, int | float) and 0 < time_limit < math.inf)
        if not limited or isinstance(time_limit, bool):
            raise ArgumentError(f"time_limit is {time_limit!r}; it is a number of seconds above 0, or None")
        if isinstance(max_threads, bool) or not isinstance(max_threads, int) or max_threads < 1:
            raise ArgumentError(f"max_threads is {max_threads!r}; it is a number of threads from 1")
        self.time_limit, self.max_threads = time_limit, max_threads
        self._free = threading.BoundedSemaphore(max_threads)
        self._given_up = set[_Call]()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return TimedCalls, (self.time_limit, self.max_threads)

    @property
    def hung(self) -> int:
        """How many calls were given up and have not returned."""
        with self._lock:
            self._given_up = {call for call in self._given_up if call.is_alive()}
            return len(self._given_up)

    def __call__(self, function: Callable[[], str]) -> str:
        """Return what `function` returns, or raise what it raises.

        Raises:
            Hung: it did not return in time, or there was no thread for it.
        """
        if self.time_limit is None:
            return function()
        if self.hung >= self.max_threads or not self._free.acquire(timeout=self.time_limit):
            raise Hung(f"not begun: {self.max_threads} earlier calls have not returned")
        call = _Call(function, self._free)
        try:
            call.start()
        except RuntimeError:  # the system gives no more threads
            self._free.release()
            raise
        call.join(self.time_limit)
        if call.is_alive():
            with self._lock:
                self._given_up.add(call)
            raise Hung(f"no answer within {self.time_limit:g} seconds")
        if call.error is not None:
            raise call.error
        return call.result


class _Call(threading.Thread):
    """One call, in a thread that is free again when it returns."""

    def __init__(self, function: Callable[[], str], free: threading.BoundedSemaphore) -> None:
        super().__init__(daemon=True, name="tool call")
        self._function, self._free = function, free
        self.result = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # a tool that calls sys.exit() has failed, as one that raises
            self.error = error
        finally:
            self._free.release()


def as_text(value: Any, limit: int) -> str:
    """Return a tool's result as text that a tokenizer takes, of at most about `limit` characters.

    Text stays; of what is longer the middle is left out. Numbers, lists and dicts become JSON.

    Raises:
        TypeError: it is neither (bytes, an object, nothing that JSON knows).
    """
    if isinstance(value, str):
        return shortened(value.encode("utf-8", "replace").decode(), limit)
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"the tool returned {len(value)} bytes of binary data; a result is text")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise TypeError(f"the tool returned a {type(value).__name__}; a result is text") from None
    return as_text(text, limit)


def shortened(text: str, limit: int) -> str:
    """Return a text with its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit - limit // 4
    return f"{text[:head]}\n... {len(text) - limit} characters left out ...\n{text[len(text) - limit // 4 :]}"


def error_text(error: BaseException) -> str:
    """Return class and message of an error, short and without traceback."""
    try:
        says = str(error)
    except Exception:  # `__str__` of a foreign error may raise anything
        says = ""
    says = shortened(says.encode("utf-8", "replace").decode(), 500)
    return f"{type(error).__name__}: {says}" if says else type(error).__name__
