"""What was removed can be listed, restored and emptied, and a crash on the way loses nothing."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinkle_server.checkpoints.trash import Trash
from twinkle_server.checkpoints.upkeep import Upkeep
from twinkle_server.cli.server import main as server
from twinkle_server.errors import NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.store.opening import Store, open_store

from .test_sweep import DAY, HOUR, checkpoint, folder

PATH = CheckpointPath("s:train:0", "weights", "0")


def upkeep(store: Store) -> Upkeep:
    return Upkeep(store.data, store.database, store.checkpoints, store.keys, store.retention)


def command(data: Path, *words: str) -> str:
    done = CliRunner().invoke(server, [*words, "--data", str(data)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def exists(data: Path) -> bool:
    """Return whether the checkpoint can be loaded: its row, and its file."""
    store = open_store(data, serve=False)
    try:
        found = asyncio.run(store.checkpoints.get("a", PATH, time.time() + 9 * DAY))
    except NotFound:
        return False
    finally:
        store.close()
    return (data / found.folder / "weights").read_bytes() == b"0123456789"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory whose only checkpoint was deleted and is in the trash."""
    place = tmp_path / "data"
    store = open_store(place)

    async def story() -> None:
        await store.checkpoints.create(checkpoint(place, 0))
        await store.checkpoints.delete("a", PATH, 1.0)
        await upkeep(store).run(time.time() + 2 * HOUR)

    try:
        asyncio.run(story())
    finally:
        store.close()
    assert not (place / "checkpoints" / "0").exists()
    return place


def test_a_checkpoint_is_listed_counted_and_restored(data: Path) -> None:
    (entry,) = json.loads(command(data, "trash", "list", "--json"))
    assert (entry["checkpoint"], entry["tenant"], entry["folder"]) == (str(PATH), "a", "checkpoints/0")
    assert json.loads(command(data, "status", "--json"))["trash"] == {"entries": 1, "bytes": entry["bytes"]}
    assert not exists(data)
    assert command(data, "trash", "restore", entry["name"]) == f"restored {PATH}\n"
    assert exists(data)
    assert json.loads(command(data, "status", "--json"))["trash"] == {"entries": 0, "bytes": 0}


def test_what_is_restored_is_not_removed_again(data: Path) -> None:
    command(data, "trash", "restore", "checkpoints/0")
    store = open_store(data)
    try:
        asyncio.run(upkeep(store).run(time.time() + 30 * DAY))
    finally:
        store.close()
    assert exists(data)


def test_a_path_that_was_saved_anew_is_not_taken_from_its_checkpoint(data: Path) -> None:
    store = open_store(data, serve=False)
    try:
        asyncio.run(store.checkpoints.create(checkpoint(data, 1, name="0")))
    finally:
        store.close()
    done = CliRunner().invoke(server, ["trash", "restore", "checkpoints/0", "--data", str(data)])
    assert f"cannot restore {PATH}: a newer checkpoint has this path" in str(done.exception)
    assert len(list(Trash(data).entries())) == 1


def test_a_folder_that_a_row_names_comes_back_out_of_the_trash(data: Path) -> None:
    """As after an older database was restored."""
    store = open_store(data)
    try:
        store.database.write_now(lambda connection: connection.exec_driver_sql("UPDATE checkpoints SET deleted = NULL"))
        assert asyncio.run(upkeep(store).restore_named()) == ["checkpoints/0"]
    finally:
        store.close()
    assert exists(data)


def test_what_a_row_names_is_not_emptied_from_the_trash(data: Path) -> None:
    """A checkpoint may be restored between the look at what rows name and the sweep."""
    store = open_store(data)
    try:
        store.database.write_now(lambda connection: connection.exec_driver_sql("UPDATE checkpoints SET deleted = NULL"))
        upkept = asyncio.run(upkeep(store).run(time.time() + 30 * DAY))
    finally:
        store.close()
    assert upkept.emptied.entries == 0
    assert exists(data)


def test_an_operator_removes_orphans_and_may_restore_them(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(data, "checkpoints/unknown")
    later = time.time() + 2 * HOUR
    monkeypatch.setattr(time, "time", lambda: later)
    (found,) = json.loads(command(data, "orphans", "list", "--json"))
    assert found["folder"] == "checkpoints/unknown"
    assert json.loads(command(data, "status", "--json"))["orphans"] == {"entries": 1, "bytes": found["bytes"]}
    assert "moved 1 to the trash" in command(data, "orphans", "remove", "checkpoints/unknown")
    assert not (data / "checkpoints/unknown").exists()
    command(data, "trash", "restore", "checkpoints/unknown")
    assert (data / "checkpoints/unknown/weights").read_bytes() == b"0123456789"
    command(data, "trash", "empty", "--all")
    assert not list(Trash(data).entries())


def killed(data: Path, failpoint: str, program: str) -> None:
    environment = {**os.environ, "FAILPOINT": failpoint}
    done = subprocess.run(
        [sys.executable, "-c", program, str(data)], env=environment, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -9, done.stderr


UPKEEP = """
import asyncio, pathlib, sys, time
from twinkle_server.checkpoints.upkeep import Upkeep
from twinkle_server.store.opening import open_store
store = open_store(pathlib.Path(sys.argv[1]))
upkeep = Upkeep(store.data, store.database, store.checkpoints, store.keys, store.retention)
asyncio.run(upkeep.run(time.time() + 30 * 86400))
"""
RESTORE = """
import sys
from twinkle_server.cli.server import main
main(["trash", "restore", "checkpoints/0", "--data", sys.argv[1]])
"""


@pytest.mark.full
@pytest.mark.parametrize("failpoint", ["trash.before_put_back", "store.before_commit"])
def test_a_restore_that_is_killed_can_be_done_again(data: Path, failpoint: str) -> None:
    visit = "2" if failpoint.startswith("store") else "1"  # opening the store commits, too
    killed(data, f"{failpoint}:{visit}", RESTORE)
    assert not exists(data)
    if not (data / "checkpoints" / "0").exists():
        assert len(list(Trash(data).entries())) == 1
    command(data, "trash", "restore", "checkpoints/0")
    assert exists(data)


def test_a_sweep_that_is_killed_leaves_the_checkpoint_whole(data: Path) -> None:
    command(data, "trash", "restore", "checkpoints/0")
    store = open_store(data)
    try:
        asyncio.run(store.checkpoints.delete("a", PATH, 1.0))
    finally:
        store.close()
    killed(data, "trash.before_put", UPKEEP)
    assert (data / "checkpoints" / "0" / "weights").read_bytes() == b"0123456789"


def test_emptying_that_is_killed_leaves_an_entry_whole_or_nothing(data: Path) -> None:
    killed(data, "trash.before_remove", UPKEEP)
    (entry,) = Trash(data).entries()
    (data / "trash" / entry.name).rename(data / "trash" / ".tmp-half")  # killed a moment later
    assert not list(Trash(data).entries())
    Trash(data).finish()
    assert not list((data / "trash").iterdir())
