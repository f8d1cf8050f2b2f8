"""The cache folder, and atomic writes of files and directories."""

import contextlib
import errno
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from twinkle.errors import OutputError, TwinkleError

_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors gives the error number only in its message
_PATIENCE = 1.0  # seconds; a running writer needs a hundredth of this between its two renames
_DAY = 86_400.0
_own: set[Path] = set()  # siblings in use by this process; others with its process id were left by a dead process


def cache_dir(*parts: str) -> Path:
    """Return (and create) a folder of the cache.

    The cache is `$TWINKLE_CACHE_DIR`, by default `$XDG_CACHE_HOME/twinkle`, or else `~/.cache/twinkle`.
    """
    root = os.environ.get("TWINKLE_CACHE_DIR")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinkle"
    folder = (Path(root) if root else usual).joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Write a directory atomically: at every moment `target` is absent, the old directory, or the complete new one.

    Yields a temporary sibling directory. When the block succeeds, its files are synced and it is renamed to `target`
    (an existing directory of that name is moved aside first and removed last). When the block raises, the temporary
    directory is removed. The next writer of `target` removes what a killed process left; readers call `recovered`.

    Raises:
        OutputError: the parent cannot be created or written, or the disk is full.
    """
    target = recovered(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_remains(target)
        work = _new_sibling(target, "tmp")
    except OSError as error:
        raise OutputError(
            f"cannot write {target}: {error.strerror or error}; choose another output folder or free this one"
        ) from error
    try:
        yield work
        _sync_tree(work)
        _swap(work, target)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if reason := _no_room(error):
            raise OutputError(
                f"cannot write {target}: {reason}; nothing of it is left, and what stood there before still stands; "
                "make room, or choose another output folder"
            ) from error
        raise
    finally:
        _own.discard(work)


def recovered(target: Path) -> Path:
    """Return `target`, put back if a process was killed while it replaced this directory.

    Such a process has moved the old directory aside and has not yet renamed the new one. Call this before you read a
    directory that `new_directory` writes; if the directory exists, the cost is one `stat`.
    """
    target = Path(target)
    if target.exists() or not target.parent.is_dir():
        return target
    for aside, is_left in _siblings(target, "old"):
        if not is_left:
            time.sleep(_PATIENCE)
        with contextlib.suppress(OSError):  # empty, or its writer or another reader was faster
            if not target.exists():
                (aside / target.name).rename(target)
                _sync_directory(target.parent)
    return target


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step (temporary sibling, fsync, rename)."""
    path = Path(path)
    work = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with work.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _no_room(error: BaseException) -> str:
    """Return the system's message if `error` says that the disk is full, else an empty text."""
    match = _RUST_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    return os.strerror(number) if number in _NO_ROOM and not isinstance(error, TwinkleError) else ""


def _new_sibling(target: Path, ending: str) -> Path:
    """Create a directory beside `target` whose name has the id of this process."""
    suffix = f".{socket.gethostname()}.{os.getpid()}.{ending}"
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=suffix, dir=target.parent))
    _own.add(folder)
    return folder


def _siblings(target: Path, ending: str) -> list[tuple[Path, bool]]:
    """Return the directories of `_new_sibling` beside `target`, each with whether its process has ended."""
    shape = re.compile(rf"\.{re.escape(target.name)}\.\w+\.(?P<host>.*)\.(?P<process>\d+)\.{ending}")
    siblings = [(path, match) for path in target.parent.iterdir() if (match := shape.fullmatch(path.name))]
    return [(path, _is_left(path, match["host"], int(match["process"]))) for path, match in siblings]


def _is_left(path: Path, host: str, process: int) -> bool:
    if host != socket.gethostname():
        with contextlib.suppress(OSError):
            return time.time() - path.stat().st_mtime > _DAY
        return False
    if process == os.getpid():
        return path not in _own
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it runs, and belongs to another user
    return False


def _clear_remains(target: Path) -> None:
    # If the target could not be put back, the directory that was moved aside is its only copy.
    old = _siblings(target, "old") if target.exists() else []
    for path, is_left in [*_siblings(target, "tmp"), *old]:
        if is_left:
            shutil.rmtree(path, ignore_errors=True)


def _swap(work: Path, target: Path) -> None:
    work.chmod(0o755)  # mkdtemp makes it private, but other users may read results
    if not target.exists():
        work.rename(target)
        _sync_directory(target.parent)
        return
    aside = _new_sibling(target, "old")
    try:
        target.rename(aside / target.name)
        work.rename(target)
    except BaseException:
        if not target.exists():
            (aside / target.name).rename(target)
        aside.rmdir()
        raise
    finally:
        _own.discard(aside)
    _sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    """Sync a tree to disk; files that a library made private to their owner get the usual permissions."""
    probe = folder / ".permissions"
    probe.touch()
    usual = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode | usual)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
