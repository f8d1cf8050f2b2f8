"""A service is backed up while it trains; what is restored continues where the backup was."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from server_history import read_ledger
from server_raw import Raw, RawModel, row
from serving import Served, ledger

from twinkle.errors import ConfigError
from twinkle_server import failpoints
from twinkle_server.backup import making
from twinkle_server.backup.generations import locked, name_of
from twinkle_server.backup.making import Made, backup
from twinkle_server.backup.restoring import restore_backup, verify_backup
from twinkle_server.checkpoints.trash import Trash
from twinkle_server.cli.server import main as server
from twinkle_server.errors import StoreError

SETTINGS = {"limits": {"small_bytes": 64}, "times": {"snapshot": 0.2, "upkeep": 0.3}}
"""All payloads are files, which are soon removed again."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    made = ledger(tmp_path / "data", SETTINGS)
    try:
        yield made.start()
    finally:
        made.stop()


class Trainer(threading.Thread):
    """Trains on row after row, until it is told to end; deletes every second checkpoint that it saves.

    Attributes:
        model: the model.
        sent, done: first tokens of rows that were sent, and of those in an acknowledged step.
        saved: path of a checkpoint by the number of rows in it.
    """

    def __init__(self, model: RawModel, first: int = 100) -> None:
        super().__init__()
        self.model, self.ended, self.first = model, threading.Event(), first
        self.sent: list[int] = []
        self.done: list[int] = []
        self.saved: dict[int, str] = {}
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.ended.is_set() and len(self.sent) < 2000:
                self.once()
        except Exception as error:  # is raised by `end`
            self.error = error

    def once(self) -> None:
        token = self.first + len(self.sent)
        self.sent.append(token)
        self.model.train([token, *range(60)])
        self.done.append(token)
        if len(self.done) % 4 == 0:
            path = self.model.save(f"c{len(self.done)}")
            if len(self.done) % 8 == 0:
                name = path.partition(self.model.id)[2].strip("/")
                assert self.model.raw.send(
                    f"/training_runs/{self.model.id}/checkpoints/{name}", method="DELETE"
                ).is_success
            else:
                self.saved[len(self.done)] = path

    def wait_for(self, count: int) -> None:
        for _ in range(600):
            if len(self.done) >= count or not self.is_alive():
                break
            self.ended.wait(0.05)
        assert len(self.done) >= count, self.error

    def end(self) -> None:
        self.ended.set()
        self.join(60)
        if self.error:
            raise self.error


def applied(model: RawModel) -> list[int]:
    """Return the first tokens of the rows that a model has applied."""
    return [number >> 32 for number in read_ledger(model.forward([row([1, 2])]))[1]]


def read(database: Path, query: str, *values: Any) -> Any:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as raw:
        return raw.execute(query, values).fetchone()[0]


def restored(source: Path, data: Path) -> Served:
    restore_backup(source, data)
    return ledger(data, SETTINGS)


def check_model(service: Served, model_id: str, at_least: list[int], sent: list[int], saved: dict[int, str]) -> None:
    """Check what a restored service has of a model, and that it trains on."""
    number = int(read(service.data / "twinkle.db", "SELECT max(number) FROM operations WHERE lane = ?", model_id))
    with Raw(service.url, service.key) as raw:
        model = RawModel(raw, model_id, number)
        found = applied(model)
        assert found == sent[: len(found)]
        assert len(found) >= len(at_least)
        Trainer(model, first=5000).once()  # a row without a step may wait in the backup, and is applied with this one
        later = applied(model)
        assert later[: len(found)] == found
        assert later[len(found) :] in ([5000], [sent[len(found)], 5000] if len(found) < len(sent) else [5000])
        for place, (count, path) in enumerate(saved.items(), 1):
            assert applied(raw.load(path, number=place, session=model.session)) == sent[:count]


