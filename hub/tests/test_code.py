"""Code from a hub: commits, redirects, and bytes that stay where they belong."""

from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import HubError
from twinkle.testing import FakeHub
from twinkle_hub import code
from twinkle_testing.fakehub import TOKEN

FILES = {"__init__.py": "x = 1\n", "sub/module.py": "y = 2\n"}


def test_a_revision_becomes_a_commit_and_an_old_name_the_new_one(hub: FakeHub, client: Any, scheme, name) -> None:
    repository = hub.add(name, FILES)
    first = repository.branches["main"]
    head = repository.commit({"a.txt": "1"})
    side = repository.commit({"a.txt": "2"}, branch="side")
    repository.tags["v1"] = first
    of = "open_hub(scheme + '://').commit_of(repo, revision)"

    def ask(revision: str | None) -> Any:
        return client(of, scheme=scheme, repo=name, revision=revision)

    assert [ask(revision)[1] for revision in (None, "side", "v1", first)] == [head, side, first, first]
    hub.rename(name, name + "-new")
    assert ask(None) == [name + "-new", head]
    for wrong in ("nope", "0" * 40):
        with pytest.raises(client.told, match=r"HubError: .*revision"):
            ask(wrong)


def test_modelscope_s_git_server_is_asked_where_its_listing_has_no_commit(
    hub: FakeHub, client: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add(name, FILES, private=True)
    first = repository.branches["main"]
    repository.tags["v1"] = first
    head = repository.commit({"a.txt": "1"})
    monkeypatch.setattr(hub.store, "tells_commits", False)
    of = "open_hub('ms://').commit_of(repo, revision, token=token)[1]"

    def ask(revision: str | None) -> Any:
        return client(of, repo=name, revision=revision, token=TOKEN)

    assert [ask(revision) for revision in (None, "master", "v1", first)] == [head, head, first, first]


def test_the_files_of_a_commit_arrive(hub: FakeHub, client: Any, scheme, name, tmp_path: Path) -> None:
    repository = hub.add(name, FILES, private=True)
    first = repository.branches["main"]
    repository.commit({"__init__.py": "x = 2\n"})
    variables = {"HF_TOKEN": TOKEN, "MODELSCOPE_API_TOKEN": TOKEN}
    ask = "code(scheme, repo, commit, target)"
    where = {"scheme": scheme, "repo": name, "commit": first}
    assert client(ask, **where, target=tmp_path / "a", environment=variables) == FILES
    with pytest.raises(client.told, match="an empty folder"):
        client(ask, **where, target=tmp_path / "a", environment=variables)
    with pytest.raises(client.told, match="or it is private and no token was given"):
        client(ask, **where, target=tmp_path / "b")


@pytest.mark.full
def test_a_connection_that_breaks_leaves_a_whole_folder_or_an_empty_one(hub, client, scheme, name, tmp_path) -> None:
    commit = hub.add(name, {**FILES, "big.txt": "b" * 9000}).branches["main"]
    where = {"scheme": scheme, "repo": name, "commit": commit}
    hub.cut(rf"GET .*{name}.*big.txt", after=4000)
    whole = client("code(scheme, repo, commit, target)", **where, target=tmp_path / "a")
    assert len(whole["big.txt"]) == 9000
    hub.cut(rf"GET .*{name}.*big.txt", after=4000, times=3)
    with pytest.raises(client.told, match=f"Unreachable: {scheme}://{name}@.*call again"):
        client("code(scheme, repo, commit, target)", **where, target=tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("path", ["../outside.py", "/etc/outside.py", "a/../../outside.py", "a\\..\\outside.py"])
def test_a_path_outside_the_repository_is_refused_before_anything_is_fetched(
    hub: FakeHub, client: Any, scheme, name, path: str, tmp_path: Path, asked
) -> None:
    commit = hub.add(name, {**FILES, path: "evil"}).branches["main"]
    with pytest.raises(client.told, match=r"HubError: .*a path outside the repository; nothing was downloaded"):
        client("code(scheme, repo, commit, target)", scheme=scheme, repo=name, commit=commit, target=tmp_path / "in")
    assert not (tmp_path / "outside.py").exists()
    assert asked("module.py") == []


@pytest.mark.parametrize(
    "path", ["", ".", "a//b", "a/./b", "~/../x/..", "C:/x", "c:x", "a\nb", "a\x00b", ".git/hooks/x", "\u202eyp.x"]
)
def test_no_such_path_is_written(path: str) -> None:
    with pytest.raises(HubError, match="outside the repository"):
        code.checked("hf://a/b", [(path, 1)])


def test_a_listing_has_limits() -> None:
    assert len(code.checked("hf://a/b", [(f"{n}.py", 1) for n in range(code.MAX_FILES)])) == code.MAX_FILES
    with pytest.raises(HubError, match="more than 2,000 files or 64 MiB"):
        code.checked("hf://a/b", ((f"{n}.py", 1) for n in iter(int, 1)))
    with pytest.raises(HubError, match="more than 2,000 files or 64 MiB"):
        code.checked("hf://a/b", [("a.py", code.MAX_BYTES), ("b.py", 1)])
    with pytest.raises(HubError, match="two files with the same name"):
        code.checked("hf://a/b", [("a.py", 1), ("A.py", 1)])


def test_a_hub_that_sends_more_than_it_listed_is_stopped(tmp_path: Path) -> None:
    sent = 0

    def endless(path: str):
        nonlocal sent
        while True:
            sent += 2**20
            yield b"x" * 2**20

    with pytest.raises(HubError, match="more than 2,000 files or 64 MiB"):
        code.write("hf://a/b", tmp_path / "in", ["sub/a.py"], endless)
    assert sent == code.MAX_BYTES + 2**20
    assert list((tmp_path / "in").iterdir()) == []
