"""The lock file: what is written is read again, what is damaged is refused, and no writer loses another's work."""

import multiprocessing
import string
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_registry import ComponentConflict, ComponentNotFound, Registry, SettingsError
from twinkle_registry.trust.editor import remove
from twinkle_registry.trust.lock import (
    Lock,
    LockedDistribution,
    LockedFile,
    LockedRepository,
    change_lock,
    parse_lock,
    to_toml,
)
from twinkle_registry.trust.reference import HubReference
from twinkle_registry.trust.store import digest_of, listing_text, parse_listing

House = Callable[..., Registry]
HASH = "ab" * 32
REPOSITORY = LockedRepository("hf://acme/focal", "hf://acme/focal", "3f" * 20, {"__init__.py": HASH})
names = st.text(string.printable + "äß\x7f\u2028😀", min_size=1, max_size=12)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(dists=st.dictionaries(names, st.dictionaries(names, hashes, max_size=3), max_size=3), path=names)
def test_whatever_is_written_is_read_again(dists: dict[str, dict[str, str]], path: str) -> None:
    pypi = tuple(LockedDistribution(name, "1.0", files) for name, files in dists.items())
    lock = Lock(Path("/x/twinkle.lock"), (REPOSITORY,), pypi, (LockedFile(path, HASH),))
    again = parse_lock(to_toml(lock).encode(), lock.path)
    assert (again.hub, again.file) == (lock.hub, lock.file)
    assert {e.name: dict(e.files) for e in again.pypi} == dists


def test_the_listing_is_what_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("X = 1")
    from twinkle_registry.trust.store import hash_folder

    files = hash_folder(tmp_path, context="test")
    assert parse_listing(listing_text(files)) == files
    (tmp_path / "files.sha256").write_text(listing_text(files))
    subprocess.run(["sha256sum", "--check", "--strict", "files.sha256"], cwd=tmp_path, check=True, capture_output=True)


GOOD = to_toml(Lock(Path("twinkle.lock"), (REPOSITORY,), (), (LockedFile("a.py", HASH),)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "<<<<<<< HEAD\nschema = 1", "cannot be read as TOML"),
        ("schema = 1", "schema = 2", r"schema = 2, but this version reads 1; run: pip install -U twinkle-registry"),
        ("schema = 1", "schema = true", "schema must be 1, got True"),
        ("schema = 1", "", "schema must be 1, got None"),
        ("[[hub]]", "[[hubb]]", "unknown key 'hubb', nearest: 'hub'"),
        ("reference =", "referense =", "hub None has the unknown key 'referense', nearest: 'reference'"),
        ('"hf://acme/focal"', '"acme/focal"', "is not a reference to a hub"),
        ('commit = "3f', 'commit = "../', "an invalid commit"),
        ('digest = "', 'digest = "0', "the digest of hub 'hf://acme/focal' does not match its files"),
        ('"__init__.py" = "ab', '"__init__.py" = "ac', "does not match its files"),
        ('"__init__.py"', '"../../__init__.py"', r"the path '../../__init__.py' is refused"),
        ('"__init__.py" = "abab', '"__init__.py" = "xyab', "must be a table of paths and SHA-256"),
        ("[hub.files]", "[hub.filed]", "unknown key 'filed'"),
        ('path = "a.py"', "path = 3", "path of file 3 must be a string, got 3"),
        ('sha256 = "abab', 'sha256 = "ab', "is not a SHA-256"),
        ("[[hub]]", "[hub]", "cannot be read as TOML|must be a list of tables"),
    ],
)
def test_a_damaged_lock_is_refused_and_stays_as_it_is(hub: Any, house: House, old: str, new: str, message: str) -> None:
    assert old in GOOD
    registry = house()
    Path("twinkle.lock").write_text(GOOD.replace(old, new, 1))
    before = Path("twinkle.lock").read_bytes()
    attempts = [lambda: registry.resolve("hf://acme/focal", "loss"), lambda: remove("a.py")]
    for attempt in [*attempts, *([house] if "[[hub]]" in before.decode() else [])]:
        with pytest.raises(SettingsError, match=message):
            attempt()
    assert Path("twinkle.lock").read_bytes() == before


