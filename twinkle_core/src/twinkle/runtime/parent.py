"""Ends a rank whose torchrun is gone: nobody would stop it, and a resumed run would meet it in its folder."""

import functools
import os
import signal
import threading
import time

from twinkle.logging import get_logger

STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun's agent gives each process that it starts."""


@functools.cache
def end_with_torchrun(interval: float = 1.0, patience: float = 600.0) -> None:
    """Watch the agent of torchrun, if it is the parent of this process, and stop as soon as it has died.

    A rank gets SIGTERM first, which a recipe answers with a checkpoint, and SIGKILL where that was not enough. torchrun
    itself stops its ranks on every other way out; only a SIGKILL leaves it no time to.

    Args:
        interval: seconds between two looks.
        patience: seconds from SIGTERM to SIGKILL.
    """
    if STARTED_BY_TORCHRUN in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(), interval, patience), daemon=True).start()


def _watch(parent: int, interval: float, patience: float) -> None:
    while os.getppid() == parent:
        time.sleep(interval)
    get_logger(__name__).error("torchrun (process %d), which started this rank, is gone; the rank stops too", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience)
    os.kill(os.getpid(), signal.SIGKILL)
