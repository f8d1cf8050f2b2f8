"""Finds what no row names any more, and tells what a row once named from what is of unknown origin.

Only the former, and drafts that no writer finished, go to the trash by themselves. The others are orphans: they may be
what a newer database knew before an older one was restored, so an operator decides (`twinkle server orphans`).
"""

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from twinkle_server.checkpoints.trash import PLACES, Trash, size_of
from twinkle_server.engine.files import TEMPORARY

AGE = 3600.0
"""Seconds that everything is kept, for whoever is about to write its row."""


@dataclass(slots=True)
class Swept:
    """What a sweep moved to the trash.

    Attributes:
        entries: folders and files.
        size: bytes in them.
    """

    entries: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Orphan:
    """A folder or file that no row ever named.

    Attributes:
        folder: relative to the data directory.
        changed: when it was last changed, in UTC seconds.
        size: bytes.
    """

    folder: str
    changed: float
    size: int


def unreferenced(
    data: Path, referenced: Collection[str], age: float = AGE, now: float | None = None
) -> Iterator[tuple[str, float]]:
    """Yield folders and files that no row names and that are old enough, with the time of their last change.

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
            if f"{place}/{entry.name}" in referenced and not is_draft(entry.name):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            changed = max(found.st_mtime, found.st_ctime)
            if changed < limit:
                yield f"{place}/{entry.name}", changed


def sweep(
    data: Path,
    referenced: Collection[str],
    named: Collection[str],
    until: Callable[[str], float],
    age: float = AGE,
    now: float | None = None,
) -> Swept:
    """Move to the trash what a row named and no row names any more, and drafts.

    Args:
        data: the data directory.
        referenced: paths relative to it that are in use, read after `now`.
        named: paths that a row has named at any time.
        until: returns when a path is emptied from the trash, in UTC seconds.
        age: seconds that everything is kept.
        now: UTC seconds.
    """
    swept, trash = Swept(), Trash(data)
    for folder, _ in list(unreferenced(data, referenced, age, now)):
        if folder not in named and not is_draft(folder.partition("/")[2]):
            continue
        size = trash.put(data / folder, until(folder))
        if size is not None:
            swept.entries += 1
            swept.size += size
    return swept


def orphans(
    data: Path, referenced: Collection[str], named: Collection[str], age: float = AGE, now: float | None = None
) -> list[Orphan]:
    """Return folders and files that no row ever named, oldest first; drafts are none."""
    found = []
    for folder, changed in unreferenced(data, referenced, age, now):
        size = size_of(data / folder)
        if folder not in named and not is_draft(folder.partition("/")[2]) and size is not None:
            found.append(Orphan(folder, changed, size))
    return sorted(found, key=lambda each: (each.changed, each.folder))


def is_draft(name: str) -> bool:
    """Return whether a name is that of something that its writer did not finish."""
    return name.startswith(TEMPORARY)