def test_a_service_is_backed_up_while_it_trains(service: Served, tmp_path: Path) -> None:
    to = tmp_path / "backups"
    with Raw(service.url, service.key) as raw:
        trainer = Trainer(raw.model())
        trainer.start()
        trainer.wait_for(6)
        before, saved = [*trainer.done], dict(trainer.saved)
        made = [json.loads(command("backup", "--data", str(service.data), "--to", str(to), "--json"))]
        trainer.wait_for(len(before) + 10)
        made.append(json.loads(command("backup", "--data", str(service.data), "--to", str(to), "--json")))
        trainer.end()
    service.stop()
    assert made[1]["linked"] > 0, "checkpoints of the first backup are not copied again"
    assert [entry["damaged"] for entry in made] == [[], []]
    assert not list(service.data.glob(".tmp-*"))
    for entry in made:
        command("verify-backup", entry["backup"])
    data = tmp_path / "restored"
    command("restore", "--from", made[0]["backup"], "--data", str(data))
    new = ledger(data, SETTINGS)
    try:
        new.start()
        check_model(new, trainer.model.id, before, trainer.sent, saved)
    finally:
        new.stop()
    assert command("check", "--data", str(data), "--files")


def command(*words: str) -> str:
    result = CliRunner().invoke(server, [*words])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> "Trained":
    """A service after its end: its folder, its model, the rows that were trained, and its checkpoints."""
    service = ledger(tmp_path_factory.mktemp("trained") / "data", SETTINGS)
    try:
        service.start()
        with Raw(service.url, service.key) as raw:
            trainer = Trainer(raw.model())
            for _ in range(5):
                trainer.once()
    finally:
        service.stop()
    return service.data, trainer.model.id, trainer.done, trainer.saved


@pytest.fixture
def data(trained: "Trained", tmp_path: Path) -> "Trained":
    """A copy of it for each test."""
    shutil.copytree(trained[0], tmp_path / "data")
    return tmp_path / "data", *trained[1:]


Trained = tuple[Path, str, list[int], dict[int, str]]
PROGRAM = "import sys; from pathlib import Path; from twinkle_server.{} import *; {}"
MAKE = PROGRAM.format("backup.making", "backup(Path(sys.argv[1]), Path(sys.argv[2]))")
KEEP_ONE = PROGRAM.format("backup.making", "backup(Path(sys.argv[1]), Path(sys.argv[2]), keep=1)")
RESTORE = PROGRAM.format("backup.restoring", "restore_backup(Path(sys.argv[2]), Path(sys.argv[1]))")


def killed(program: str, data: Path, to: Path, failpoint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(data), str(to)], env={**os.environ, "FAILPOINT": failpoint},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr


@pytest.mark.full  # starts many processes
def test_an_interrupted_backup_or_restore_continues(data: Trained, tmp_path: Path) -> None:
    folder, model, done, saved = data
    to, new = tmp_path / "backups", tmp_path / "new"
    before = contents(folder)
    first = ("backup.before_hold:2", "backup.before_database", "backup.before_copy:4")
    for failpoint in (*first, "backup.before_list", "backup.before_rename"):
        killed(MAKE, folder, to, failpoint)
        with pytest.raises(StoreError, match="contains no complete backup"):
            verify_backup(to)
    made = backup(folder, to)
    assert (made.copied, made.copied_bytes) == (0, 0)
    assert made.linked == len(made.listing.files) - 1, "all but the database were copied before"
    assert verify_backup(to)[2] == []
    assert [path.name for path in to.iterdir() if path.name != ".lock"] == [made.folder.name]
    assert contents(folder) == before, "the folder of the service is as it was"
    killed(KEEP_ONE, folder, to, "backup.before_remove")
    assert verify_backup(to)[2] == [], "the old one is gone, the new one is whole"
    made = backup(folder, to, keep=1)
    assert [path.name for path in to.iterdir() if path.name != ".lock"] == [made.folder.name]
    assert verify_backup(to)[2] == []
    killed(RESTORE, new, to, "restore.before_copy:3")
    service = restored(to, new)
    try:
        service.start()
        check_model(service, model, done, done, saved)
    finally:
        service.stop()
    other = tmp_path / "other"
    killed(RESTORE, other, to, "restore.before_move:3")
    with pytest.raises(StoreError, match="is not an empty folder"):
        restore_backup(to, other)
    assert not (other / "twinkle.db").exists(), "no service starts on half a folder"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a data folder, without the database, whose log the first reader merges into it."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("twinkle.db"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def a_file(made: Made, start: str) -> str:
    return next(name for name in sorted(made.listing.files) if name.startswith(start))


