"""Ctrl-C during a run: the first one asks for a stop after the current step, the second one stops at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Listens for SIGINT while its `with` block lasts.

    Outside the main thread, where signals cannot be listened for, it never asks for a stop.

    Args:
        on_request: called once, at the first SIGINT, for instance to tell the user that it was heard.

    Attributes:
        requested: whether the loop shall stop after the current step.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._on_request = on_request
        self._previous: Any = None
        self._listening = False

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._heard)
            self._listening = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening:
            signal.signal(signal.SIGINT, self._previous)
            self._listening = False

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
