"""Deletes old data: results, payloads that no replay needs, and rows."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection

from twinkle_server.settings import Times
from twinkle_server.store import statements as sql
from twinkle_server.store.database import SqliteDatabase, driver
from twinkle_server.store.journal import SqliteJournal, drop_payloads

_BATCH: Final = 500
"""Maximum number of rows in one transaction, to keep it short."""
_PIECE: Final = 10_000
"""Number of row ids that one read covers."""
_PAGES: Final = 1024
"""Maximum number of free pages that one transaction returns to the file system: 4 MiB."""
_SPARE: Final = 4096
"""Number of free pages that are kept for further writes: 16 MiB."""
_ROWS_KEPT: Final = 7 * 86400.0
"""Seconds for which rows are kept after their end."""


@dataclass(slots=True)
class Purged:
    """Numbers of deleted things.

    Attributes:
        results: results of operations.
        payloads: payloads of operations of deleted models.
        operations: rows of operations.
        checkpoints: rows of deleted or expired checkpoints.
        samplers: rows of ended sampling sessions.
        pages: pages of the database file.
    """

    results: int = 0
    payloads: int = 0
    operations: int = 0
    checkpoints: int = 0
    samplers: int = 0
    pages: int = 0


class Retention:
    """Bounds the size of the data folder."""

    def __init__(self, database: SqliteDatabase, journal: SqliteJournal, times: Times | None = None) -> None:
        """Use a database and its journal; `times` has the retention periods."""
        self._database, self._journal = database, journal
        self._times = times or Times()

    async def purge(self, now: float) -> Purged:
        """Delete old data, in small transactions.

        Results are deleted `read_result` seconds after the first read, or `kept_result` seconds after they were
        written; those of recorded sampling requests not before `kept_record` seconds without use. Payloads are deleted
        when their model is gone (a snapshot drops those that it covers immediately). Rows are deleted seven days after
        their end, those of operations only if neither a replay nor a retried request can need them.

        Args:
            now: UTC seconds.
        """
        done = Purged()
        await self._note_reads()
        times = self._times
        await self._until_empty(lambda raw: _rows(raw, sql.OLD_RECORDED, now - times.kept_record))
        done.results += await self._until_empty(lambda raw: _results(raw, sql.READ, now - times.read_result))
        done.results += await self._until_empty(lambda raw: _results(raw, sql.UNREAD, now - times.kept_result))
        done.payloads += await self._until_empty(_payloads)
        before = now - _ROWS_KEPT
        done.operations += await self._until_empty(lambda raw: _rows(raw, sql.OLD, before))
        done.checkpoints += await self._until_empty(lambda raw: _rows(raw, sql.OLD_CHECKPOINTS, before))
        done.samplers += await self._until_empty(lambda raw: _rows(raw, sql.OLD_SAMPLERS, before))
        count = _PAGES
        while count == _PAGES:
            count = await self._database.write(_vacuum)
            done.pages += count
        return done

    async def referenced(self) -> set[str]:
        """Return all folders, relative to the data folder, that are still needed.

        These are folders of live checkpoints, open sampling sessions and snapshots, and those that pending or
        replayable operations read or write.
        """
        return await self._database.read(_folders)

    async def payload_files(self) -> set[str]:
        """Return the names of all files in `payloads/` that a row names."""
        return await self._names(sql.PAYLOAD_FILES)

    async def result_files(self) -> set[str]:
        """Return the names of all files in `results/` that a row names."""
        return await self._names(sql.RESULT_FILES)

    async def _names(self, query: str) -> set[str]:
        """Return the values of a query, read in pieces so that other reads and WAL checkpoints can run in between."""
        first, last = await self._database.read(lambda connection: driver(connection).execute(sql.ROWS).fetchone())
        names: set[str] = set()
        for begin in range(first or 0, (last or 0) + 1, _PIECE):
            names.update(row[0] for row in await self._rows(query, (begin, begin + _PIECE - 1)))
        return names

    async def _rows(self, query: str, values: tuple[int, int]) -> list[Any]:
        return await self._database.read(lambda connection: driver(connection).execute(query, values).fetchall())

    async def _note_reads(self) -> None:
        reads, self._journal.reads = self._journal.reads, {}
        if reads:
            marks = [(at, operation) for operation, at in reads.items()]
            await self._database.write(lambda connection: driver(connection).executemany(sql.MARK_READ, marks))

    async def _until_empty(self, step: Callable[[Any], tuple[int, list[str], list[str]]]) -> int:
        """Repeat a step until it finds nothing; a step returns a count, and the payload and result files to remove."""
        total, count = 0, _BATCH
        while count == _BATCH:
            count, payloads, results = await self._database.write(lambda connection: step(driver(connection)))
            await self._journal.payloads.drop(payloads)
            await self._journal.results.drop(results)
            total += count
        return total


def _results(raw: Any, query: str, before: float) -> tuple[int, list[str], list[str]]:
    rows = raw.execute(query, (before, _BATCH)).fetchall()
    ids = [(row[0],) for row in rows]
    raw.executemany(sql.DROP_RESULT, ids)
    raw.executemany(sql.FORGET_RESULT, ids)
    return len(rows), [], [row[1] for row in rows if row[1]]


def _payloads(raw: Any) -> tuple[int, list[str], list[str]]:
    rows = raw.execute(sql.OVER, (_BATCH,)).fetchall()
    return len(rows), drop_payloads(raw, rows), []


def _rows(raw: Any, query: str, before: float) -> tuple[int, list[str], list[str]]:
    return raw.execute(query, (before, _BATCH)).rowcount, [], []


def _vacuum(connection: Connection) -> int:
    """Return free pages to the file system; return their number, which is `_PAGES` while there may be more."""
    raw = driver(connection)
    count = min(int(raw.execute("PRAGMA freelist_count").fetchone()[0]) - _SPARE, _PAGES)
    if count <= 0:
        return 0
    for _ in range(count):  # one by one, because Python's sqlite3 stops after the first page of a statement
        raw.execute("PRAGMA incremental_vacuum(1)")
    return count


def named_paths(raw: Any) -> tuple[set[str], set[str]]:
    """Return the paths, relative to the data folder, that a database names.

    Args:
        raw: a connection of `sqlite3`.

    Returns:
        The paths that must exist, and sources and folders of operations, which may not exist (yet).
    """
    first, last = raw.execute(sql.ROWS).fetchone()
    rows = (first or 0, last or 0)
    needed = {row[0] for row in raw.execute(sql.FOLDERS)}
    needed |= {f"payloads/{row[0]}" for row in raw.execute(sql.PAYLOAD_FILES, rows)}
    needed |= {f"results/{row[0]}" for row in raw.execute(sql.RESULT_FILES, rows)}
    return needed, set(_named(raw.execute(sql.SOURCES))) - needed


def _folders(connection: Connection) -> set[str]:
    raw = driver(connection)
    return {row[0] for row in raw.execute(sql.FOLDERS)} | set(_named(raw.execute(sql.SOURCES)))


def _named(rows: Iterable[tuple[str, bytes]]) -> Iterable[str]:
    for kind, data in rows:
        name = json.loads(data).get("folder" if kind == "save" else "source")
        if name is not None:
            yield name
