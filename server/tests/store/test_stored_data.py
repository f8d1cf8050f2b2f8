"""A data folder that a server of each version left when it was killed: opened, served, taken back and up again."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from server_history import read_ledger
from server_raw import Raw, RawModel, RawSampler, pass_body, row, tokens_of
from serving import Served, ledger
from sqlalchemy import Connection

from twinkle_server.errors import StoreError
from twinkle_server.store import open_store, schema
from twinkle_server.store.database import SqliteDatabase, driver
from twinkle_server.telemetry.status import ask

from .test_schema import step, tables

STORED = Path(__file__).with_name("data")
FOR_EVER = {"session": 1e9, "kept_run": 1e9, "kept_result": 1e9, "read_result": 1e9}
"""Seconds: rows of the past are not too old."""
Rows = dict[str, list[dict[str, Any]]]
each_version = pytest.mark.parametrize("version", schema.VERSIONS)


@pytest.fixture
def stored(version: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of a stored directory, and what is known of it."""
    data = tmp_path / "data"
    shutil.copytree(STORED / version, data)
    facts = json.loads((data / "facts.json").read_text())
    (data / "secret").write_bytes(bytes.fromhex(facts["secret"]))
    with closing(sqlite3.connect(data / "twinkle.db")) as database:
        database.executescript((data / "twinkle.sql").read_text())
    for name in ("facts.json", "twinkle.sql"):
        (data / name).unlink()
    return data, facts


@pytest.fixture
def database(stored: tuple[Path, dict[str, Any]]) -> Iterator[SqliteDatabase]:
    opened = SqliteDatabase(stored[0] / "twinkle.db")
    yield opened
    opened.close()


def rows(connection: Connection) -> Rows:
    """Return all rows of all tables, but those that name the version."""
    raw = driver(connection)
    names = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found: Rows = {}
    for name in sorted(set(names) - {"alembic_version"}):
        cursor = raw.execute(f'SELECT * FROM "{name}"')
        columns = [column[0] for column in cursor.description]
        found[name] = sorted((dict(zip(columns, entry, strict=True)) for entry in cursor), key=repr)
    return found


def known_by(older: Rows, newer: Rows) -> Rows:
    """Return of newer rows what an older version has tables and columns for."""
    return {
        name: sorted(({column: row[column] for column in entries[0]} for row in newer[name]), key=repr)
        for name, entries in older.items()
        if entries
    }


def test_every_version_has_a_stored_directory() -> None:
    stored = sorted(path.name for path in STORED.iterdir())
    assert stored == list(schema.VERSIONS), "a new version? `python server/tests/store/write_data.py` writes its own"


@pytest.mark.sample(2)
@each_version
def test_migrations_of_the_past_make_what_was_stored(database: SqliteDatabase, version: str, tmp_path: Path) -> None:
    """A version that was published is not changed: the next one is."""
    made = SqliteDatabase(tmp_path / "made.db")
    try:
        made.write_now(lambda connection: schema._run(connection, version, down=False))
        assert made.write_now(tables) == database.write_now(tables)
    finally:
        made.close()


@pytest.mark.sample(2)
@each_version
def test_its_rows_go_up_and_down_again(database: SqliteDatabase, version: str) -> None:
    before, old_tables = database.write_now(rows), database.write_now(tables)
    for name in ("keys", "sessions", "models", "samplers", "operations", "payloads", "results", "checkpoints", "audit"):
        assert before[name], f"nothing is stored of {name}"
    assert bool(before.get("compositions")) == (version >= "0003")
    assert step(database, schema.VERSIONS[-1]) == version
    newest = database.write_now(tables)
    assert known_by(before, database.write_now(rows)) == {name: entries for name, entries in before.items() if entries}
    step(database, version)
    assert database.write_now(tables) == old_tables
    assert database.write_now(rows) == before
    step(database, schema.VERSIONS[-1])
    step(database, None)
    assert set(database.write_now(tables)) == {"alembic_version"}
    database.write_now(lambda connection: schema._run(connection, schema.VERSIONS[-1], down=False))
    assert database.write_now(tables) == newest
    assert not any(database.write_now(rows).values())


