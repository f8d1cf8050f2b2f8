"""Calls of a service in a thread, in their order, so that a slow answer holds no step up."""

import queue
import threading
import time
from collections.abc import Callable


class Background:
    """A thread that makes calls one after the other, until the first one that fails.

    Attributes:
        error: what that one raised.
    """

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], object]) -> None:
        """Make a call when those before it are made."""
        self._calls.put(call)

    def close(self, seconds: float) -> None:
        """Wait until all calls are made.

        Raises:
            TimeoutError: they are not after so many seconds.
        """
        self._calls.put(None)
        began = time.monotonic()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"its answers take longer than {time.monotonic() - began:.0f} seconds")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self.error is None:
                try:
                    call()
                except Exception as error:  # the thread that asks raises it
                    self.error = error
