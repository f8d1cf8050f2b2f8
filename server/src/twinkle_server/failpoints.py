"""Places where a test makes the process die, or a disk fail: `FAILPOINT=name[:visit[:action]]` in its environment.

`action` is "kill" (the default), "enospc" or "eio"; `visit` counts from 1. A kill is SIGKILL: nothing is cleaned up.
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
    """Call a function at every failpoint of this process, with its name; it may raise.

    Args:
        watcher: the function; None watches nothing.

    Returns:
        The function that was called before.
    """
    global _watcher
    before, _watcher = _watcher, watcher
    return before


def reach(name: str) -> None:
    """Say that a place has come where a crash must do no harm.

    Args:
        name: `area.when`, unique in the source; a literal, for a test lists them by reading it.

    Raises:
        OSError: the environment asks for it, in this place, at this visit.
    """
    if _watcher is not None:
        _watcher(name)
