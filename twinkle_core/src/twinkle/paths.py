"""Where Twinkle keeps what it can make again, and how it writes what must not be lost half-way."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from twinkle.errors import OutputError


def cache_dir(*parts: str) -> Path:
    """Return (and create) a folder below `$TWINKLE_CACHE_DIR`, by default `~/.cache/twinkle`."""
    root = os.environ.get("TWINKLE_CACHE_DIR")
    folder = (Path(root) if root else Path.home() / ".cache" / "twinkle").joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Fill a directory so that `target` is either absent, the old one, or the whole new one, at every moment.

    Yields a temporary sibling; when the block ends well, its files are synced and it takes the name `target` (an
    existing directory of that name is moved aside first and removed last). When the block raises, nothing remains.

    Raises:
        OutputError: the parent cannot be created or written.
    """
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        raise OutputError(
            f"cannot write {target}: {error.strerror or error}; choose another output folder or free this one"
        ) from error
    try:
        yield work
        _sync_tree(work)
        _swap(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


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


def _swap(work: Path, target: Path) -> None:
    work.chmod(0o755)  # mkdtemp made it private; results are for reading
    if not target.exists():
        work.rename(target)
        _sync_directory(target.parent)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(aside / target.name)
    try:
        work.rename(target)
    except OSError:
        (aside / target.name).rename(target)
        raise
    _sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
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
