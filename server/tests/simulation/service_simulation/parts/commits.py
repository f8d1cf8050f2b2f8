"""The database file: jobs that share a commit, errors, and connections that are lost."""

import asyncio
import random
import sqlite3
import stat
from contextlib import closing
from typing import Any
from unittest import mock

from service_simulation.disk import Disk, SimulatedDatabase, use_disk
from service_simulation.parts.support import (
    declined,
    folder,
    refused,
)
from service_simulation.reference import demand
from service_simulation.virtual import Clock, Still
from sqlalchemy.exc import DBAPIError

from twinkle_server import failpoints
from twinkle_server.errors import BadRequest, StoreError, Unavailable
from twinkle_server.store import database


async def commit_together(clock: Clock, draw: random.Random) -> None:
    """Jobs that wait share a commit; each is whole or not there, and errors are told to whoever asked."""
    with folder() as root:
        use_disk(Disk(Still(1)))
        file = root / "a?b#.db"
        one = SimulatedDatabase(file)
        raw = one._writer._raw
        settings = {
            name: raw.execute(f"PRAGMA {name}").fetchone()[0]
            for name in (
                "foreign_keys",
                "journal_mode",
                "synchronous",
                "auto_vacuum",
                "journal_size_limit",
                "query_only",
                "cache_size",
            )
        }
        wanted = {
            "foreign_keys": 1,
            "journal_mode": "wal",
            "synchronous": 2,
            "auto_vacuum": 2,
            "journal_size_limit": 64 * 2**20,
            "query_only": 0,
            "cache_size": -16384,
        }
        demand(settings == wanted, f"{settings}")
        demand(stat.S_IMODE(file.stat().st_mode) == 0o600 and one.healthy and one.commits == 0, "a new one")
        one.write_now(lambda connection: connection.exec_driver_sql("CREATE TABLE t (n INTEGER UNIQUE NOT NULL)"))
        numbers = set[int]()
        for _ in range(12):
            jobs = []
            before, commits = set(numbers), one.commits
            full = draw.choice(["", "", "", "full", "rollback", "after"])
            for number in draw.sample(range(30), draw.choice([1, 1, 3, 6])):
                how = draw.choice(["", "", "twice", "null", "fails", "own", "text"])

                def work(connection: Any, number: int = number, how: str = how) -> int:
                    connection.exec_driver_sql("INSERT INTO t VALUES (?)", (number,))
                    if how == "twice":
                        connection.exec_driver_sql("INSERT INTO t VALUES (?)", (number,))
                    elif how == "null":
                        connection.exec_driver_sql("INSERT INTO t VALUES (NULL)")
                    elif how == "fails":
                        raise KeyError(number)
                    elif how == "own":
                        raise StoreError("its own word")
                    elif how == "text":
                        connection.exec_driver_sql("SELECT ?", (2**70,))
                    return number

                jobs.append((number, how, asyncio.create_task(one.write(work))))
            places: list[str] = []

            def reached(place: str, full: str = full, places: list[str] = places) -> None:
                places.append(place)
                if place == "store.before_commit" and full:
                    if full == "rollback":
                        one._writer._raw.execute("ROLLBACK")
                    raise OSError(28, "No space left on device")

            watched = failpoints.watch(reached)
            await asyncio.sleep(0)
            cancelled = draw.random() < 0.2
            if cancelled:
                jobs[0][2].cancel()
            await asyncio.wait([task for _, _, task in jobs])
            failpoints.watch(watched)
            ok = not (full and places)
            for number, how, task in jobs:
                good = not how and number not in before
                if task.cancelled():
                    numbers |= {number} if good and ok else set()
                    continue
                error = task.exception()
                if good and ok:
                    demand(error is None and task.result() == number, f"{number} {how}: {error}")
                    numbers.add(number)
                elif not ok and isinstance(error, Unavailable):
                    demand(
                        "the store cannot write at the moment" in error.message
                        and isinstance(error.__cause__, OSError),
                        error,
                    )
                else:
                    demand(error is not None, f"{number} {how} was written")
                    if number not in before and ok:
                        kind = {"fails": KeyError, "own": StoreError, "text": BadRequest}.get(how, DBAPIError)
                        demand(isinstance(error, kind), f"{how}: {error!r}")
            demand(one.healthy is ok, "whether the last commit worked")
            demand(one.commits == commits + 1, "commits are counted")
            demand(not one._writer._raw.in_transaction, "a transaction is left open")
            found = await one.read(lambda connection: set(connection.exec_driver_sql("SELECT n FROM t").scalars()))
            demand(found == numbers, f"{found}, not {numbers}")
            demand(not any(database.driver(each).in_transaction for each in one._reading), "a reader is left open")
        await refused(one.read(lambda connection: connection.exec_driver_sql("DELETE FROM t")), Exception, "")
        reader = database.driver(one._reading[0])
        demand(
            [reader.execute(f"PRAGMA {name}").fetchone()[0] for name in ("query_only", "foreign_keys", "cache_size")]
            == [1, 1, -16384],
            "the settings of readers",
        )
        await refused(one.read(lambda connection: 1 / 0), ZeroDivisionError)
        demand(len(one._reading) == 1, "a reader for each read")
        await _lose_connection(one, numbers)
        late = asyncio.create_task(
            one.write(lambda connection: connection.exec_driver_sql("INSERT INTO t VALUES (999)"))
        )
        await asyncio.sleep(0)
        one.close()
        one.close()
        demand(
            not (root / "a?b#.db-wal").exists() or (root / "a?b#.db-wal").stat().st_size == 0, "the log is not moved"
        )
        await asyncio.wait([late])
        for work_ in (one.write(lambda connection: 1), one.read(lambda connection: 1)):
            await refused(work_, Unavailable, "the store is closed")
        with closing(sqlite3.connect(file)) as raw:
            kept = {row[0] for row in raw.execute("SELECT n FROM t")}
        demand(kept == numbers | {999}, "what was handed in before the end is lost")
        declined(lambda: SimulatedDatabase(root), "cannot open the database", "restore it from a backup")
        (root / "no.db").write_bytes(b"no database, but long enough to be one" * 50)
        declined(lambda: SimulatedDatabase(root / "no.db"), "cannot open the database")
        with mock.patch.object(sqlite3, "sqlite_version_info", (3, 34, 9)):
            declined(lambda: SimulatedDatabase(root / "b.db"), "SQLite must be 3.35 or newer")
        _word_errors()