@pytest.mark.sample(2)
@each_version
def test_its_owner_on_another_machine_is_not_robbed(stored: tuple[Path, dict[str, Any]], version: str) -> None:
    data, _ = stored
    with structlog.testing.capture_logs() as lines:
        with pytest.raises(StoreError, match=r"on elsewhere since .*--take-over"):
            open_store(data)
        open_store(data, take_over=True).close()
    upgraded = {"event": "upgraded the database", "before": version, "after": schema.VERSIONS[-1], "log_level": "info"}
    assert lines == ([] if version == schema.VERSIONS[-1] else [upgraded]), "once"


@pytest.fixture
def older(stored: tuple[Path, dict[str, Any]]) -> Iterator[tuple[Served, Raw, dict[str, Any]]]:
    """A server of today on a stored directory, and its tenant."""
    data, facts = stored
    service = ledger(data, {"auth": True, "take_over": True, "times": {"poll": 5.0, **FOR_EVER}})
    try:
        service.start()
        with Raw(service.url, facts["key"]) as raw:
            yield service, raw, facts
    finally:
        service.kill()


def state(raw: Raw, model: str, number: int) -> tuple[list[int], list[int], int]:
    """Return first tokens of what is applied and pending, and the number that asking took."""
    asked = RawModel(raw, model, number)
    pending, applied = read_ledger(asked.forward([row([1, 2])]))
    return [entry >> 32 for entry in applied], [entry >> 32 for entry in pending], asked.last


@pytest.mark.sample(2)
@each_version
def test_a_server_of_today_goes_on_where_it_was_killed(older: tuple[Served, Raw, dict[str, Any]]) -> None:
    service, raw, facts = older
    waiting, model = facts["waiting"], facts["model"]
    assert raw.poll(waiting[0]).json()["type"] == "try_again"
    raw.send("/forward_backward", pass_body(model, facts["missing"], [row([9, 2, 3])]))
    assert raw.result(waiting[0], "pass")
    assert "metrics" in raw.result(waiting[1])
    applied, pending, last = state(raw, model, facts["missing"] + 2)
    assert (applied, pending, last) == ([5, 6, 7, 9, 8], [], facts["missing"] + 3)
    status = ask(service.data)
    assert status is not None
    assert status["replays"] >= 2, "what came after the snapshot was done again"


@pytest.mark.sample(2)
@each_version
def test_results_samplers_and_checkpoints_of_the_past_are_there(older: tuple[Served, Raw, dict[str, Any]]) -> None:
    _, raw, facts = older
    told = raw.result(facts["sampled"]["request"], "sample")
    assert tokens_of(told.sequences[0]) == facts["sampled"]["tokens"]
    again = RawSampler(raw, facts["sampler"]).sample([1, 2], number=1, params={"max_tokens": 9})
    assert tokens_of(again.sequences[0]) == facts["sampled"]["tokens"]
    loaded = raw.load(facts["checkpoint"])
    assert state(raw, loaded.id, 0)[0] == [5, 6, 7]
    listed = raw.get(f"/training_runs/{facts['model']}/checkpoints")["checkpoints"]
    assert [entry["tinker_path"] for entry in listed] == [facts["checkpoint"]]


@pytest.mark.sample(2)
@each_version
def test_numbers_of_the_past_are_used_up(older: tuple[Served, Raw, dict[str, Any]], version: str) -> None:
    _, raw, facts = older
    other = raw.send("/forward_backward", pass_body(facts["model"], 1, [row([99, 2, 3])]))
    assert other.status_code == 409
    again = RawModel(raw, facts["model"], 1)
    assert again.step()["metrics"] == {"grad_norm:mean" if version <= "0003" else "grad_norm": 1.0}
    assert state(raw, facts["model"], facts["missing"] - 1)[:2] == ([5, 6, 7], [])
