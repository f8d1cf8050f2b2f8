"""Opening a data folder: creation, migration in both directions, and refusal of foreign and newer folders."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection

from twinkle_server.errors import StoreError
from twinkle_server.store import Store, open_store, schema
from twinkle_server.store.database import SqliteDatabase, driver
from twinkle_server.store.tables import metadata


def tables(connection: Connection) -> dict[str, str]:
    """Return what makes each table and index; blanks are of no account."""
    rows = driver(connection).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {name: re.sub(r"\s+", "", sql) for name, sql in rows}


def step(database: SqliteDatabase, version: str | None) -> str | None:
    return database.write_now(lambda connection: schema.migrate(connection, version))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "twinkle.db")
    yield opened
    opened.close()


def stepwise(database: SqliteDatabase) -> None:
    """Go through the migrations one by one, without the short way of a new file."""
    database.write_now(lambda connection: schema._run(connection, schema.VERSIONS[0], down=False))
    for version in schema.VERSIONS[1:]:
        step(database, version)


def test_migrations_make_what_a_new_file_gets(database: SqliteDatabase, store: Store) -> None:
    stepwise(database)
    assert database.write_now(tables) == store.database.write_now(tables)
    assert database.write_now(schema.version) == store.database.write_now(schema.version) == schema.VERSIONS[-1]


def test_tables_are_what_alembic_finds(store: Store) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    assert store.database.write_now(differences) == []


def test_migrations_go_down_and_up_again(database: SqliteDatabase) -> None:
    stepwise(database)
    newest = database.write_now(tables)
    for version in reversed(schema.VERSIONS[:-1]):
        step(database, version)
        assert database.write_now(schema.version) == version
    step(database, None)
    assert set(database.write_now(tables)) == {"alembic_version"}
    assert database.write_now(schema.version) is None
    stepwise(database)
    assert database.write_now(tables) == newest
    assert step(database, schema.VERSIONS[-1]) == schema.VERSIONS[-1]


@pytest.mark.parametrize("short", [True, False])
def test_a_migration_that_fails_leaves_the_database_as_it_was(database: SqliteDatabase, short: bool) -> None:
    def spoilt(connection: Connection) -> None:
        if short:
            schema.migrate(connection)
        else:
            schema._run(connection, schema.VERSIONS[-1], down=False)
        raise RuntimeError("power failure")

    with pytest.raises(RuntimeError):
        database.write_now(spoilt)
    assert database.write_now(schema.version) is None
    assert database.write_now(tables) == {}


def test_every_version_has_a_file() -> None:
    files = sorted(path.name for path in (schema.FOLDER / "versions").glob("v*.py"))
    assert [name[1:].partition("_")[0] for name in files] == list(schema.VERSIONS)


def test_a_newer_database_is_refused_in_words(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    database = SqliteDatabase(tmp_path / "twinkle.db")
    change = "UPDATE alembic_version SET version_num = '9999'"
    database.write_now(lambda connection: connection.exec_driver_sql(change))
    database.close()
    for serve in (True, False):
        with pytest.raises(StoreError, match=r"'9999', which is newer .* install the twinkle-server that wrote it"):
            open_store(tmp_path, serve=serve)


def test_a_new_directory_is_for_its_owner_only(tmp_path: Path, run: Any) -> None:
    data = tmp_path / "deep" / "data"
    data.mkdir(parents=True, mode=0o700)
    (data / "lost+found").mkdir()
    store = open_store(data)
    assert run(store.keys.all()) == []
    modes = {path.name: path.stat().st_mode & 0o777 for path in (store.data, *store.data.iterdir())}
    assert modes["data"] == modes["payloads"] == modes["results"] == 0o700
    assert modes["secret"] == modes["lock"] == modes["twinkle.db"] == modes["twinkle.db-wal"] == 0o600
    assert len(store.secret) == 32
    store.close()


def test_a_directory_keeps_its_secret_and_its_name(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.close()
    second = open_store(tmp_path)
    assert (second.secret, second.instance) == (first.secret, first.instance)
    second.close()
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(StoreError, match="must have 32 bytes, got 5"):
        open_store(tmp_path)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"'thesis.tex'.*empty directory"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="File exists; choose another --data"):
        open_store(tmp_path / "thesis.tex")


def test_opening_imports_no_alembic_and_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from twinkle_server.store import open_store;"
        "open_store(pathlib.Path(sys.argv[1])).close();"
        "print({name.partition('.')[0] for name in sys.modules} & {'alembic', 'torch', 'numpy', 'transformers'})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
