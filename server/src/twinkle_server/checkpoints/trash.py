"""The trash of a data directory: what upkeep or an operator removed, until its time is over.

An entry is `trash/<time>-<place>-<name>`: when it is emptied (UTC seconds), and where it was. One rename moves it there
and one moves it back, so that a crash leaves it in one of both places, whole.
"""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twinkle_server.engine.files import TEMPORARY, sync_directory
from twinkle_server.failpoints import reach
from twinkle_server.ids import new_id

FOLDER: Final = "trash"
PLACES: Final = ("checkpoints", "snapshots", "payloads", "results")
_NAME: Final = re.compile(rf"(\d+)-({'|'.join(PLACES)})-(.+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in the trash.

    Attributes:
        name: of the entry.
        folder: where it was, relative to the data directory.
        until: when it is emptied, in UTC seconds.
        size: bytes.
    """

    name: str
    folder: str
    until: float
    size: int


class Trash:
    """The trash of a data directory.

    Args:
        data: the directory.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / FOLDER

    def entries(self) -> Iterator[Entry]:
        """Yield what is there, in the order in which it is emptied."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._folder))
        except FileNotFoundError:
            return
        for name in sorted(names, key=_until):
            match = _NAME.fullmatch(name)
            size = size_of(self._folder / name)
            if match is not None and size is not None:
                yield Entry(name, f"{match[2]}/{match[3]}", float(match[1]), size)

    def put(self, path: Path, until: float) -> int | None:
        """Move a folder or file of the data directory into the trash.

        Args:
            path: `<data>/<place>/<name>`; a symbolic link is moved and never followed.
            until: when it is emptied, in UTC seconds.

        Returns:
            Its bytes; None if it was gone, or was replaced by another in the meantime, which stays.
        """
        moment = int(until)
        while os.path.lexists(target := self._folder / f"{moment}-{path.parent.name}-{path.name}"):
            moment += 1
        try:
            before = path.lstat()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            reach("trash.before_put")
            path.rename(target)
            if target.lstat().st_ino != before.st_ino:
                target.rename(path)
                return None
        except FileNotFoundError:
            return None
        self._sync(path.parent)
        return size_of(target)

    def put_back(self, entry: Entry) -> bool:
        """Move an entry back to its place; False if something is there, or the entry is gone."""
        place = self._data / entry.folder
        if os.path.lexists(place):
            return False
        reach("trash.before_put_back")
        try:
            os.utime(self._folder / entry.name, follow_symlinks=False)  # a sweep leaves what was changed of late alone
            (self._folder / entry.name).rename(place)
        except FileNotFoundError:
            return False
        self._sync(place.parent)
        return True

    def remove(self, entry: Entry) -> bool:
        """Remove an entry for good; False if it is gone."""
        aside = self._folder / (TEMPORARY + new_id())
        reach("trash.before_remove")
        try:
            (self._folder / entry.name).rename(aside)
        except FileNotFoundError:
            return False
        _erase(aside)
        return True

    def finish(self) -> None:
        """Remove what a crash left of entries that were being removed."""
        for path in self._folder.glob(f"{TEMPORARY}*"):
            _erase(path)

    def _sync(self, place: Path) -> None:
        sync_directory(self._folder)
        sync_directory(place)


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or of the files of a flat folder; None if it is gone."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return found.st_size
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except FileNotFoundError:
        return None


def _until(name: str) -> tuple[int, str]:
    digits = name.partition("-")[0]
    return (int(digits) if digits.isdecimal() else 0, name)


def _erase(path: Path) -> None:
    """Remove a file or folder; another process may be doing the same."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
