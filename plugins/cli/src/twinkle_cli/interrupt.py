"""Ctrl-C while a command imports, where libraries swallow the exception of a signal or turn it into another."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a first Ctrl-C at the end of the block, whatever came of it; a second one at once.

    Outside the main thread, where signals cannot be listened for, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            raise KeyboardInterrupt
        heard = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            raise KeyboardInterrupt
