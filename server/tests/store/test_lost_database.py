"""A directory whose database is lost, foreign or damaged is refused with the way out, and stays as it is."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from ledger_engine import ENGINE, MODEL

from twinkle.errors import ConfigError
from twinkle_server.cli.server import main as server
from twinkle_server.engine.files import publish
from twinkle_server.errors import StoreError
from twinkle_server.store import open_store
from twinkle_server.store.aside import set_aside
from twinkle_server.store.inspection import damage
from twinkle_server.store.records import Checkpoint
from twinkle_server.tenancy.keys import issue


def missing(database: Path) -> None:
    database.unlink()


def empty(database: Path) -> None:
    database.write_bytes(b"")


def text(database: Path) -> None:
    database.write_bytes(b"not a database\n" * 100)


def no_tables(database: Path) -> None:
    database.unlink()
    with closing(sqlite3.connect(database)) as raw:
        raw.execute("VACUUM")


def another_application(database: Path) -> None:
    database.unlink()
    with closing(sqlite3.connect(database)) as raw:
        raw.executescript("CREATE TABLE alembic_version (version_num); INSERT INTO alembic_version VALUES ('0003');")
        raw.executescript("CREATE TABLE invoices (id INTEGER PRIMARY KEY); CREATE TABLE meta (name, value);")


def pipe(database: Path) -> None:
    database.unlink()
    os.mkfifo(database)


LOSSES: dict[Callable[[Path], None], str] = {
    missing: "twinkle.db is missing",
    empty: r"twinkle.db is empty \(0 bytes\)",
    no_tables: "twinkle.db is (an empty database|empty)",
    text: "twinkle.db is not an SQLite database",
    another_application: r"not a database of this service \(it has the table 'invoices', and the table 'lease'",
    pipe: "twinkle.db must be a regular file",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with a key, 3 checkpoints and a snapshot, after a clean end."""
    folder = tmp_path / "data"
    store = open_store(folder)
    try:
        asyncio.run(issue(store, "operator", role="operator"))
        for number in range(3):
            place = f"checkpoints/{number}"
            publish(folder / place, lambda work: (work / "weights").write_bytes(b"0123456789"))
            made = Checkpoint("a", "s:train:0", "weights", str(number), place, 10, "", "b", 8, float(number))
            asyncio.run(store.checkpoints.create(made))
        publish(folder / "snapshots/one", lambda work: (work / "weights").write_bytes(b"0123456789"))
    finally:
        store.close()
    return folder