def lengthen(path: Path) -> None:
    """Append a byte."""
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "its content has changed since the backup (same size, other SHA-256)": flip,
    "in the list of the backup": lengthen,
    "cannot be read": Path.unlink,
}
"""Ways to damage a file, by what is said about it."""


def test_a_backup_that_the_disk_interrupts_continues(data: Trained, tmp_path: Path) -> None:
    folder, to = data[0], tmp_path / "backups"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "_watcher", failpoints._Failpoint("backup.before_list:1:enospc").reach)
        with pytest.raises(StoreError, match=r"No space left on device.*repeat the command, which continues"):
            backup(folder, to)
    assert not list(folder.glob(".tmp-*"))
    with pytest.raises(StoreError, match="contains no complete backup"):
        verify_backup(to)
    made = backup(folder, to)
    assert (made.copied, made.linked) == (0, len(made.listing.files) - 1)
    assert verify_backup(to)[2] == []


def test_damage_of_a_backup_is_found_and_not_inherited(data: Trained, tmp_path: Path) -> None:
    folder, to = data[0], tmp_path / "backups"
    made = backup(folder, to)
    for words, damage in DAMAGES.items():
        for start in ("checkpoints/", "snapshots/", "secret", "twinkle.db"):
            copy = tmp_path / "copy"
            shutil.copytree(made.folder, copy)
            name = a_file(made, start)
            damage(copy / name)
            problems = verify_backup(copy)[2]
            assert len(problems) == 1
            assert problems[0].startswith(f"{name}: ")
            assert words in problems[0]
            result = CliRunner().invoke(server, ["verify-backup", str(copy)])
            assert (result.exit_code, f"damaged: {name}" in result.output) == (1, True)
            with pytest.raises(StoreError, match=f"is damaged: {name}"):
                restore_backup(copy, tmp_path / "new")
            assert not (tmp_path / "new").exists()
            shutil.rmtree(copy)
    (made.folder / "payloads" / "more").parent.mkdir(exist_ok=True)
    (made.folder / "payloads" / "more").write_bytes(b"")
    assert verify_backup(to)[2] == ["payloads/more: is not part of the backup"]
    (made.folder / "payloads" / "more").unlink()

    flip(made.folder / a_file(made, "checkpoints/"))
    trusting, comparing = backup(folder, to), backup(folder, to, compare=True)
    assert len(verify_backup(trusting.folder)[2]) == 1
    assert (comparing.copied, verify_backup(to)) == (1, (comparing.folder, comparing.listing, []))
    assert len(backup(folder, to, keep=2).listing.files) == len(made.listing.files)
    assert len([path for path in to.iterdir() if not path.name.startswith(".")]) == 2


def test_what_is_lost_in_the_service_is_told_and_the_rest_is_saved(data: Trained, tmp_path: Path) -> None:
    folder, _, _, saved = data
    to = tmp_path / "backups"
    name = saved[4].rpartition("/")[2]
    place = read(folder / "twinkle.db", "SELECT folder FROM checkpoints WHERE name = ?", name)
    flip(folder / place / "ledger.json")
    assert backup(folder, to).listing.damaged == (f"{place}: 'ledger.json' differs from its manifest",)
    shutil.rmtree(folder / place)
    assert backup(folder, to).listing.damaged == (f"{place}: missing",)
    result = CliRunner().invoke(server, ["backup", "--data", str(folder), "--to", str(to)])
    assert (result.exit_code, f"damaged in {folder}: {place}: missing" in result.output) == (1, True)
    restore_backup(to, tmp_path / "new")
    assert (tmp_path / "new" / "secret").read_bytes() == (folder / "secret").read_bytes()


def test_what_is_removed_during_the_backup_is_in_it(data: Trained, tmp_path: Path) -> None:
    """A checkpoint is deleted, and its folder removed, right after the database was copied."""
    folder, _, _, saved = data
    place = read(folder / "twinkle.db", "SELECT folder FROM checkpoints WHERE name = ?", saved[4].rpartition("/")[2])
    expected = (folder / place / "ledger.json").read_bytes()
    original = making._copy_database

    def remove_after(source: Path, target: Path) -> None:
        original(source, target)
        shutil.rmtree(folder / place, ignore_errors=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "_copy_database", remove_after)
        made = backup(folder, tmp_path / "backups")
    assert made.listing.damaged == ()
    assert (made.folder / place / "ledger.json").read_bytes() == expected


