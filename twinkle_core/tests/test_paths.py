"""Where things are kept, and that nothing is ever half-written."""

from pathlib import Path

import pytest

from twinkle.errors import OutputError
from twinkle.paths import cache_dir, new_directory, write_text


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    folder = cache_dir("models", "tiny")
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert folder.is_dir()


def test_without_that_it_lies_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "twinkle"


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