def content(data: Path) -> dict[str, int]:
    """Return everything below a directory, with sizes of regular files; a lock says nothing."""
    return {
        path.relative_to(data).as_posix(): path.stat().st_size if path.is_file() else -1
        for path in data.rglob("*")
        if path.name != "lock"
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
@pytest.mark.parametrize("serve", [True, False])
def test_a_lost_database_is_told_with_the_way_to_restore_it(
    data: Path, lose: Callable[[Path], None], serve: bool
) -> None:
    lose(data / "twinkle.db")
    before = content(data)
    with pytest.raises(StoreError, match=LOSSES[lose]) as refused:
        open_store(data, serve=serve)
    said = str(refused.value)
    assert "3 in checkpoints/, 1 in snapshots/, the file secret" in said
    assert "restore the whole directory from a backup" in said
    assert f"twinkle server set-aside --data {data}" in said
    assert content(data) == before


@pytest.mark.parametrize("lose", [text, another_application, pipe], ids=lambda lose: lose.__name__)
def test_a_foreign_database_alone_is_not_written_to(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    (tmp_path / "twinkle.db").touch()
    lose(tmp_path / "twinkle.db")
    before = content(tmp_path)
    with pytest.raises(StoreError, match=LOSSES[lose]):
        open_store(tmp_path)
    assert content(tmp_path) == before


def test_a_start_that_was_killed_before_anything_was_written_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "twinkle.db").touch()
    (tmp_path / "lock").touch()
    (tmp_path / "checkpoints").mkdir()
    open_store(tmp_path).close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", ["PRAGMA user_version = 0", "PRAGMA journal_mode = WAL", "CREATE TABLE first (x)"])
def test_a_first_start_that_was_killed_leaves_files_of_sqlite_which_the_next_one_takes_up(
    tmp_path: Path, moment: str
) -> None:
    """Each statement runs in a process that is killed in it, or right behind it, with the journal on the disk."""
    program = (
        "import os, sqlite3, sys\n"
        "raw = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "raw.execute('PRAGMA auto_vacuum = INCREMENTAL')\n"
        "raw.execute('PRAGMA user_version = 0')\n"
        "if 'user' in sys.argv[2]:\n"
        "    raw.execute('PRAGMA cache_size = 1')\n"
        "    raw.execute('BEGIN IMMEDIATE')\n"
        "    raw.execute('PRAGMA user_version = 1')\n"
        "    raw.execute('CREATE TABLE first (x)')\n"
        "    raw.execute('INSERT INTO first VALUES (zeroblob(1000000))')\n"
        "else:\n"
        "    raw.execute('PRAGMA journal_mode = WAL')\n"
        "if 'CREATE' in sys.argv[2]:\n"
        "    raw.execute('BEGIN IMMEDIATE')\n"
        "    raw.execute(sys.argv[2])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    database = tmp_path / "twinkle.db"
    subprocess.run([sys.executable, "-c", program, str(database), moment], check=False)
    assert database.exists()
    if "user" in moment:
        assert (tmp_path / "twinkle.db-journal").stat().st_size
    else:
        (tmp_path / "twinkle.db-wal").write_bytes(bytes(32))
        (tmp_path / "twinkle.db-journal").write_bytes(bytes(512))
    open_store(tmp_path).close()


@pytest.mark.full
def test_serve_prints_no_new_key_beside_checkpoints_of_a_lost_database(data: Path) -> None:
    (data / "twinkle.db").unlink()
    before = content(data)
    command = [
        sys.executable,
        "-m",
        "twinkle_server",
        str(MODEL),
        "--backend",
        ENGINE,
        "--data",
        str(data),
        "--port",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "twinkle.db is missing, but the directory holds 3 in checkpoints/" in done.stderr
    assert "Traceback" not in done.stderr
    assert content(data) == before


def spoil(database: Path, seed: int) -> None:
    """Overwrite two thirds of a database's pages with random bytes, but not its header."""
    chosen = random.Random(seed)
    raw = bytearray(database.read_bytes())
    pages = len(raw) // 4096
    for page in chosen.sample(range(1, pages), 2 * pages // 3):
        raw[page * 4096 : (page + 1) * 4096] = chosen.randbytes(4096)
    database.write_bytes(raw)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(5))
def test_random_pages_are_told_as_a_damaged_database(data: Path, seed: int) -> None:
    spoil(data / "twinkle.db", seed)
    assert damage(data / "twinkle.db")
    with pytest.raises(StoreError, match=r"the database is damaged: .*; restore the whole directory .*\.recover"):
        open_store(data)
    for command in (["status"], ["status", "--json"], ["check"]):
        done = CliRunner().invoke(server, [*command, "--data", str(data)])
        assert isinstance(done.exception, ConfigError), done.output
        assert "the database is damaged" in str(done.exception)


def test_a_first_page_of_random_bytes_is_told(data: Path) -> None:
    raw = (data / "twinkle.db").read_bytes()
    (data / "twinkle.db").write_bytes(random.Random(7).randbytes(4096) + raw[4096:])
    with pytest.raises(StoreError, match="its first page is damaged, but the directory holds 3 in checkpoints/"):
        open_store(data)


@pytest.mark.parametrize("kind", ["keys", "checkpoints"])
def test_a_command_that_meets_a_damaged_page_says_so(data: Path, kind: str) -> None:
    with closing(sqlite3.connect(data / "twinkle.db")) as raw:
        page = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'keys'").fetchone()[0]
    bytes_ = bytearray((data / "twinkle.db").read_bytes())
    bytes_[(page - 1) * 4096 : page * 4096] = random.Random(3).randbytes(4096)
    (data / "twinkle.db").write_bytes(bytes_)
    done = CliRunner().invoke(server, ["keys", "list", "--data", str(data)])
    assert isinstance(done.exception, ConfigError)
    assert "database is damaged" in str(done.exception)


def test_a_whole_database_is_whole(data: Path) -> None:
    assert damage(data / "twinkle.db") == damage(data / "twinkle.db", full=True) == []
    done = CliRunner().invoke(server, ["check", "--files", "--data", str(data)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "3 folders checked; the database is intact")


def test_check_names_what_is_missing_and_what_is_damaged(data: Path) -> None:
    (data / "checkpoints/1/weights").write_bytes(b"0123456780")
    (data / "checkpoints/2/weights").unlink()
    (data / "checkpoints/2/manifest.json").unlink()
    (data / "checkpoints/2").rmdir()
    done = CliRunner().invoke(server, ["check", "--files", "--data", str(data)])
    assert done.exit_code == 1
    assert "missing: checkpoints/2, which the database references" in done.output
    assert "damaged: 1: " in done.output


@pytest.mark.full
def test_setting_aside_keeps_everything_and_lets_a_new_service_begin(data: Path) -> None:
    before = content(data)
    (data / "twinkle.db").unlink()
    done = CliRunner().invoke(server, ["set-aside", "--data", str(data)])
    assert done.exit_code == 0, done.output
    (aside,) = (data / "set-aside").iterdir()
    assert {name: size for name, size in before.items() if name != "twinkle.db"} == content(aside)
    store = open_store(data)
    try:
        assert asyncio.run(store.keys.all()) == []
    finally:
        store.close()


def test_a_directory_that_is_served_is_not_set_aside(data: Path) -> None:
    store = open_store(data)
    try:
        with pytest.raises(StoreError, match="a service is running on it"):
            set_aside(data)
    finally:
        store.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("visit", [1, 2, 3])
def test_setting_aside_that_is_killed_can_be_done_again(data: Path, visit: int) -> None:
    names = {path.relative_to(data).as_posix() for path in data.rglob("weights")}
    command = [sys.executable, "-c", "import sys; from twinkle_server.cli.server import main; main()"]
    command += ["set-aside", "--data", str(data)]
    environment = {**os.environ, "FAILPOINT": f"aside.before_move:{visit}"}
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -9
    if visit > 1:
        with pytest.raises(StoreError, match=r"twinkle\.db is missing, but the directory holds"):
            open_store(data)
    assert CliRunner().invoke(server, ["set-aside", "--data", str(data)]).exit_code == 0
    open_store(data).close()
    kept = {
        path.relative_to(aside).as_posix()
        for aside in (data / "set-aside").iterdir()
        for path in aside.rglob("weights")
    }
    assert kept == names
