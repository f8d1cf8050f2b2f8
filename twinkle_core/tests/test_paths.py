"""Where things are kept, and that nothing is ever half-written."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from twinkle import paths
from twinkle.errors import DataError, OutputError
from twinkle.paths import cache_dir, new_directory, recovered, write_text


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    folder = cache_dir("models", "tiny")
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert folder.is_dir()


def test_without_that_it_lies_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "twinkle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir("models") == tmp_path / "xdg" / "twinkle" / "models"


def test_a_directory_appears_whole_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "result"
    with new_directory(target) as work:
        (work / "file").write_text("whole")
        assert not target.exists()
    assert (target / "file").read_text() == "whole"
    assert [p.name for p in target.parent.iterdir()] == ["result"]


def test_a_directory_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    target = tmp_path / "result"
    for text in ("old", "new"):
        with new_directory(target) as work:
            (work / text).write_text(text)
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_a_block_that_fails_leaves_the_old_directory_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result"
    target.mkdir()
    (target / "old").write_text("old")

    def fill_half() -> None:
        with new_directory(target) as work:
            (work / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_half()
    assert [p.name for p in target.iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_a_parent_that_is_a_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another output folder"), new_directory(tmp_path / "file" / "result"):
        pass


def test_a_text_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old")
    write_text(path, "new é")
    assert path.read_text("utf-8") == "new é"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_text_in_no_folder_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write_text(tmp_path / "absent" / "file", "text")


KILLED = """
import os, sys
from pathlib import Path
from twinkle.paths import new_directory

renames, usual = [], Path.rename

def rename(self, target):
    if len(renames) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    renames.append(target)
    return usual(self, target)

Path.rename = rename
with new_directory(Path(sys.argv[1])) as work:
    (work / "new").write_text("new")
"""


def killed_before_rename(target: Path, number: int) -> None:
    """Replace `target` in a process that is killed before its rename of that number (from 0)."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), str(number)], check=False)
    assert done.returncode == -9


@pytest.fixture
def old(tmp_path: Path) -> Path:
    target = tmp_path / "step-1.5"
    with new_directory(target) as work:
        (work / "old").write_text("old")
    return target


def test_a_kill_between_the_two_renames_is_mended_by_the_next_reader(old: Path) -> None:
    killed_before_rename(old, 1)
    assert not old.exists()
    assert [path.name for path in recovered(old).iterdir()] == ["old"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_next_writer_clears_away_what_a_killed_one_left(old: Path, number: int) -> None:
    killed_before_rename(old, number)
    with new_directory(old) as work:
        assert [path.name for path in old.iterdir()] == ["old"]
        (work / "newer").write_text("newer")
    assert [path.name for path in old.iterdir()] == ["newer"]
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_the_work_of_those_who_live_and_of_other_names_is_left_alone(old: Path) -> None:
    killed_before_rename(old.parent / "step-1", 0)
    with new_directory(old) as work:
        (work / "file").write_text("")
        with new_directory(old) as other:
            (other / "second").write_text("")
        assert (work / "file").is_file()
    assert len([path for path in old.parent.iterdir() if path.name.startswith(".step-1.")]) == 1


def test_a_writer_that_lives_has_time_to_finish(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_PATIENCE", 0.05)
    aside = paths._new_sibling(old, "old")
    old.rename(aside / old.name)
    later = threading.Thread(target=lambda: (time.sleep(0.01), (aside / old.name).rename(old)))
    later.start()
    assert recovered(old).is_dir()
    later.join()
    assert (old / "old").is_file()


def test_a_name_that_nobody_writes_is_what_it_is(tmp_path: Path) -> None:
    assert not recovered(tmp_path / "absent").exists()
    assert not recovered(tmp_path / "no" / "where").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("Error while serializing: I/O error: x (os error 27)")]
)
def test_a_full_disk_is_an_output_error_and_costs_nothing(old: Path, error: Exception) -> None:
    def fill_half() -> None:
        with new_directory(old) as work:
            (work / "half").write_text("half")
            raise error

    with pytest.raises(OutputError, match="what stood there before still stands; make room"):
        fill_half()
    assert [path.name for path in old.iterdir()] == ["old"]
    assert [path.name for path in old.parent.iterdir()] == [old.name]


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), DataError("x (os error 28)"), ValueError("else")])
def test_every_other_error_stays_what_it_is(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, new_directory(tmp_path / "result"):
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_files_that_were_made_for_their_owner_alone_can_be_read_like_others(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as work:
        (work / "plain").write_text("x")
        (work / "private").touch(mode=0o600)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["private"] == modes["plain"]
    assert sorted(modes) == ["plain", "private"]
