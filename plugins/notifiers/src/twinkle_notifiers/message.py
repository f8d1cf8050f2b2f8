"""The message about a failure: the error, its place, and the traceback unless it is an error of Twinkle."""

import datetime
import os
import socket
import traceback

from twinkle.errors import TwinkleError
from twinkle.platform import Platform

FRAMES = 12
_LONGEST_LINE = 1000


def failure_text(error: BaseException, *, context: str = "", name: str | None = None) -> str:
    """Return the message about a failed run.

    Args:
        error: what ended it; of its traceback the last frames are shown. An error of ours comes without: its text says
            what to do, and the frames are our own.
        context: what was going on, in words.
        name: what the run is called.
    """
    told = traceback.TracebackException.from_exception(error, limit=-FRAMES)
    summary = "".join(told.format_exception_only()).strip()
    if len(summary) > _LONGEST_LINE:
        summary = f"{summary[:_LONGEST_LINE]} ..."
    lines = [f"Twinkle: {name or 'a run'} failed", summary, *([context] if context else []), _place()]
    if isinstance(error, TwinkleError):
        return "\n".join(lines)
    return "\n".join([*lines, "", "".join(told.format()).rstrip()])


def _place() -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    size = Platform.get_world_size()
    rank = f"rank {Platform.get_rank()} of {size}, " if size > 1 else ""
    return f"{rank}{socket.gethostname()}, process {os.getpid()}, {now}"