async def _lose_connection(one: SimulatedDatabase, numbers: set[int]) -> None:
    """A rollback that fails makes the next commit open the file anew."""
    writer = one._writer

    class Broken:
        in_transaction = True

        def __init__(self, real: Any) -> None:
            self.real, self.closed = real, False

        def execute(self, text: str, *values: Any) -> Any:
            if text in ("COMMIT", "ROLLBACK"):
                raise sqlite3.OperationalError("disk I/O error")
            return self.real.execute(text, *values)

        def close(self) -> None:
            self.closed = True
            self.real.close()

    broken = Broken(writer._raw)
    writer._raw = broken  # type: ignore[assignment]
    await refused(one.write(lambda connection: connection.exec_driver_sql("INSERT INTO t VALUES (500)")), Unavailable)
    demand(writer._lost and not one.healthy, "it does not know that its connection is lost")
    await one.write(lambda connection: connection.exec_driver_sql("INSERT INTO t VALUES (501)"))
    numbers.add(501)
    demand(broken.closed and writer._raw is not broken and not writer._lost and one.healthy, "it was not opened anew")
    found = await one.read(lambda connection: set(connection.exec_driver_sql("SELECT n FROM t").scalars()))
    demand(found == numbers, f"{found}, not {numbers}")
    with mock.patch.object(writer, "_reopen", side_effect=StoreError("it cannot be opened")):
        writer._lost = True
        await refused(one.write(lambda connection: 1), Unavailable)
        demand(writer._lost, "it is not lost any more")
    await one.write(lambda connection: 1)


def _word_errors() -> None:
    def error(kind: type[sqlite3.Error], code: int | None, text: str = "x") -> sqlite3.Error:
        made = kind(text)
        if code is not None:
            made.sqlite_errorcode = code  # type: ignore[misc]
        return made

    operational, database_error = sqlite3.OperationalError, sqlite3.DatabaseError
    for each, words in (
        (error(operational, sqlite3.SQLITE_FULL), "cannot write at the moment"),
        (error(operational, None), "cannot write"),
        (error(operational, sqlite3.SQLITE_IOERR | 3 << 8), "cannot write"),
        (OSError(28, "x"), "cannot write"),
        (error(database_error, sqlite3.SQLITE_CORRUPT | 1 << 8), "is damaged"),
        (StoreError("x"), "cannot write"),
        (error(database_error, sqlite3.SQLITE_NOTADB), "is damaged"),
        (error(operational, sqlite3.SQLITE_ERROR), ""),
        (error(sqlite3.ProgrammingError, None, "Cannot operate on a closed database."), "cannot write"),
        (error(sqlite3.ProgrammingError, None), ""),
        (KeyError("closed database"), ""),
        (error(database_error, None), ""),
        (error(sqlite3.IntegrityError, sqlite3.SQLITE_CONSTRAINT), ""),
    ):
        for given in (each, DBAPIError("q", None, each)):
            told = database.translate_error(given)
            demand(
                told is given if not words else isinstance(told, Unavailable) and words in told.message,
                f"{each!r}: {told!r}",
            )
            demand(told is given or told.__cause__ is given, "the cause is lost")
    demand(isinstance(database.translate_error(OverflowError("x")), BadRequest), "a number that is too large")
