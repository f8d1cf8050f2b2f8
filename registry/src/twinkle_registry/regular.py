"""Opens regular files only: opening a pipe could block, and a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path, *, follow: bool = True) -> FileIO:
    """Open a regular file for reading, unbuffered; the type is checked on the open file, so that it cannot change.

    Args:
        path: Path of the file.
        follow: Whether the last part of the path may be a symbolic link.

    Raises:
        OSError: There is no such file, or it is not a regular one; `strerror` has its type.
    """
    handle = os.open(path, _FLAGS | (0 if follow else _NO_FOLLOW))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))
        return os.fdopen(handle, "rb", buffering=0)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | Path, *, follow: bool = True) -> bytes:
    """Return the bytes of a regular file; see `open_regular`."""
    with open_regular(path, follow=follow) as file:
        return file.read()


def kind_of(mode: int) -> str:
    """Return the type of file of a `stat` mode, in words."""
    return next((name for test, name in _KINDS if test(mode)), "a regular file")
