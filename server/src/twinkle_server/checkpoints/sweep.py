"""Removes folders and files that no row speaks of: what a crash left, and what was deleted."""

import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from twinkle_server.engine.files import TEMPORARY
from twinkle_server.ids import new_id

AGE = 3600.0
"""Seconds that everything is kept, for whoever is about to write its row."""
PLACES = ("checkpoints", "snapshots", "payloads", "results")


@dataclass(slots=True)
class Swept:
    """What a sweep removed.

    Attributes:
        entries: folders and files.
        size: bytes in them.
    """

    entries: int = 0
    size: int = 0


def orphans(data: Path, referenced: Collection[str], age: float = AGE, now: float | None = None) -> Iterator[Path]:
    """Yield folders and files that nothing speaks of and that are old enough.

    Args:
        data: the data directory.
        referenced: paths relative to it that are in use, read after `now`.
        age: seconds that everything is kept.
        now: UTC seconds.
    """
    limit = (time.time() if now is None else now) - age
    for place in PLACES:
        try:
            entries = list(os.scandir(data / place))
        except FileNotFoundError:
            continue
        for entry in entries:
            if f"{place}/{entry.name}" in referenced and not entry.name.startswith(TEMPORARY):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if max(found.st_mtime, found.st_ctime) < limit:
                yield data / place / entry.name


def sweep(data: Path, referenced: Collection[str], age: float = AGE, now: float | None = None) -> Swept:
    """Remove what `orphans` finds; symbolic links are removed and never followed.

    An entry that is replaced in the meantime (an operation is done again, say) is put back.
    """
    swept = Swept()
    for path in list(orphans(data, referenced, age, now)):
        size = _remove(path)
        if size is not None:
            swept.entries += 1
            swept.size += size
    return swept


def _remove(path: Path) -> int | None:
    """Remove a folder or file and return its bytes; None if it was gone or has become another."""
    aside = path.with_name(TEMPORARY + new_id())
    try:
        before = path.lstat()
        path.rename(aside)
        if aside.lstat().st_ino != before.st_ino:
            aside.rename(path)
            return None
        if not stat.S_ISDIR(before.st_mode):
            aside.unlink()
            return before.st_size
        size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(aside))
        shutil.rmtree(aside)
    except FileNotFoundError:
        return None
    return size
