"""Periodic upkeep of checkpoints: expiry, the limit on their number, the sweep into the trash, and its emptying.

The sweep finds data that no row names, and distinguishes data that a row once named from data of unknown origin. Only
the former, and files of interrupted writes, are moved to the trash automatically. The rest are orphans: a restored
older database may not know them, so an operator decides (`twinkle server orphans`).
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
"""Default seconds that a checkpoint is kept in the trash."""
_BRIEF: Final = 600.0
"""Seconds that other data is kept there: drafts, snapshots, and weights of ended sampling sessions."""
_ROOM: Final = 256 * 2**20
"""Free bytes below which the disk counts as full; at most a fiftieth of the disk."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
AGE = 3600.0
"""Minimum age in seconds of swept data, because its row may not be written yet."""


@dataclass(slots=True)
class Swept:
    """Data moved or removed by a sweep.

    Attributes:
        entries: number of folders and files.
        size: in bytes.
    """

    entries: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Orphan:
    """A folder or file that no row ever named.

    Attributes:
        folder: relative to the data folder.
        changed: time of its last change in UTC seconds.
        size: in bytes.
    """

    folder: str
    changed: float
    size: int


@dataclass(frozen=True, slots=True)
class UpkeepReport:
    """The result of a round of upkeep.

    Attributes:
        expired: number of expired checkpoints.
        surplus: number of checkpoints deleted above the quota.
        swept: folders and files moved to the trash.
        emptied: folders and files removed from the trash.
        orphans: folders and files that no row ever named; they are kept.
    """

    expired: int
    surplus: int
    swept: Swept
    emptied: Swept
    orphans: Swept


@dataclass(frozen=True, slots=True)
class Deleted:
    """A deleted checkpoint whose row is kept: its tenant and size."""

    tenant: str
    size: int