@pytest.mark.parametrize("size", [0, 1, 100, len(GOOD) // 2, len(GOOD) - 2])
def test_half_a_lock_trusts_nothing(size: int) -> None:
    with pytest.raises(SettingsError, match="is damaged"):
        parse_lock(GOOD[:size].encode(), Path("twinkle.lock"))


def test_which_entry_answers_for_a_reference() -> None:
    commit = "4f" * 20
    plain, tagged = REPOSITORY, replace(REPOSITORY, reference="hf://acme/focal@v1", commit=commit)

    def found(lock: Lock, text: str) -> LockedRepository | None:
        return lock.find(HubReference.parse(text, context="test"))

    both = Lock(Path("x"), (plain, tagged))
    assert found(both, "hf://acme/focal") is plain
    assert found(both, "hf://acme/focal@v1") is tagged
    assert found(both, f"hf://acme/focal@{commit}") is tagged
    assert found(both, "hf://acme/focal@v2") is None
    assert found(both, "ms://acme/focal") is None
    assert found(Lock(Path("x"), (tagged,)), "hf://acme/focal") is tagged
    two = Lock(Path("x"), (tagged, replace(tagged, reference="hf://acme/focal@v2")))
    with pytest.raises(ComponentConflict, match="twinkle plugins remove hf://acme/focal@v1"):
        found(two, "hf://acme/focal")


def test_remove_forgets_and_nothing_else_does(hub: Any, house: House) -> None:
    tagged = replace(REPOSITORY, reference="hf://acme/focal@v1")
    change_lock(lambda lock: replace(lock, hub=(REPOSITORY, tagged), file=(LockedFile("a.py", HASH),)))
    with pytest.raises(ComponentNotFound, match=r"does not list 'hf://acme/fokal'; nearest: 'hf://acme/focal'"):
        remove("hf://acme/fokal")
    assert remove("hf://acme/focal@v1") == ["hf://acme/focal@v1"]
    assert remove("./a.py") == ["a.py"]
    assert remove("hf://acme/focal#Name") == ["hf://acme/focal"]
    assert Lock.load() == Lock(Path("twinkle.lock").absolute())


def test_the_lock_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path / "my.lock"))
    change_lock(lambda lock: lock.with_file(LockedFile("work/a.py", HASH)))
    assert (tmp_path / "my.lock").is_file()
    assert Lock.load().of_file(Path("a.py")) == LockedFile("work/a.py", HASH)
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path))
    with pytest.raises(SettingsError, match=r"the lock must be a file, got .*; set TWINKLE_LOCK to the path of a file"):
        Lock.load()
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path / "none" / "my.lock"))
    with pytest.raises(SettingsError, match="cannot be written: No such file"):
        change_lock(lambda lock: lock)


def test_a_lock_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "shared.lock").write_text("schema = 1\n")
    Path("twinkle.lock").symlink_to(tmp_path / "shared.lock")
    change_lock(lambda lock: lock.with_file(LockedFile("a.py", HASH)))
    assert Path("twinkle.lock").is_symlink()
    assert HASH in (tmp_path / "shared.lock").read_text()


def test_a_writer_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    change_lock(lambda lock: lock.with_file(LockedFile("a.py", HASH)))
    before = Path("twinkle.lock").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinkle_registry.trust.lock.os.fsync", full)
    with pytest.raises(SettingsError, match="No space left on device; it was not changed"):
        change_lock(lambda lock: lock.with_file(LockedFile("b.py", HASH)))
    assert Path("twinkle.lock").read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["twinkle.lock"]


def _writer(number: int) -> None:
    for step in range(10):
        entry = LockedFile(f"{number}-{step}.py", HASH)
        change_lock(lambda lock, entry=entry: lock.with_file(entry))


@pytest.mark.skipif(sys.platform == "win32", reason="other systems have no guard, only the rename")
def test_processes_that_write_at_once_lose_nothing() -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_writer, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {writer.exitcode for writer in writers} == {0}
    assert len(Lock.load().file) == 40


def test_the_digest_is_that_of_the_sorted_listing() -> None:
    assert digest_of({"b": "1" * 64, "a": "2" * 64}) == digest_of({"a": "2" * 64, "b": "1" * 64})
