"""Writes the error that ended this rank to the file from which torchrun makes its summary."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_failed = False


def has_failed() -> bool:
    """Return whether an error has ended this process, or is about to."""
    return _failed


def report_errors() -> Callable[[], None]:
    """Install an excepthook that reports an uncaught error, then calls the previous one.

    Returns:
        A function that removes the hook.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(error)
        before(kind, error, trace)

    sys.excepthook = hook

    def take_off() -> None:
        # A hook that was installed later still calls this one, so it must stay.
        if sys.excepthook is hook:
            sys.excepthook = before

    return take_off


def report(error: BaseException) -> None:
    """Record that `error` ends this process, and write it to torchrun's error file.

    The file may not be configured, or torch's `record` may have written it already. An interrupt is not an error.
    """
    global _failed
    _failed = True
    path = os.environ.get(ERROR_FILE, "")
    if not path or isinstance(error, KeyboardInterrupt):
        return
    import json

    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:  # noqa: PTH123 - `x` of open
        json.dump(_entry(error), file)


def _entry(error: BaseException) -> dict[str, Any]:
    """Return the error in torch's format: `torch.distributed.elastic.multiprocessing.errors` shows `py_callstack`."""
    import traceback

    from twinkle.errors import RankError

    # torchrun reports the earliest error as the root cause, with a resolution of one second. A RankError follows the
    # error of another rank.
    moment = int(time.time()) + isinstance(error, RankError)
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(moment),
            },
        }
    }
