"""Moves the content of a data folder aside, so that the next start begins empty; nothing is removed."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from twinkle_server.errors import StoreError
from twinkle_server.failpoints import reach
from twinkle_server.store.filesystem import sync_folder
from twinkle_server.store.inspection import DATABASE, PLACES, SIDES

ASIDE: Final = "set-aside"
_MOVED: Final = (DATABASE, *SIDES, "secret", *PLACES, "server.json")
"""The database is moved first: if a crash leaves the rest without it, the next start refuses the directory."""


def set_aside(data: Path, now: float | None = None) -> Path:
    """Move the database, the secret, checkpoints and all other data of the service to `set-aside/<time>/`.

    Args:
        data: the data folder.
        now: UTC seconds.

    Returns:
        The folder with the old content. To undo, stop the service and move the content back.

    Raises:
        StoreError: a service runs on the directory, or there is nothing to move.
    """
    handle = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"cannot move {data} aside: a service is running on it; stop it first") from error
        return _move(data, time.time() if now is None else now)
    finally:
        os.close(handle)


def _move(data: Path, now: float) -> Path:
    names = [name for name in _MOVED if os.path.lexists(data / name)]
    if not names:
        raise StoreError(f"cannot move {data} aside: it does not contain data of a service; check --data")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    (data / ASIDE).mkdir(mode=0o700, exist_ok=True)
    target = data / ASIDE / stamp
    for attempt in range(2, 1000):
        try:
            target.mkdir(mode=0o700)
            break
        except FileExistsError:
            target = data / ASIDE / f"{stamp}-{attempt}"
    sync_folder(data / ASIDE)
    for name in names:
        reach("aside.before_move")
        (data / name).rename(target / name)
        sync_folder(target)
        sync_folder(data)
    return target
