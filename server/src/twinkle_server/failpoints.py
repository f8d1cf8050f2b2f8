"""Places where a test makes the process die, or a disk fail: `FAILPOINT=name[:visit[:action]]` in its environment.

`action` is "kill" (the default), "enospc" or "eio"; `visit` counts from 1. A kill is SIGKILL: nothing is cleaned up.
"""

import errno
import os
import signal
import threading
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

    def visit(self) -> None:
        with self.lock:
            self.left -= 1
            due = self.left == 0
        if due and self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if due:
            number = ERRORS[self.action]
            raise OSError(number, f"{os.strerror(number)} (failpoint {self.name})")


_wanted = _Failpoint(os.environ["FAILPOINT"]) if os.environ.get("FAILPOINT") else None


def reach(name: str) -> None:
    """Say that a place has come where a crash must do no harm.

    Args:
        name: `area.when`, unique in the source; a literal, for a test lists them by reading it.

    Raises:
        OSError: the environment asks for it, in this place, at this visit.
    """
    if _wanted is not None and _wanted.name == name:
        _wanted.visit()