def test_what_is_in_the_trash_but_still_named_is_in_the_backup(data: Trained, tmp_path: Path) -> None:
    folder, _, _, saved = data
    place = read(folder / "twinkle.db", "SELECT folder FROM checkpoints WHERE name = ?", saved[4].rpartition("/")[2])
    expected = (folder / place / "ledger.json").read_bytes()
    assert Trash(folder).put(folder / place, 2e9)
    made = backup(folder, tmp_path / "backups")
    assert made.listing.damaged == ()
    assert (made.folder / place / "ledger.json").read_bytes() == expected


def test_a_file_that_comes_and_goes_during_the_copy_makes_it_begin_again(data: Trained, tmp_path: Path) -> None:
    database = data[0] / "twinkle.db"
    visits: list[str] = []
    place = read(database, "SELECT folder FROM checkpoints WHERE deleted IS NULL")

    def reached(name: str) -> None:
        if name == "backup.before_database":
            visits.append(name)
            pair = (place, "checkpoints/brief") if len(visits) > 1 else ("checkpoints/brief", place)
            with closing(sqlite3.connect(database)) as raw, raw:
                raw.execute("UPDATE checkpoints SET folder = ? WHERE folder = ?", pair)

    before = failpoints.watch(reached)
    try:
        made = backup(data[0], tmp_path / "backups")
    finally:
        failpoints.watch(before)
    assert len(visits) == 2
    assert made.listing.damaged == ()
    assert f"{place}/ledger.json" in made.listing.files


def test_folders_that_cannot_be_used_are_refused(data: Trained, tmp_path: Path) -> None:
    folder, to = data[0], tmp_path / "backups"
    made = backup(folder, to)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    with pytest.raises(StoreError, match="is not an empty folder; choose a new folder for --data"):
        restore_backup(to, full)
    with pytest.raises(ConfigError, match="is not an empty folder"):
        CliRunner().invoke(
            server, ["restore", "--from", str(to), "--data", str(full)], standalone_mode=False, catch_exceptions=False
        )
    assert [path.name for path in full.iterdir()] == ["file"]
    with pytest.raises(StoreError, match="contains other data"):
        backup(folder, full)
    with (
        locked(tmp_path / "one"),
        making._held(folder),
    ):
        with pytest.raises(StoreError, match=r"another backup to .*one is running"):
            backup(folder, tmp_path / "one")
        with pytest.raises(StoreError, match=r"another backup of .*data is running"):
            backup(folder, tmp_path / "two")
    with pytest.raises(StoreError, match="is inside the data folder"):
        backup(folder, folder / "backups")
    with pytest.raises(StoreError, match="no service has used it"):
        backup(tmp_path / "nothing", to)
    with pytest.raises(StoreError, match="contains no complete backup"):
        restore_backup(tmp_path / "nothing", tmp_path / "new")
    with closing(sqlite3.connect(folder / "twinkle.db")) as raw, raw:
        raw.execute("UPDATE meta SET value = 'another' WHERE name = 'instance'")
    with pytest.raises(StoreError, match="backups of another service"):
        backup(folder, to)
    listing = json.loads((made.folder / "backup.json").read_bytes())
    (made.folder / "backup.json").write_text(json.dumps({**listing, "schema": "9999"}))
    with pytest.raises(StoreError, match=r"'9999', which is newer than .* install the twinkle-server that wrote it"):
        restore_backup(made.folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for content, message in (
        ({**listing, "format": 9}, "has the backup format 9"),
        ({**listing, "files": {"../x": ["0", 0]}}, "outside the backup"),
        ([], "is not a complete backup"),
    ):
        (made.folder / "backup.json").write_text(json.dumps(content))
        with pytest.raises(StoreError, match=message):
            verify_backup(made.folder)


def test_a_name_sorts_behind_all_others(tmp_path: Path) -> None:
    """In one second, with gaps of removed backups, and after the clock was set back."""
    made: list[str] = []
    for now in (1000.0, 1000.0, 1000.0, 1001.0, 999.0):
        name = name_of(tmp_path, now)
        assert not made or name.name > made[-1]
        name.mkdir()
        made.append(name.name)
        if len(made) == 2:
            (tmp_path / made[0]).rmdir()
    assert made[0] == "19700101T001640Z"
