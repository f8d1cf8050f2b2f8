"""One writer a run folder: a lock that the kernel frees when its process ends, however it ends."""

import contextlib
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from twinkle.errors import OutputError
from twinkle.logging import get_logger

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, the file `.lock` in it, for the length of the block.

    Raises:
        OutputError: another process holds it, or the file cannot be made.
    """
    path = folder / NAME
    try:
        held = _acquired(path)
    except BlockingIOError as error:
        raise OutputError(
            f"{_holder(path)} is still writing the run in {folder}; wait until it has ended, or end it"
        ) from error
    except OSError as error:
        raise OutputError(f"cannot write in the run folder {folder}: {error.strerror or error}") from error
    try:
        with contextlib.suppress(OSError):  # what it says is for people; a full disk is found out elsewhere
            os.ftruncate(held, 0)
            os.write(held, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(held)


def _acquired(path: Path) -> int:
    """Return the descriptor of the file, locked."""
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(held, path)
            if _is_at(path, held):
                return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)  # the one who held it has removed the file meanwhile


def _lock(held: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has none
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        get_logger(__name__).warning(
            "the file system of %s has no locks, so nothing hinders a second process from writing there", path.parent
        )


def _is_at(path: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.fstat(held), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip() or "another process"
    return "another process"
