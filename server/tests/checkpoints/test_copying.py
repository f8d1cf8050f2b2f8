"""A copy is a checkpoint of its own that takes no second place on the disk."""

import os
import shutil
from pathlib import Path

import pytest

from twinkle_server.engine.files import Damaged, copy_checkpoint, publish, verify


@pytest.fixture
def source(tmp_path: Path) -> Path:
    def write(work: Path) -> None:
        (work / "weights").write_bytes(b"w" * 1000)
        (work / "config").write_bytes(b"{}")

    publish(tmp_path / "source", write, {"rank": 8})
    return tmp_path / "source"


def test_a_copy_has_the_same_files_and_survives_its_source(source: Path, tmp_path: Path) -> None:
    made = copy_checkpoint(source, tmp_path / "copy")
    assert (tmp_path / "copy" / "weights").stat().st_nlink == 2
    shutil.rmtree(source)
    manifest = verify(tmp_path / "copy", made.digest)
    assert manifest.facts == {"rank": 8}
    assert (tmp_path / "copy" / "weights").read_bytes() == b"w" * 1000


def test_where_no_links_can_be_made_bytes_are_copied(source: Path, tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("other device")

    monkeypatch.setattr(os, "link", refuse)
    copy_checkpoint(source, tmp_path / "copy", {"rank": 9})
    assert (tmp_path / "copy" / "weights").stat().st_nlink == 1
    assert verify(tmp_path / "copy").facts == {"rank": 9}


def test_what_is_damaged_is_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "weights").write_bytes(b"other")
    with pytest.raises(Damaged, match="weights"):
        copy_checkpoint(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
