"""Brings trees into the store: a tree appears whole, by one rename, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..cache import DIRECTORY_VARIABLE
from ..errors import SettingsError
from .listing import listing_text
from .reference import Origin
from .store import LISTING, Store
from .tree import Tree

_DAY = 86_400.0
_ATTEMPTS = 10


@contextlib.contextmanager
def incoming(store: Store) -> Iterator[Path]:
    """Give an empty folder for a download; whatever is not kept is gone when the block ends.

    Raises:
        SettingsError: The store cannot be written.
    """
    with _writable(store):
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = store.root / "incoming"
        place.mkdir(exist_ok=True)
        _clear(place)
        work = Path(tempfile.mkdtemp(dir=place))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def keep(store: Store, arrived: Tree, origin: Origin) -> Tree:
    """Move a tree out of `incoming` into the store, and note which commit it is; return the tree there.

    Raises:
        SettingsError: The store cannot be written; then it is as it was.
    """
    arrived.verify()
    with _writable(store):
        if not store.has_whole(arrived.digest):
            _place(store, arrived)
        note = store.note(origin)
        note.parent.mkdir(exist_ok=True)
        _write(note, f"{arrived.digest} {origin}")
    return Tree(store.place(arrived.digest) / "files", arrived.files)


@contextlib.contextmanager
def _writable(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"the store of code, {store.root}, cannot be written: {error.strerror or error}; make room, or choose "
            f"another cache folder by {DIRECTORY_VARIABLE}"
        ) from error


def _place(store: Store, arrived: Tree) -> None:
    target, work = store.place(arrived.digest), arrived.folder.parent / "tree"
    work.mkdir()
    for path in arrived.files:
        (work / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (arrived.folder / path).rename(work / "files" / path)
    (work / LISTING).write_text(listing_text(arrived.files), "utf-8", newline="\n")
    for file in work.rglob("*"):
        if file.is_file():
            _sync(file)
    target.parent.mkdir(exist_ok=True)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            work.rename(target)
            return
        # Another process stored the same tree, which is then whole, or what is there is damaged.
        if store.has_whole(arrived.digest):
            return
        with contextlib.suppress(OSError):
            target.rename(arrived.folder.parent / f"damaged-{time.monotonic_ns()}")
    work.rename(target)


def _clear(place: Path) -> None:
    """Remove what killed processes left a day ago."""
    for left in place.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    handle, work = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(work).replace(path)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
