"""A checkpoint leaves as files or as one tar, streamed, and nothing else leaves with it."""

import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from twinkle_server.checkpoints.links import archive, archive_size, open_listed, pieces
from twinkle_server.engine.files import publish, read_manifest


def make(folder: Path, **files: bytes) -> Path:
    """Publish a folder."""

    def write(work: Path) -> None:
        for name, data in files.items():
            (work / name).write_bytes(data)

    publish(folder, write)
    return folder


def test_the_tar_has_what_was_published_and_the_size_that_was_said(tmp_path: Path) -> None:
    files = {"empty": b"", "a.json": b"{}", "block": bytes(512), "weights.safetensors": os.urandom(3_000_001)}
    folder = make(tmp_path / "c", **files)
    manifest = read_manifest(folder)
    data = b"".join(archive(folder, manifest))
    assert len(data) == archive_size(manifest)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == files


def test_names_longer_than_a_tar_header_holds_survive(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", **{"n" * 200: b"x"})
    manifest = read_manifest(folder)
    data = b"".join(archive(folder, manifest))
    assert len(data) == archive_size(manifest)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        assert tar.getnames() == ["n" * 200]


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", weights=bytes(40 * 2**20))
    manifest = read_manifest(folder)
    tracemalloc.start()
    total = sum(map(len, archive(folder, manifest)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 40 * 2**20
    assert peak < 6 * 2**20


@pytest.mark.parametrize(
    "name", ["", ".", "..", "manifest.json", "../secret", "/etc/passwd", "a\0", "unlisted", "link"]
)
def test_only_listed_files_are_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    folder = make(tmp_path / "c", weights=b"w")
    (folder / "unlisted").write_bytes(b"x")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(LookupError):
        open_listed(folder, name)
    assert b"".join(pieces(open_listed(folder, "weights")[0])) == b"w"


def test_a_listed_file_that_became_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", weights=b"w")
    manifest = read_manifest(folder)
    (folder / "weights").unlink()
    os.mkfifo(folder / "weights")
    with pytest.raises(LookupError):
        open_listed(folder, "weights")
    with pytest.raises(LookupError):
        b"".join(archive(folder, manifest))


def test_a_listed_file_that_became_a_link_or_changed_is_not_opened(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", weights=b"w", other=b"12345")
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "weights").unlink()
    (folder / "weights").symlink_to(tmp_path / "secret")
    (folder / "other").write_bytes(b"123")
    for name in ("weights", "other"):
        with pytest.raises(LookupError):
            open_listed(folder, name)
    with pytest.raises(LookupError):
        b"".join(archive(folder, read_manifest(folder)))
    with pytest.raises(LookupError):
        open_listed(tmp_path / "none", "weights")
