"""Ctrl-C during a run: the first one asks for a stop after the current step, the second one stops at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens for SIGINT and SIGTERM (which schedulers of clusters send, and torchrun) while its `with` block lasts.

    Outside the main thread, where signals cannot be listened for, it never asks for a stop.

    Args:
        on_request: called once, at the first signal, for instance to tell the user that it was heard.

    Attributes:
        requested: whether the loop shall stop after the current step.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._on_request = on_request
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._heard) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop was requested.

        For places where stopping is safe. An exception out of the signal itself may come while a library is imported,
        which can swallow it, or turn it into an error of its own.
        """
        if self.requested:
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
