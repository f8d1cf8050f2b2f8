"""file://: a folder as a hub, with the digest of its files as commit."""

import hashlib
import os
import socket
from pathlib import Path

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError, HubError
from twinkle.hub import HubOperation, local_model, open_hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "plugin"
    (place / "sub").mkdir(parents=True)
    (place / "__init__.py").write_text("x = 1\n")
    (place / "sub" / "b.py").write_text("y = 2\n")
    return place


def test_the_commit_is_the_digest_of_the_files(folder: Path, tmp_path: Path) -> None:
    hub = open_hub("file://")
    sums = {
        path: hashlib.sha256(text.encode()).hexdigest()
        for path, text in (("__init__.py", "x = 1\n"), ("sub/b.py", "y = 2\n"))
    }
    told = "".join(f"{digest}  {path}\n" for path, digest in sums.items())
    assert hub.commit_of(str(folder)) == (str(folder), hashlib.sha256(told.encode()).hexdigest())
    (tmp_path / "link").symlink_to(folder)
    repo, commit = hub.commit_of(str(tmp_path / "link"))
    assert repo == str(folder), "a link is a redirect"
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "b.pyc").touch()
    assert hub.commit_of(str(folder)) == (repo, commit)
    hub.download_code(repo, commit, tmp_path / "in")
    assert (tmp_path / "in" / "sub" / "b.py").read_text() == "y = 2\n"
    assert hub.commit_of(str(tmp_path / "in"))[1] == commit


def test_an_edit_is_another_commit(folder: Path, tmp_path: Path) -> None:
    hub = open_hub("file://")
    repo, commit = hub.commit_of(str(folder))
    (folder / "__init__.py").write_text("x = 2\n")
    with pytest.raises(HubError, match=r"the folder is at \w+ now, and it has no history"):
        hub.commit_of(repo, commit)
    with pytest.raises(HubError, match="its files have changed since commit"):
        hub.download_code(repo, commit, tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == []


@pytest.mark.timeout(60)  # a reader that waits for the pipe would wait for ever
@pytest.mark.parametrize(("kind", "word"), [("pipe", "a pipe"), ("socket", "a socket")])
def test_what_is_no_regular_file_is_refused_and_not_opened(folder: Path, tmp_path: Path, kind: str, word: str) -> None:
    hub = open_hub("file://")
    repo, commit = hub.commit_of(str(folder))
    with socket.socket(socket.AF_UNIX) as endpoint:
        if kind == "pipe":
            os.mkfifo(folder / "sub" / "odd.py")
        else:
            endpoint.bind(str(folder / "sub" / "odd.py"))
    said = rf"sub/odd\.py is {word}, not a regular file"
    with pytest.raises(HubError, match=said):
        hub.commit_of(str(folder))
    with pytest.raises(HubError, match=said):
        hub.download_code(repo, commit, tmp_path / "in")
    with pytest.raises(HubError, match=said):
        hub.push(f"file://{tmp_path}/copy", folder)


def test_links_and_what_is_not_there_are_refused(folder: Path, tmp_path: Path) -> None:
    hub = open_hub("file://")
    (folder / "secret").symlink_to("/etc/passwd")
    with pytest.raises(HubError, match="secret is a link, which may point outside"):
        hub.commit_of(str(folder))
    for call in (hub.commit_of, lambda path: hub.load_dataset(f"file://{path}")):
        with pytest.raises(HubError, match="there is no folder"):
            call(str(tmp_path / "nothing"))
    with pytest.raises(HubError, match="there is no"):
        local_model(f"file://{tmp_path}/nothing")
    with pytest.raises(ArgumentError, match="must be absolute"):
        hub.commit_of("plugin")


def test_a_model_and_its_files(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert local_model(f"file://{folder}") == folder
    assert HubOperation.download_file(f"file://{folder}", allow_patterns="*.json") == str(folder)
    with pytest.raises(ArgumentError, match="a folder has no revisions"):
        local_model(f"file://{folder}@v1")
    with pytest.raises(ArgumentError, match="unknown argument 'revision'"):
        local_model(f"file://{folder}", revision="v1")


@pytest.mark.full
def test_rows_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 3}\n')
    assert list(Dataset(DatasetMeta(f"file://{tmp_path}"))) == [{"a": 1}, {"a": 2}]
    assert list(Dataset(DatasetMeta(f"file://{tmp_path}", split="test"))) == [{"a": 3}]
    with pytest.raises(DataError, match=r"Unknown split \"dev\".*pass one of them as split"):
        Dataset(DatasetMeta(f"file://{tmp_path}", split="dev"))


def test_a_push_adds_and_replaces_files(folder: Path, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/hub"
    assert HubOperation.create_repo(place) == place
    assert HubOperation.push_to_hub(place, folder) == place
    (folder / "__init__.py").write_text("x = 3\n")
    HubOperation.push_to_hub(place, folder, path_in_repo="v2", ignore_patterns="sub/*")
    found = {path.relative_to(tmp_path / "hub").as_posix() for path in (tmp_path / "hub").rglob("*") if path.is_file()}
    assert found == {"__init__.py", "sub/b.py", "v2/__init__.py"}
    assert (tmp_path / "hub" / "v2" / "__init__.py").read_text() == "x = 3\n"
    with pytest.raises(HubError, match="a path outside the repository"):
        HubOperation.push_to_hub(place, folder, path_in_repo="../out")
    with pytest.raises(ArgumentError, match="does not support revision"):
        HubOperation.push_to_hub(place, folder, revision="v2")
