"""Tells torchrun which error ended this rank: the file that its summary is made from."""

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
        a function that takes the hook off again.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(error)
        before(kind, error, trace)

    sys.excepthook = hook

    def take_off() -> None:
        # Whoever has put a hook over this one calls it still; then it must stay.
        if sys.excepthook is hook:
            sys.excepthook = before

    return take_off


def report(error: BaseException) -> None:
    """Note that `error` ends this process, and write it to torchrun's error file.

    There may be none, or another writer (torch's `record`) has written it; an interrupt is not an error.
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

    # torchrun calls the earliest error the root cause, and knows whole seconds. A RankError follows another's error.
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
