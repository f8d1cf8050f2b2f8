"""The disk: a database that commits without a thread, and what a crash leaves of a data folder."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_simulation.virtual import PROCESS, Process, VirtualLoop
from sqlalchemy import Engine

from twinkle_server.operations import Outcome
from twinkle_server.store import database
from twinkle_server.store.database import SqliteDatabase
from twinkle_server.store.inspection import DATABASE
from twinkle_server.store.journal import Finish

LOG = f"{DATABASE}-wal"
SECTOR = 512
"""Bytes that a disk writes whole or not at all; without a sync, sectors reach it in any order."""
_LOG_HEADER = 32
"""Bytes of the write-ahead log that SQLite syncs before the entries behind them."""
_MOVED = ("checkpoints", "snapshots", "payloads", "results", "trash", "secret", "lock")


class Disk:
    """What all processes of a simulation share.

    Attributes:
        draw: gives delays, and what a power failure destroys.
        pages: of the write-ahead log, after which SQLite moves it into the database.
        databases: that are open, of the process that runs.
        refuses: returns whether the end of an operation cannot be written.
        unreadable: returns whether a read fails now.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.pages = draw.choice([8, 40, 1000])
        self.databases: list[SimulatedDatabase] = []
        self.refuses: Callable[[Outcome], bool] = lambda outcome: False
        self.unreadable: Callable[[], bool] = lambda: False

    def delay(self) -> float:
        """Return the seconds that a commit takes, most of them few."""
        return self.draw.random() ** 3 * 0.01


_disk: list[Disk] = []


def use_disk(disk: Disk) -> None:
    """Let databases that are opened from now on belong to a disk."""
    _disk[:] = [disk]


_openers: list[Callable[[], sqlite3.Connection]] = []
_engine = database.engine(lambda: _openers[-1]())


def shared_engine(connect: Callable[[], sqlite3.Connection]) -> Engine:
    """Stand for `database.engine`: all lives share what SQLAlchemy compiled, which takes longer than to run it."""
    _openers[:] = [connect]
    return _engine


class SimulatedDatabase(SqliteDatabase):
    """A database whose commits run in the loop, each a moment after its first job, with all that came by then."""

    def __init__(self, path: Path, readers: int = 2) -> None:
        super().__init__(path, readers)
        self.disk = _disk[0]
        self.disk.databases.append(self)
        self._due = False
        self._process: Process | None = PROCESS.get()
        self._writer._raw.execute(f"PRAGMA wal_autocheckpoint = {self.disk.pages}")

    def _put(self, job: Any) -> None:
        work = job.work
        if isinstance(work, Finish) and any(self.disk.refuses(outcome) for outcome, _ in work.outcomes):
            job.work = _unwritable
        super()._put(job)

    def _read(self, work: Callable[[Any], Any]) -> Any:
        return super()._read(_not_read if self.disk.unreadable() else work)

    def _wake_writer(self, future: Any) -> None:
        if not isinstance(future, asyncio.Future):
            self._commit_all()
        elif not self._due:
            self._due = True
            loop = future.get_loop()
            assert isinstance(loop, VirtualLoop)
            loop.call_later(self.disk.delay(), self._commit_all)

    def _commit_all(self) -> None:
        self._due = False
        while not self._jobs.empty() and self._commit_next():
            pass

    def close(self) -> None:
        """See `SqliteDatabase.close`; what was handed in before is committed first."""
        if not self._closed:
            self._commit_all()
            self.disk.databases.remove(self)
        super().close()

    def abandon(self) -> None:
        """Close the connections of a process that was killed; its files were copied before."""
        self._closed = True
        self._readers.shutdown()
        for connection in self._reading:
            connection.close()
        self._writer._connection.close()


class Unwritable(Exception):
    """What an operation ended with is nothing that the database can hold."""


def _unwritable(_connection: Any) -> None:
    raise Unwritable


def _not_read(_connection: Any) -> None:
    raise sqlite3.OperationalError("disk I/O error")


class Torn:
    """The database and its log before a commit whose write the power failure interrupts."""

    def __init__(self, data: Path) -> None:
        self.database, self.log = _read(data / DATABASE), _read(data / LOG)


def crash(disk: Disk, data: Path, target: Path, torn: Torn | None = None) -> str:
    """Make the directory that the next start finds, from that of a process that is killed at this moment.

    The old directory keeps its own database, which the killed process still has open; everything else moves.

    Args:
        disk: draws what a power failure destroys.
        data: the old directory.
        target: the new one, which does not exist.
        torn: the state before the last commit, of which some sectors were written; None is a kill, which loses nothing
            that was written.

    Returns:
        What was torn, for the trace.
    """
    target.mkdir(mode=0o700)
    database, log = _read(data / DATABASE), _read(data / LOG)
    what = ""
    if torn is not None:
        if torn.database != database and disk.draw.random() < 0.5:
            database, what = _mixed(disk.draw, torn.database, database), "database"
        else:
            database, log, what = torn.database, _mixed(disk.draw, torn.log, log, _LOG_HEADER), "log"
    (target / DATABASE).write_bytes(database)
    if log:
        (target / LOG).write_bytes(log)
    for name in _MOVED:
        if (data / name).exists():
            (data / name).rename(target / name)
    for opened in disk.databases:
        opened._closed = True
    return what


def _mixed(draw: random.Random, before: bytes, after: bytes, synced: int = 0) -> bytes:
    """Return a file of which some sectors are as they were, and some as they were to be.

    Args:
        draw: chooses the sectors.
        before: the content before.
        after: the content that was written.
        synced: bytes at the beginning that are as in `after`.
    """
    made = bytearray(after)
    length = max(len(before), len(after))
    if draw.random() < 0.3:  # the file did not grow as far
        made = made[: draw.randrange(min(len(before), len(after)), len(after) + 1)]
        length = len(made)
    for start in range(0, length, SECTOR):
        old = before[start : start + SECTOR]
        if old != after[start : start + SECTOR] and draw.random() < 0.5:
            size = len(made[start : start + SECTOR])
            made[start : start + SECTOR] = old[:size].ljust(size, b"\0")
    made[:synced] = after[:synced]
    return bytes(made)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def remove(folder: Path) -> None:
    """Remove a directory of an earlier life."""
    shutil.rmtree(folder, ignore_errors=True)
