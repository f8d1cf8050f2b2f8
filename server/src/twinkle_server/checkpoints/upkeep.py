"""What is done to checkpoints from time to time: expiry, the newest K, the sweep into the trash, and its emptying.

The sweep finds what no row names any more, and tells what a row once named from what is of unknown origin. Only the
former, and drafts that no writer finished, go to the trash by themselves. The others are orphans: they may be what a
newer database knew before an older one was restored, so an operator decides (`twinkle server orphans`).
"""

import asyncio
import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, func, select

from twinkle_server.checkpoints.trash import PLACES, Trash, size_of
from twinkle_server.engine.files import TEMPORARY
from twinkle_server.errors import Unavailable
from twinkle_server.ports import Database
from twinkle_server.store import folders
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.records import Key
from twinkle_server.store.retention import Retention
from twinkle_server.store.tables import checkpoints
from twinkle_server.store.tenants import Keys

_log = structlog.get_logger(__name__)
KEPT: Final = 86400.0
"""Seconds that a checkpoint is kept in the trash, where nothing else is set."""
_BRIEF: Final = 600.0
"""Seconds that everything else is kept there: drafts, snapshots, and weights of sampling sessions that ended."""
_ROOM: Final = 256 * 2**20
"""Free bytes below which the disk counts as full, or a fiftieth of the disk if that is less."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
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


@dataclass(frozen=True, slots=True)
class Upkept:
    """What a round did.

    Attributes:
        expired: checkpoints whose time was over.
        surplus: checkpoints beyond the newest K.
        swept: folders and files that went to the trash.
        emptied: folders and files that went from there.
        orphans: folders and files that no row ever named, and that stay.
    """

    expired: int
    surplus: int
    swept: Swept
    emptied: Swept
    orphans: Swept


@dataclass(frozen=True, slots=True)
class Deleted:
    """A checkpoint that was deleted, of which the row is kept: its tenant and bytes."""

    tenant: str
    size: int


class Upkeep:
    """Looks after the checkpoints of a data directory.

    Args:
        data: the directory.
        database: of it.
        table: its checkpoints.
        keys: its keys, whose quotas say how many checkpoints are kept.
        retention: knows what is needed.
        kept: seconds that a checkpoint is kept in the trash.

    Attributes:
        held: returns folders that no row names yet, and that are needed all the same.
        last: what the last round did; None before it.
    """

    def __init__(
        self,
        data: Path,
        database: Database,
        table: Checkpoints,
        keys: Keys,
        retention: Retention,
        kept: float = KEPT,
    ) -> None:
        self._data = data
        self._retention = retention
        self._database = database
        self._table = table
        self._keys = keys
        self._kept = kept
        self._trash = Trash(data)
        self.held: Callable[[], Collection[str]] = frozenset
        self.last: Upkept | None = None

    async def run(self, now: float | None = None, age: float = AGE) -> Upkept:
        """Do one round.

        Args:
            now: UTC seconds.
            age: see `sweep`.
        """
        now = time.time() if now is None else now
        full = False
        try:
            expired = len(await self._table.expire(now))
            surplus = await self._keep_newest(_kept(await self._keys.all()), now)
        except Unavailable as error:  # a full disk: what the trash has may be what it lacks
            expired = surplus = 0
            full = _is_full(error)
        referenced = set(self.held()) | await needed(self._retention)
        await self._bring_back(referenced)  # `trash restore` may have written a row just before a sweep
        named, deleted = await folders.all_named(self._database), await self._deleted()
        keep = self._kept

        def until(folder: str) -> float:
            return now + (keep if folder in deleted else _BRIEF)

        swept = await asyncio.to_thread(sweep, self._data, referenced, named, until, age, now)
        crowded = await self._crowded_trash(deleted)
        emptied = await asyncio.to_thread(self._empty, now, full, crowded)
        left = await asyncio.to_thread(orphans, self._data, referenced, named, age, now)
        if not full:
            await folders.forget(self._database, await asyncio.to_thread(self._absent, named - referenced))
        self.last = Upkept(expired, surplus, swept, emptied, Swept(len(left), sum(each.size for each in left)))
        if expired or surplus or swept.entries or emptied.entries:
            _log.info(
                "upkeep",
                expired=expired,
                surplus=surplus,
                trashed=swept.entries,
                trashed_bytes=swept.size,
                emptied=emptied.entries,
                emptied_bytes=emptied.size,
            )
        return self.last

    async def bring_back(self) -> list[str]:
        """Move out of the trash what a row names and is missing: an older database may name what was removed since."""
        return await self._bring_back(await needed(self._retention))

    async def _bring_back(self, referenced: Collection[str]) -> list[str]:
        def work() -> list[str]:
            found = [entry for entry in self._trash.entries() if entry.folder in referenced]
            return [entry.folder for entry in found if self._trash.put_back(entry)]

        restored = await asyncio.to_thread(work)
        if restored:
            _log.warning("restored folders from the trash that the database references", folders=restored)
        return restored

    async def make_room(self) -> Swept:
        """Empty the trash, what would be emptied first before the rest, until the disk is not full; see `_ROOM`."""
        if not await asyncio.to_thread(self._is_full):
            return Swept()
        emptied = await asyncio.to_thread(self._empty, 0.0, False, ())
        if emptied.entries:
            _log.warning("the disk is full: emptied the trash", entries=emptied.entries, bytes=emptied.size)
        return emptied

    def _is_full(self) -> bool:
        usage = shutil.disk_usage(self._data)
        return usage.free < min(_ROOM, usage.total // 50)

    async def figures(self) -> dict[str, dict[str, int]]:
        """Return entries and bytes of the trash now, and of orphans as of the last round."""
        trash = await asyncio.to_thread(trash_figures, self._data)
        left = self.last.orphans if self.last is not None else None
        return {"trash": trash, **({} if left is None else {"orphans": {"entries": left.entries, "bytes": left.size}})}

    def _empty(self, now: float, full: bool, crowded: Collection[str]) -> Swept:
        """Remove from the trash what is over; where the disk is full, as much more as makes room.

        Args:
            now: UTC seconds.
            full: a write has failed for want of room: everything is removed.
            crowded: names of entries that are removed as well.
        """
        emptied = Swept()
        self._trash.finish()
        for entry in list(self._trash.entries()):
            over = full or entry.until <= now or entry.name in crowded
            if (over or self._is_full()) and self._trash.remove(entry):
                emptied.entries += 1
                emptied.size += entry.size
        return emptied

    async def _crowded_trash(self, deleted: Mapping[str, Deleted]) -> set[str]:
        """Return the oldest entries of tenants whose trash is larger than what a quota lets them store."""
        limits = _limits(await self._keys.all())
        if not limits:
            return set()
        entries = await asyncio.to_thread(lambda: list(self._trash.entries()))
        total: dict[str, int] = {}
        over: set[str] = set()
        for entry in reversed(entries):
            owner = deleted.get(entry.folder)
            if owner is None or owner.tenant not in limits:
                continue
            total[owner.tenant] = total.get(owner.tenant, 0) + entry.size
            if total[owner.tenant] > limits[owner.tenant]:
                over.add(entry.name)
        return over

    def _absent(self, paths: Collection[str]) -> set[str]:
        """Return those of some folders that are neither in their place nor in the trash."""
        there = {entry.folder for entry in self._trash.entries()}
        return {folder for folder in paths if folder not in there and not (self._data / folder).exists()}

    async def _deleted(self) -> dict[str, Deleted]:
        """Across tenants: return the checkpoints that were deleted, by folder."""
        query = select(checkpoints.c.folder, checkpoints.c.tenant, checkpoints.c.size).where(
            checkpoints.c.deleted.is_not(None)
        )

        def work(connection: Connection) -> dict[str, Deleted]:
            return {row.folder: Deleted(row.tenant, row.size) for row in connection.execute(query)}

        return await self._database.read(work)

    async def _keep_newest(self, kept: Mapping[str, int], now: float) -> int:
        count = 0
        for tenant, keep in kept.items():
            for run, kind in await self._crowded(tenant, keep):
                count += len(await self._table.surplus(tenant, run, kind, keep, now))
        return count

    async def _crowded(self, tenant: str, keep: int) -> list[tuple[str, str]]:
        """Return the runs and kinds of which a tenant has more than so many checkpoints."""
        query = (
            select(checkpoints.c.run, checkpoints.c.kind)
            .where(checkpoints.c.tenant == tenant, checkpoints.c.deleted.is_(None))
            .group_by(checkpoints.c.run, checkpoints.c.kind)
            .having(func.count() > keep)
        )

        def work(connection: Connection) -> list[tuple[str, str]]:
            return [(run, kind) for run, kind in connection.execute(query)]

        return await self._database.read(work)


def _kept(keys: list[Key]) -> dict[str, int]:
    """Return how many checkpoints tenants keep; of several keys the most generous counts."""
    kept: dict[str, int] = {}
    for key in keys:
        if keep := key.quotas.get("keep"):
            kept[key.tenant] = max(int(keep), kept.get(key.tenant, 0))
    return kept


def _limits(keys: list[Key]) -> dict[str, int]:
    """Return how many bytes tenants may store; one of whose keys is not limited is left out."""
    limits: dict[str, int] = {}
    free = {key.tenant for key in keys if not key.quotas.get("bytes")}
    for key in keys:
        if key.tenant not in free:
            limits[key.tenant] = max(int(key.quotas["bytes"]), limits.get(key.tenant, 0))
    return limits


async def needed(retention: Retention) -> set[str]:
    """Return all paths, relative to the data directory, that a row names."""
    found = set(await retention.referenced())
    found.update(f"payloads/{name}" for name in await retention.payload_files())
    found.update(f"results/{name}" for name in await retention.result_files())
    return found


def trash_figures(data: Path) -> dict[str, int]:
    """Return how many entries the trash has, and their bytes."""
    sizes = [entry.size for entry in Trash(data).entries()]
    return {"entries": len(sizes), "bytes": sum(sizes)}


def _is_full(error: BaseException | None) -> bool:
    """Return whether a fault, or what caused it, is that of a full disk."""
    for each in _causes(error):
        code = getattr(each, "sqlite_errorcode", None)
        if (isinstance(each, OSError) and each.errno in _FULL) or (
            code is not None and code & 0xFF == sqlite3.SQLITE_FULL
        ):
            return True
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        origin = getattr(error, "orig", None)
        error = origin if isinstance(origin, BaseException) else error.__cause__


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