class Upkeep:
    """Maintains the checkpoints of a data folder.

    Args:
        data: the directory.
        database: of the directory.
        table: its checkpoints.
        keys: its keys, whose quotas limit the number of checkpoints.
        retention: tells which folders are needed.
        kept: seconds that a checkpoint is kept in the trash.

    Attributes:
        held: returns folders that are needed although no row names them yet.
        last: result of the last round; None before the first.
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
        self.last: UpkeepReport | None = None

    async def run(self, now: float | None = None, age: float = AGE) -> UpkeepReport:
        """Run one round.

        Args:
            now: UTC seconds.
            age: see `sweep`.
        """
        now = time.time() if now is None else now
        full = False
        try:
            expired = len(await self._table.expire(now))
            surplus = await self._keep_newest(_kept(await self._keys.all()), now)
        except Unavailable as error:  # if the disk is full, emptying the trash may help
            expired = surplus = 0
            full = _is_full(error)
        referenced = set(self.held()) | await needed(self._retention)
        await self._restore_named(referenced)  # `trash restore` may have written a row just before a sweep
        named, deleted = await folders.all_named(self._database), await self._deleted()
        keep = self._kept

        def until(folder: str) -> float:
            return now + (keep if folder in deleted else _BRIEF)

        swept = await asyncio.to_thread(sweep, self._data, referenced, named, until, age, now)
        crowded = await self._crowded_trash(deleted)
        emptied = await asyncio.to_thread(self._empty, now, full, crowded)
        remaining = await asyncio.to_thread(orphans, self._data, referenced, named, age, now)
        if not full:
            await folders.forget(self._database, await asyncio.to_thread(self._absent, named - referenced))
        orphaned = Swept(len(remaining), sum(orphan.size for orphan in remaining))
        self.last = UpkeepReport(expired, surplus, swept, emptied, orphaned)
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

    async def restore_named(self) -> list[str]:
        """Restore missing data that a row names from the trash; a restored older database may name removed data."""
        return await self._restore_named(await needed(self._retention))

    async def _restore_named(self, referenced: Collection[str]) -> list[str]:
        def work() -> list[str]:
            entries = [entry for entry in self._trash.entries() if entry.folder in referenced]
            return [entry.folder for entry in entries if self._trash.put_back(entry)]

        restored = await asyncio.to_thread(work)
        if restored:
            _log.warning("restored folders from the trash that the database references", folders=restored)
        return restored

    async def make_room(self) -> Swept:
        """Empty the trash, in the order of expiry, until the disk is no longer full; see `_ROOM`."""
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
        """Return entries and bytes of the trash, and of orphans as of the last round."""
        trash = await asyncio.to_thread(trash_figures, self._data)
        orphaned = self.last.orphans if self.last is not None else None
        figures = {} if orphaned is None else {"orphans": {"entries": orphaned.entries, "bytes": orphaned.size}}
        return {"trash": trash, **figures}

    def _empty(self, now: float, full: bool, crowded: Collection[str]) -> Swept:
        """Remove expired entries from the trash; if the disk is full, further ones.

        Args:
            now: UTC seconds.
            full: whether a write failed because the disk is full, in which case all entries are removed.
            crowded: names of further entries to remove.
        """
        emptied = Swept()
        self._trash.finish()
        for entry in list(self._trash.entries()):
            due = full or entry.until <= now or entry.name in crowded
            if (due or self._is_full()) and self._trash.remove(entry):
                emptied.entries += 1
                emptied.size += entry.size
        return emptied

    async def _crowded_trash(self, deleted: Mapping[str, Deleted]) -> set[str]:
        """Return the oldest entries of tenants whose trash exceeds their storage quota."""
        limits = _limits(await self._keys.all())
        if not limits:
            return set()
        entries = await asyncio.to_thread(lambda: list(self._trash.entries()))
        total: dict[str, int] = {}
        excess: set[str] = set()
        for entry in reversed(entries):
            owner = deleted.get(entry.folder)
            if owner is None or owner.tenant not in limits:
                continue
            total[owner.tenant] = total.get(owner.tenant, 0) + entry.size
            if total[owner.tenant] > limits[owner.tenant]:
                excess.add(entry.name)
        return excess

    def _absent(self, paths: Collection[str]) -> set[str]:
        """Return the folders that are neither in their place nor in the trash."""
        trashed = {entry.folder for entry in self._trash.entries()}
        return {folder for folder in paths if folder not in trashed and not (self._data / folder).exists()}

    async def _deleted(self) -> dict[str, Deleted]:
        """Across tenants: return the deleted checkpoints by folder."""
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
        """Return the runs and kinds of which a tenant has more than `keep` checkpoints."""
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
    """Return how many checkpoints each tenant keeps; of several keys, the largest number counts."""
    kept: dict[str, int] = {}
    for key in keys:
        if keep := key.quotas.get("keep"):
            kept[key.tenant] = max(int(keep), kept.get(key.tenant, 0))
    return kept


def _limits(keys: list[Key]) -> dict[str, int]:
    """Return the storage quota of each tenant in bytes; tenants with an unlimited key are omitted."""
    limits: dict[str, int] = {}
    free = {key.tenant for key in keys if not key.quotas.get("bytes")}
    for key in keys:
        if key.tenant not in free:
            limits[key.tenant] = max(int(key.quotas["bytes"]), limits.get(key.tenant, 0))
    return limits


async def needed(retention: Retention) -> set[str]:
    """Return all paths, relative to the data folder, that a row names."""
    paths = set(await retention.referenced())
    paths.update(f"payloads/{name}" for name in await retention.payload_files())
    paths.update(f"results/{name}" for name in await retention.result_files())
    return paths


def trash_figures(data: Path) -> dict[str, int]:
    """Return the number of entries of the trash, and their size in bytes."""
    sizes = [entry.size for entry in Trash(data).entries()]
    return {"entries": len(sizes), "bytes": sum(sizes)}


def _is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that the disk is full."""
    for cause in _causes(error):
        code = getattr(cause, "sqlite_errorcode", None)
        if (isinstance(cause, OSError) and cause.errno in _FULL) or (
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
        data: the data folder.
        referenced: paths relative to it that are in use, read after `now`.
        age: minimum age in seconds.
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
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            changed = max(status.st_mtime, status.st_ctime)
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
    """Move drafts, and data that a row once named and no row names any more, to the trash.

    Args:
        data: the data folder.
        referenced: paths relative to it that are in use, read after `now`.
        named: paths that a row has named at any time.
        until: returns the expiry of a path in the trash in UTC seconds.
        age: minimum age in seconds.
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
    """Return folders and files that no row ever named, oldest first; drafts are excluded."""
    unknown = []
    for folder, changed in unreferenced(data, referenced, age, now):
        size = size_of(data / folder)
        if folder not in named and not is_draft(folder.partition("/")[2]) and size is not None:
            unknown.append(Orphan(folder, changed, size))
    return sorted(unknown, key=lambda orphan: (orphan.changed, orphan.folder))


def is_draft(name: str) -> bool:
    """Return whether a name is that of an unfinished write."""
    return name.startswith(TEMPORARY)
