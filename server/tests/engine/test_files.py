"""Published folders: whole or not there, whatever the disk does, and whatever lies in them later."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_server.engine import files
from twinkle_server.engine.files import Damaged, publish, read_manifest, verify


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 5000)
    (folder / "state.json").write_text("{}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_published_folder_says_what_is_in_it(tmp_path: Path) -> None:
    done = publish(tmp_path / "above" / "one", write, {"number": 7})
    manifest = verify(tmp_path / "above" / "one", done.digest)
    assert (done.size, set(manifest.files), manifest.facts) == (5002, {"weights.bin", "state.json"}, {"number": 7})
    assert names(tmp_path / "above") == {"one"}
    assert read_manifest(tmp_path / "above" / "one") == manifest


def test_what_an_earlier_attempt_left_under_the_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "old").write_text("torn")
    publish(tmp_path / "one", write)
    assert set(verify(tmp_path / "one").files) == {"weights.bin", "state.json"}
    assert names(tmp_path) == {"one"}
    assert names(tmp_path / "one") == {"weights.bin", "state.json", "manifest.json"}


class Faults:
    """Lets the n-th call of a function of `os` fail."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, at: int, number: int) -> None:
        self.calls, self._at, self._number, self._real = 0, at, number, getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls == self._at:
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*arguments, **more)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["fsync", "rename", "open", "mkdir"])
@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_fails_at_any_call_leaves_nothing_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, there: bool
) -> None:
    for at in range(1, 40):
        folder = tmp_path / str(at)
        if there:
            folder.mkdir()
        with monkeypatch.context() as patch:
            faults = Faults(patch, name, at, number)
            try:
                publish(folder, write)
            except OSError as error:
                failed = error.errno == number
            else:
                failed = False
        if faults.calls < at:
            assert not failed
            return
        if not failed:
            assert name == "open", "only clearing up may fail and be passed over"
            verify(folder)
        elif folder.exists():
            assert not names(folder), "what lay there before is all that may be left"
        assert name == "open" or all(not left.startswith(files.TEMPORARY) for left in names(tmp_path))
    raise AssertionError("it never came to an end")


def test_a_file_that_the_disk_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            publish(tmp_path / "one", write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not names(tmp_path)


POINTS = ["before_write", "before_manifest", "before_rename", "after_rename", "after_publish"]
CHILD = """
import sys
from pathlib import Path
from twinkle_server.engine.files import publish
def write(folder):
    (folder / "a").write_bytes(b"1" * 100)
for _ in range(2):
    try:
        publish(Path(sys.argv[1]) / "one", write)
    except OSError as error:
        print(error.errno, sorted(path.name for path in Path(sys.argv[1]).iterdir()))
"""


def child(folder: Path, failpoint: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, folder], env={**os.environ, "FAILPOINT": failpoint}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("point", POINTS)
def test_after_a_kill_the_folder_is_whole_or_not_there(tmp_path: Path, point: str) -> None:
    assert child(tmp_path, f"files.{point}").returncode == -9
    folder = tmp_path / "one"
    assert folder.exists() == (point in ("after_rename", "after_publish"))
    if folder.exists():
        assert set(verify(folder).files) == {"a"}
    left = names(tmp_path) - {"one"}
    assert all(name.startswith(files.TEMPORARY) for name in left)
    publish(folder, write)
    assert set(verify(folder).files) == {"weights.bin", "state.json"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("point", POINTS[:-1])
@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_an_error_of_the_disk_at_a_failpoint_leaves_nothing(
    tmp_path: Path, point: str, action: str, number: int
) -> None:
    done = child(tmp_path, f"files.{point}:1:{action}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{number} []\n"
    assert set(verify(tmp_path / "one").files) == {"a"}, "the second attempt worked"


def test_what_writes_is_told_of_its_own_error(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "a").touch()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        publish(tmp_path / "one", fails)
    assert not names(tmp_path)


def _link(folder: Path) -> None:
    (folder / "a").symlink_to("/etc/passwd")


def _nested(folder: Path) -> None:
    (folder / "a").mkdir()


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "a")


def _manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("write", [_link, _nested, _pipe, _manifest])
def test_only_regular_files_are_published(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(ValueError, match=r"regular file|written by publish"):
        publish(tmp_path / "one", write)
    assert not names(tmp_path)


def _cut(folder: Path) -> None:
    os.truncate(folder / "weights.bin", 10)


def _flip(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"v" * 5000)


def _gone(folder: Path) -> None:
    (folder / "weights.bin").unlink()


def _linked(folder: Path) -> None:
    (folder / "weights.bin").rename(folder / "real")
    (folder / "weights.bin").symlink_to("real")


def _piped(folder: Path) -> None:
    _gone(folder)
    os.mkfifo(folder / "weights.bin")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut, r"'weights\.bin' has \d+ bytes, and \d+ in manifest\.json"),
        (_flip, r"the content of 'weights\.bin' has changed \(same size, other SHA-256\)"),
        (_gone, r"weights\.bin"),
        (_linked, r"weights\.bin"),
        (_piped, r"weights\.bin"),
    ],
)
def test_a_file_that_is_not_what_was_published_is_named(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    publish(tmp_path / "one", write)
    harm(tmp_path / "one")
    with pytest.raises(Damaged, match=words):
        verify(tmp_path / "one")


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[1]", '{"format": 2, "files": {}, "facts": {}}', '{"format": 1, "files": [], "facts": {}}',
        '{"format": 1, "files": {"a": 3}, "facts": {}}', '{"format": 1, "files": {}, "facts": 3}',
        '{"format": 1, "files": {"../outside": {"sha256": "", "size": 0}}, "facts": {}}',
        '{"format": 1, "files": {"/etc/passwd": {"sha256": "", "size": 0}}, "facts": {}}',
        '{"format": 1, "files": {"": {"sha256": "", "size": 0}}, "facts": {}}',
    ],
)  # fmt: skip
def test_a_manifest_that_makes_no_sense_is_refused_and_nothing_outside_is_read(tmp_path: Path, text: str) -> None:
    publish(tmp_path / "one", write)
    (tmp_path / "outside").write_text("")
    (tmp_path / "one" / "manifest.json").write_text(text)
    with pytest.raises(Damaged):
        verify(tmp_path / "one")


def test_a_manifest_that_was_exchanged_is_found_by_its_digest(tmp_path: Path) -> None:
    done = publish(tmp_path / "one", write)
    publish(tmp_path / "one", write, {"number": 2})
    verify(tmp_path / "one")
    with pytest.raises(Damaged, match="differs from the published one"):
        verify(tmp_path / "one", done.digest)


def test_want_of_descriptors_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "one", write)
    for at in (1, 2, 3):
        with monkeypatch.context() as patch:
            Faults(patch, "open", at, errno.EMFILE)
            with pytest.raises(OSError, match="Too many open files"):
                verify(tmp_path / "one")


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    publish(tmp_path / "one", write)
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(Damaged):
        verify(tmp_path / "two")


def test_a_file_that_no_manifest_names_is_refused_and_not_opened(tmp_path: Path) -> None:
    publish(tmp_path / "one", write)
    assert set(verify(tmp_path / "one").files) == {"weights.bin", "state.json"}
    os.mkfifo(tmp_path / "one" / "waits-for-ever")
    with pytest.raises(Damaged, match="'waits-for-ever' was not published"):
        verify(tmp_path / "one")
