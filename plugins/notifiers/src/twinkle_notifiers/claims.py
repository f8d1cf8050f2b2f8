"""Selects the rank that reports a failure: the first that claims it; the others wait for it.

On one machine a claim is a file that only one process can create; between machines, a number in the store through which
torchrun's ranks found each other.
"""

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

_DAY = 86_400.0
_SENT = "sent"
_STORE_SECONDS = 3.0


class Claim:
    """The claim to report failure `number` of this process and of all other ranks.

    Attributes:
        won: whether this process reports it.
    """

    def __init__(self, number: int) -> None:
        self._path = _file(number) if _has_neighbours() else None
        self.won = _created(self._path) and _is_first_machine(number)

    def settle(self) -> None:
        """Say that the message is sent, or given up."""
        if self._path is not None and self.won:
            with contextlib.suppress(OSError):
                self._path.write_text(_SENT, "utf-8")

    def wait(self, seconds: float) -> None:
        """Wait until the process that won has settled: when we end, torchrun ends that one too."""
        end = time.monotonic() + seconds
        while self._path is not None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if self._path.read_text("utf-8") == _SENT:
                    return
            time.sleep(0.05)


def _has_neighbours() -> bool:
    from twinkle.platform import Platform

    return Platform.get_world_size() > 1


def _created(path: Path | None) -> bool:
    if path is None:
        return True
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    except OSError:
        return True  # rather two messages than none
    return True


def _file(number: int) -> Path | None:
    """Return the file of this claim; None if it cannot be written."""
    from twinkle.paths import cache_dir

    parent = os.getppid()  # the torchrun of this machine
    parts = (
        socket.gethostname(), parent, _start_of(parent), os.environ.get("TORCHELASTIC_RUN_ID"),
        os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("MASTER_PORT"), number,
    )  # fmt: skip
    try:
        folder = cache_dir("failures")
        _clear(folder)
    except OSError:
        return None
    return folder / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _start_of(process: int) -> str:
    """Return when a process began, in ticks, where the system tells; its number alone may be used again."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DAY:
                path.unlink()


def _is_first_machine(number: int) -> bool:
    """Ask the store of the process group, where there are several machines; without an answer, say yes."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", ""):
        return True
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return True
    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # the store of a broken group raises what it likes
            store = dist.distributed_c10d._get_default_store()
            answers.append(store.add(f"twinkle/failure/{number}", 1))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_STORE_SECONDS)
    return not answers or answers[0] == 1
