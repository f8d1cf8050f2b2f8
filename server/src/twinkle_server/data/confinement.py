"""Confines a worker process: code in it reads no files but those that the service needs, and opens no connection."""

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

_READ: Final = frozenset({"open", "os.listdir", "os.scandir", "os.chdir"})
_WRITE: Final = frozenset(
    {
        "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
        "os.chown", "os.utime", "shutil.rmtree", "shutil.copyfile", "shutil.move", "tempfile.mkstemp",
        "tempfile.mkdtemp",
    }
)  # fmt: skip
_NETWORK: Final = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"})
_PROCESSES: Final = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "os.kill"}
)
_DEVICES: Final = ("/dev/null", "/dev/urandom", "/dev/zero")


class NotConfined(PermissionError):
    """The code of a worker asked for something that requests may not reach."""


def confine(readable: Iterable[str], writable: Iterable[str] = (), *, network: bool = False) -> None:
    """Confine this process for the rest of its life.

    An audit hook of the interpreter refuses everything else with `NotConfined`. It is the second wall: requests cannot
    name files in the first place (`arguments`), and hostile native code is not held by it.

    Args:
        readable: files and folders that may be read, beside the interpreter and its packages.
        writable: folders that may be written, too.
        network: whether connections may be opened.
    """
    writing = tuple(_resolved(writable))
    reading = (*_resolved([*readable, *_code_folders(), *_DEVICES]), *writing)

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _READ:
            _check_read(event, arguments, reading, writing)
        elif event in _WRITE:
            if not _within(arguments[0], writing):
                raise NotConfined("data resources do not write files on the service")
        elif event in _PROCESSES:
            raise NotConfined("data resources do not start processes on the service")
        elif event in _NETWORK and not network:
            raise NotConfined("data resources do not open connections; send the content instead of its address")

    sys.addaudithook(check)


def _check_read(event: str, arguments: tuple[Any, ...], reading: tuple[str, ...], writing: tuple[str, ...]) -> None:
    path = arguments[0]
    if path is None or isinstance(path, int):  # a descriptor that is open already; None lists the current folder
        return
    flags = arguments[2] if event == "open" else 0
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    allowed = (*writing, "/dev/null") if writes else reading
    if not _within(path, allowed):
        raise NotConfined("data resources do not read files of the service; send the content instead of a path")


def _within(path: Any, folders: tuple[str, ...]) -> bool:
    try:
        real = os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError):
        return False
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)


def _resolved(paths: Iterable[str]) -> list[str]:
    real = [os.path.realpath(path) for path in paths if path]
    return [path for path in real if path != os.sep]


def _code_folders() -> list[str]:
    """Return the folders of the interpreter and of importable packages."""
    base = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), "/usr/share/zoneinfo"]
    return [*base, *(entry for entry in sys.path if entry and Path(entry).is_absolute())]
