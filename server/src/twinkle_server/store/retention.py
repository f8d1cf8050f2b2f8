"""What may be thrown away: old results, payloads that nothing will replay, old rows, folders that nothing names."""

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
"""Rows of one transaction, so that nobody waits long behind it."""
_PIECE: Final = 10_000
"""Ids of rows that one read goes through."""
_PAGES: Final = 1024
"""Free pages that one transaction gives back to the file system: 4 MiB."""
_SPARE: Final = 4096
"""Free pages that stay, because what comes next needs them: 16 MiB."""
_ROWS_KEPT: Final = 7 * 86400.0
"""Seconds."""


@dataclass(slots=True)
class Purged:
    """How many went.

    Attributes:
        results: of operations.
        payloads: of operations of models that are gone.
        operations: whole rows.
        checkpoints: rows of checkpoints that were deleted, or have expired.
        samplers: rows of sampling sessions that have ended.
        pages: of the database file.
    """

    results: int = 0
    payloads: int = 0
    operations: int = 0
    checkpoints: int = 0
    samplers: int = 0
    pages: int = 0


class Retention:
    """Keeps the data directory bounded."""

    def __init__(self, database: SqliteDatabase, journal: SqliteJournal, times: Times | None = None) -> None:
        """Use a database and its journal; `times` says how long results are kept."""
        self._database, self._journal = database, journal
        self._times = times or Times()

    async def purge(self, now: float) -> Purged:
        """Throw away what is over, in small transactions.

        Results go `read_result` seconds after they were first read, or `kept_result` seconds after they came, those of
        recorded sampling requests not before `kept_record` seconds without use; payloads
        when their model is gone (a snapshot drops those that it covers at once); rows seven days after their end, those
        of operations only if neither a replay nor a repeated request can want them.

        Args:
            now: the time.
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
        """Return every folder, relative to the data directory, that something still needs.

        That is: live checkpoints, open sampling sessions, snapshots, and what operations that wait or may be replayed
        read and write.
        """
        return await self._database.read(_folders)

    async def payload_files(self) -> set[str]:
        """Return the names of all files in `payloads/` that a row names."""
        return await self._names(sql.PAYLOAD_FILES)

    async def result_files(self) -> set[str]:
        """Return the names of all files in `results/` that a row names."""
        return await self._names(sql.RESULT_FILES)

    async def _names(self, query: str) -> set[str]:
        """Return what a query finds, read in pieces, between which others read and the log can be cut."""
        first, last = await self._database.read(lambda connection: driver(connection).execute(sql.ROWS).fetchone())
        found: set[str] = set()
        for begin in range(first or 0, (last or 0) + 1, _PIECE):
            found.update(row[0] for row in await self._rows(query, (begin, begin + _PIECE - 1)))
        return found

    async def _rows(self, query: str, values: tuple[int, int]) -> list[Any]:
        return await self._database.read(lambda connection: driver(connection).execute(query, values).fetchall())

    async def _note_reads(self) -> None:
        reads, self._journal.reads = self._journal.reads, {}
        if reads:
            marks = [(at, operation) for operation, at in reads.items()]
            await self._database.write(lambda connection: driver(connection).executemany(sql.MARK_READ, marks))

    async def _until_empty(self, step: Callable[[Any], tuple[int, list[str], list[str]]]) -> int:
        """Repeat a step until it finds nothing; each gives its count, and files of payloads and of results."""
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
    """Give free pages back; returns how many, which is `_PAGES` as long as there may be more."""
    raw = driver(connection)
    count = min(int(raw.execute("PRAGMA freelist_count").fetchone()[0]) - _SPARE, _PAGES)
    if count <= 0:
        return 0
    for _ in range(count):  # one by one, for Python's sqlite3 stops after the first page whatever it is asked for
        raw.execute("PRAGMA incremental_vacuum(1)")
    return count


def _folders(connection: Connection) -> set[str]:
    raw = driver(connection)
    return {row[0] for row in raw.execute(sql.FOLDERS)} | set(_named(raw.execute(sql.SOURCES)))


def _named(rows: Iterable[tuple[str, bytes]]) -> Iterable[str]:
    for kind, data in rows:
        name = json.loads(data).get("folder" if kind == "save" else "source")
        if name is not None:
            yield name
