"""One writer, many closures: each whole or not, all durable, and a disk that fails harms nothing that was written."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from twinkle_server import failpoints
from twinkle_server.errors import BadRequest, StoreError, Unavailable
from twinkle_server.store import database as store_database
from twinkle_server.store.database import SqliteDatabase, driver, translate_error
from twinkle_server.store.filesystem import check_local


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "twinkle.db")
    opened.write_now(lambda connection: connection.exec_driver_sql("CREATE TABLE things (name TEXT PRIMARY KEY)"))
    yield opened
    opened.close()


def put(name: str) -> Callable[[Connection], None]:
    def work(connection: Connection) -> None:
        connection.exec_driver_sql("INSERT INTO things VALUES (?)", (name,))

    return work


def names(connection: Connection) -> list[str]:
    return [row[0] for row in connection.exec_driver_sql("SELECT name FROM things ORDER BY name")]


async def busy(database: SqliteDatabase) -> tuple[threading.Event, asyncio.Task[Any]]:
    """Keep the writer in a transaction until the event is set."""
    begun, go = threading.Event(), threading.Event()

    def work(_: Connection) -> None:
        begun.set()
        assert go.wait(10)

    task = asyncio.create_task(database.write(work))
    assert await asyncio.to_thread(begun.wait, 10)
    return go, task


async def together(database: SqliteDatabase, *works: Callable[[Connection], Any]) -> list[Any]:
    """Run closures that wait at the same time, so that they share a commit."""
    go, first = await busy(database)
    rest = [asyncio.create_task(database.write(work)) for work in works]
    await asyncio.sleep(0)
    go.set()
    await first
    return await asyncio.gather(*rest, return_exceptions=True)


def test_what_waits_while_a_commit_runs_shares_the_next_one(database: SqliteDatabase) -> None:
    before = database.commits
    asyncio.run(together(database, *(put(f"{number:03}") for number in range(100))))
    assert database.commits == before + 2
    assert len(database.write_now(names)) == 100


def test_a_closure_that_raises_is_undone_alone(database: SqliteDatabase) -> None:
    def half(connection: Connection) -> None:
        put("half")(connection)
        raise BadRequest("no")

    results = asyncio.run(together(database, put("a"), half, put("a"), put("b")))
    assert [type(result) for result in results] == [type(None), BadRequest, IntegrityError, type(None)]
    assert database.write_now(names) == ["a", "b"]
    assert database.healthy


def test_a_closure_that_is_alone_and_raises_leaves_nothing(database: SqliteDatabase) -> None:
    def half(connection: Connection) -> None:
        put("half")(connection)
        raise BadRequest("no")

    with pytest.raises(BadRequest):
        database.write_now(half)
    assert database.write_now(names) == []


def test_values_come_back_to_whoever_asked(database: SqliteDatabase) -> None:
    assert asyncio.run(together(database, lambda _: 1, lambda _: 2)) == [1, 2]


def test_a_reader_sees_what_was_written_and_cannot_write(database: SqliteDatabase) -> None:
    async def main() -> None:
        await database.write(put("a"))
        assert await database.read(names) == ["a"]
        with pytest.raises(Unavailable) as caught:
            await database.read(put("b"))
        assert isinstance(caught.value.__cause__, OperationalError)
        assert await database.read(names) == ["a"]

    asyncio.run(main())


def test_a_read_is_of_one_state_though_somebody_writes_meanwhile(database: SqliteDatabase) -> None:
    def twice(connection: Connection) -> tuple[list[str], list[str]]:
        before = names(connection)
        database.write_now(put("later"))
        return before, names(connection)

    async def main() -> None:
        assert await database.read(twice) == ([], [])
        assert await database.read(names) == ["later"]

    asyncio.run(main())


def test_a_waiter_that_gave_up_disturbs_nobody(database: SqliteDatabase) -> None:
    async def main() -> None:
        go, first = await busy(database)
        second = asyncio.create_task(database.write(put("given up")))
        third = asyncio.create_task(database.write(put("wanted")))
        await asyncio.sleep(0)
        second.cancel()
        go.set()
        await asyncio.gather(first, third)
        assert "wanted" in await database.read(names)

    asyncio.run(main())


def test_a_full_disk_fails_what_does_not_fit_and_the_store_goes_on_when_there_is_room(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "twinkle.db")
    database.write_now(lambda connection: connection.exec_driver_sql("CREATE TABLE things (name TEXT, data BLOB)"))

    def limit(connection: Connection, pages: int) -> None:
        driver(connection).execute(f"PRAGMA max_page_count = {pages}").fetchall()

    def big(connection: Connection) -> None:
        put_big = "INSERT INTO things VALUES ('big', zeroblob(1000000))"
        connection.exec_driver_sql(put_big)

    def small(connection: Connection) -> None:
        connection.exec_driver_sql("INSERT INTO things VALUES ('small', '')")

    database.write_now(lambda connection: limit(connection, 20))
    for _ in range(3):
        with pytest.raises(Unavailable, match="disk full"):
            database.write_now(big)
        assert not database.healthy
    results = asyncio.run(together(database, small, big, small))
    fits = [result for result in results if result is None]
    assert database.write_now(names) == ["small"] * len(fits)  # what is said to be written is, and nothing else
    assert isinstance(results[1], Unavailable)
    database.write_now(lambda connection: limit(connection, 10_000))
    database.write_now(big)
    assert database.healthy
    database.close()


@pytest.mark.parametrize("action", ["enospc", "eio"])
@pytest.mark.parametrize(("name", "kept"), [("store.before_commit", False), ("store.after_commit", True)])
def test_a_commit_that_fails_fails_all_that_share_it(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch, action: str, name: str, kept: bool
) -> None:
    async def main() -> list[Any]:
        await database.write(put("before"))
        monkeypatch.setattr(failpoints, "_watcher", failpoints._Failpoint(f"{name}:2:{action}").reach)
        return await together(database, put("a"), put("b"))

    results = asyncio.run(main())
    assert all(isinstance(result, Unavailable) for result in results)
    assert not database.healthy
    assert database.write_now(names) == (["a", "b", "before"] if kept else ["before"])
    assert database.healthy


def test_a_closed_database_says_so(database: SqliteDatabase) -> None:
    database.close()
    database.close()
    with pytest.raises(Unavailable, match="closed"):
        database.write_now(names)
    with pytest.raises(Unavailable, match="closed"):
        asyncio.run(database.read(names))


def test_closing_moves_the_log_into_the_file(database: SqliteDatabase, tmp_path: Path) -> None:
    database.write_now(put("a"))
    database.close()
    assert [path.name for path in tmp_path.iterdir()] == ["twinkle.db"]
    with sqlite3.connect(tmp_path / "twinkle.db") as raw:
        assert raw.execute("SELECT name FROM things").fetchall() == [("a",)]
    raw.close()


def test_every_commit_reaches_the_disk(database: SqliteDatabase) -> None:
    def pragmas(connection: Connection) -> list[Any]:
        raw = driver(connection)
        return [raw.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")]

    assert database.write_now(pragmas) == ["wal", 2, 1]


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    folder = tmp_path / "with space"
    folder.mkdir()
    inner = str(folder).replace(" ", "\\040")
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {inner} rw shared:1 - {kind} server:/x rw\n")
    check_local(tmp_path, mounts)
    with pytest.raises(StoreError, match=kind):
        check_local(folder, mounts)
    check_local(folder, tmp_path / "no such file")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "twinkle.db").write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreError, match="cannot open"):
        SqliteDatabase(tmp_path / "twinkle.db")


def test_a_connection_that_cannot_be_opened_anew_is_tried_again_at_each_write(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [StoreError("no"), StoreError("no")]
    connect = store_database.connect

    def fails_twice(path: Path) -> sqlite3.Connection:
        if faults:
            raise faults.pop()
        return connect(path)

    monkeypatch.setattr(store_database, "connect", fails_twice)
    database._writer._raw.close()
    for name in ("a", "b", "c"):  # the first finds the connection closed, the others cannot open another
        with pytest.raises(Unavailable):
            database.write_now(put(name))
        assert not database.healthy
    database.write_now(put("d"))
    assert database.healthy
    assert database.write_now(names) == ["d"]


@pytest.mark.parametrize(
    ("error", "is_the_stores"),
    [
        (sqlite3.SQLITE_LOCKED, True),
        (sqlite3.SQLITE_PROTOCOL, True),
        (sqlite3.SQLITE_PERM, True),
        (sqlite3.SQLITE_INTERRUPT, True),
        (sqlite3.SQLITE_IOERR_FSYNC, True),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, False),
    ],
)
def test_what_is_the_stores_fault_may_come_again(error: int, is_the_stores: bool) -> None:
    found = sqlite3.DatabaseError("no")
    found.sqlite_errorcode = error
    assert isinstance(translate_error(found), Unavailable) == is_the_stores
