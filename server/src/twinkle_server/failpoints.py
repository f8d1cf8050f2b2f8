"""Failpoints for tests: `FAILPOINT=name[:visit[:action]]` in the environment kills the process or fails a disk access.

`action` is "kill" (the default), "enospc" or "eio"; `visit` counts from 1. A kill is SIGKILL, without any cleanup.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

ERRORS: Final = {"enospc": errno.ENOSPC, "eio": errno.EIO}


class _Failpoint:
    def __init__(self, setting: str) -> None:
        name, visit, action, *rest = [*setting.split(":"), "", ""]
        self.name, self.action, self.left = name, action or "kill", int(visit or 1)
        if any(rest) or self.left < 1 or self.action not in ("kill", *ERRORS):
            raise ValueError(
                f"FAILPOINT={setting!r}: name[:visit[:action]], visit >= 1, action one of kill, enospc, eio"
            )
        self.lock = threading.Lock()

    def reach(self, name: str) -> None:
        if name != self.name:
            return
        with self.lock:
            self.left -= 1
            due = self.left == 0
        if due and self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if due:
            number = ERRORS[self.action]
            raise OSError(number, f"{os.strerror(number)} (failpoint {self.name})")


Watcher = Callable[[str], None]
_watcher: Watcher | None = _Failpoint(os.environ["FAILPOINT"]).reach if os.environ.get("FAILPOINT") else None


def watch(watcher: Watcher | None) -> Watcher | None:
    """Set a function that is called with the name of every failpoint of this process; it may raise.

    Args:
        watcher: the function, or None.

    Returns:
        The previous function.
    """
    global _watcher
    before, _watcher = _watcher, watcher
    return before


def reach(name: str) -> None:
    """Mark a place where a crash must do no harm.

    Args:
        name: `area.when`, unique in the source; a literal, because a test lists them from the source.

    Raises:
        OSError: the environment requests it at this visit.
    """
    if _watcher is not None:
        _watcher(name)
