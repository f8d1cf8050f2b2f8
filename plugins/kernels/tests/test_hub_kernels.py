"""Kernels of a hub: references, the policy, folders on this machine, the cache, and what is said without one."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi
from torch import nn

from twinkle.errors import ArgumentError, HubError, NotTrusted, Unsupported
from twinkle.kernel import HubRef, hub, kernelize, unkernelize
from twinkle.testing import FakeHub
from twinkle_kernels.loading import allowed_commit
from twinkle_testing.fakehub_http import Handler

COMMIT, OTHER = "a" * 40, "b" * 40
SOURCE = """
from torch import nn


class Twice(nn.Module):
    def forward(self, x):
        return FACTOR * x
"""


def repository(folder: Path, name: str, factor: int, depends: tuple[str, ...] = ()) -> Path:
    """Write a kernel repository with one build that runs on every CPU."""
    build = folder / "build" / "torch-cpu"
    (build / "layers").mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\n\n\ndef twice(x, inplace=False):\n    return 2 * x\n")
    (build / "layers" / "__init__.py").write_text(SOURCE.replace("FACTOR", str(factor)))
    facts = {
        "id": f"{name}_cpu", "name": name, "version": 1, "license": "Apache-2.0", "backend": {"type": "cpu"},
        "python-depends": [],
    }  # fmt: skip
    (build / "metadata.json").write_text(json.dumps(facts))
    return folder


def run(reference: HubRef) -> torch.Tensor:
    """Return what a layer gives for ones while the kernel has its place."""
    found = nn.Sequential(nn.ReLU())
    kernelize(found, {nn.ReLU: reference})
    result = found(torch.ones(2))
    unkernelize(found)
    return result


@pytest.fixture(autouse=True)
def _nobody_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE", raising=False)
    monkeypatch.delenv("TWINKLE_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(tmp_path / "work"))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of Hugging Face, which is all there is; it holds version 1 of acme/fast."""
    cache = tmp_path / "cache"
    place = cache / "kernels--acme--fast"
    repository(place / "snapshots" / COMMIT, "cached", 3)
    (place / "refs").mkdir()
    (place / "refs" / "v1").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_a_layer_of_a_folder_and_a_function_of_it(tmp_path: Path) -> None:
    folder = repository(tmp_path / "local", "local", 2)
    assert torch.equal(run(hub(f"{folder}:Twice")), torch.full((2,), 2.0))
    model = nn.ReLU()
    kernelize(model, {"torch.nn.functional.relu": hub(f"{folder}:twice", backend="cpu")})
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    unkernelize(model)


def test_a_relative_folder_counts_from_here(tmp_path: Path) -> None:
    repository(tmp_path / "work" / "mine", "mine", 5)
    assert torch.equal(run(hub("./mine:Twice")), torch.full((2,), 5.0))


def test_a_layer_that_is_not_there_is_named_with_its_nearest(tmp_path: Path) -> None:
    folder = repository(tmp_path / "near", "near", 2)
    with pytest.raises(ArgumentError, match="no layer or function 'Twcie'; nearest: 'Twice'"):
        run(hub(f"{folder}:Twcie"))


@pytest.mark.parametrize("content", ["empty", "broken"])
def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, content: str) -> None:
    folder = tmp_path / content
    folder.mkdir()
    if content == "broken":
        repository(folder, "broken", 2)
        (folder / "build" / "torch-cpu" / "__init__.py").write_text("raise OSError('no device')")
    says = "no device" if content == "broken" else "build variant"
    with pytest.raises(HubError, match=says) as caught:
        run(hub(f"{folder}:Twice"))
    assert caught.value.__cause__ is not None
    with pytest.raises(ArgumentError, match="there is no folder"):
        run(hub(f"{tmp_path}/nowhere:Twice"))


def test_a_frozen_run_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_FROZEN", "1")
    with pytest.raises(NotTrusted, match="frozen"):
        run(hub(f"{repository(tmp_path / 'frozen', 'frozen', 2)}:Twice"))


def test_from_the_cache_it_is_refused_until_its_commit_is_allowed(offline: Path) -> None:
    with pytest.raises(NotTrusted) as caught:
        run(hub("acme/fast:Twice", version=1))
    line = str(caught.value).partition("twinkle.toml: ")[2].partition("\n")[0]
    assert line == f"[trust] allow = ['hf://acme/fast@{COMMIT}']"
    Path("twinkle.toml").write_text(line.replace("[trust] ", "[trust]\n"))
    for reference in (
        hub("acme/fast:Twice", version=1),
        hub("hf://acme/fast:Twice", revision="v1"),
        hub("acme/fast:Twice", revision=COMMIT),
    ):
        assert torch.equal(run(reference), torch.full((2,), 3.0))
    repository(offline / "kernels--acme--fast" / "snapshots" / OTHER, "moved", 4)
    (offline / "kernels--acme--fast" / "refs" / "v1").write_text(OTHER)
    with pytest.raises(NotTrusted, match=OTHER):
        run(hub("acme/fast:Twice", version=1))


def test_what_is_not_in_the_cache_says_so(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    assert torch.equal(run(hub("acme/fast:Twice", version=1)), torch.full((2,), 3.0))
    with pytest.raises(HubError, match="'v2' is not in the cache of this machine, and HF_HUB_OFFLINE is set"):
        run(hub("acme/fast:Twice", version=2))


def test_a_hub_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(HfApi, "kernel_info", unreachable)
    with pytest.raises(HubError, match=r"kernel 'acme/fast:Twice' \(version 1\) cannot be loaded.*nobody answers"):
        run(hub("acme/fast:Twice", version=1))


def api(place: str = "acme/fast", commit: str = COMMIT) -> Any:
    """Return a hub's client that knows one repository."""
    return SimpleNamespace(kernel_info=lambda repo, revision: SimpleNamespace(id=place, sha=commit))


@pytest.mark.parametrize(
    ("policy", "place", "says"),
    [
        ("allow = ['hf://acme/*']", "acme/fast", ""),
        (f"allow = ['hf://acme/fast@{COMMIT}']", "acme/fast", ""),
        (f"allow = ['hf://acme/fast@{OTHER}']", "acme/fast", "it is not trusted"),
        ("allow = ['hf://acme/*']", "mallory/fast", "cannot run code from hf://mallory/fast"),
        ("allow = ['*']\ndeny = ['hf://acme/fast']", "acme/fast", "deny has"),
        (f"allow = ['*']\ndeny = ['hf://mallory/*@{COMMIT}']", "mallory/fast", "deny has"),
        ("allow = ['*']\nonly = ['hf://other/*']", "acme/fast", "only has"),
        ("allow = ['*']\n[trust.signed]\n'hf://acme/*' = { ed25519 = 'giszrYfBSKCiClunzV68qmjTahjnqtFlVUkD9SyoJ1c=' }",
         "acme/fast", "signatures of kernel repositories are not checked"),
    ],
)  # fmt: skip
def test_the_policy_is_asked_for_the_place_and_the_commit(policy: str, place: str, says: str) -> None:
    Path("twinkle.toml").write_text(f"[trust]\n{policy}\n")
    if not says:
        assert allowed_commit("acme/fast", "v1", api(place)) == COMMIT
        return
    with pytest.raises(NotTrusted, match=says):
        allowed_commit("acme/fast", "v1", api(place))


def test_what_is_denied_is_not_even_looked_up() -> None:
    Path("twinkle.toml").write_text("[trust]\ndeny = ['hf://acme/*']\n")
    with pytest.raises(NotTrusted, match="deny has"):
        allowed_commit("acme/fast", "v1", SimpleNamespace())


def test_a_reference_is_checked_when_it_is_written() -> None:
    assert hub("acme/fast:layers.Twice", version=1) == HubRef("acme/fast", "layers.Twice", None, 1)
    assert str(hub("acme/fast:Twice", revision="main")) == "kernel 'acme/fast:Twice' (revision main)"
    for reference, pins, says in (
        ("acme/fast:Twice", {}, "neither revision nor version"),
        ("acme/fast:Twice", {"revision": "main", "version": 1}, "both revision and version"),
        ("acme/fast", {"version": 1}, "no repository and layer"),
        ("acme/fast:", {"version": 1}, "'' is not the name of a layer"),
        ("acme/fast:not a name", {"version": 1}, "is not the name of a layer"),
        ("fast:Twice", {"version": 1}, "'fast' is not a repository"),
        ("acme/..:Twice", {"version": 1}, "is not a repository"),
        ("acme/fast:Twice", {"version": "1"}, "give a whole number"),
        ("acme/fast:Twice", {"version": True}, "give a whole number"),
        ("acme/fast:Twice", {"revision": "../x"}, "is not a branch, tag or commit"),
        ("acme/fast:Twice", {"version": 1, "backend": ""}, "backend=''"),
        ("./folder:Twice", {"version": 1}, "a folder has neither"),
        (3, {"version": 1}, "no repository and layer"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            hub(reference, **pins)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="not on ms://"):
        hub("ms://acme/fast:Twice", version=1)


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a hub on loopback that answers for kernel repositories as it does for models."""
    dispatch = Handler._dispatch

    def of_models(self: Handler) -> None:
        self.path = self.path.replace("/api/kernels/", "/api/models/").replace("/kernels/", "/")
        dispatch(self)

    monkeypatch.setattr(Handler, "_dispatch", of_models)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with FakeHub() as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.url)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found


def test_the_client_downloads_the_commit_that_was_allowed(
    online: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = online.add("acme/online", repository(tmp_path / "one", "online", 7))
    reference = hub("acme/online:Twice", revision="main")
    with pytest.raises(NotTrusted) as caught:
        run(reference)
    assert not list((tmp_path / "cache").rglob("*.py"))
    line = str(caught.value).partition("twinkle.toml: ")[2].partition("\n")[0]
    Path("twinkle.toml").write_text(line.replace("[trust] ", "[trust]\n"))
    assert torch.equal(run(reference), torch.full((2,), 7.0))
    made.commit({"build/torch-cpu/__init__.py": b"raise SystemExit"}, "second thoughts")
    with pytest.raises(NotTrusted, match="it is not trusted"):
        run(reference)
    online.rename("acme/online", "mallory/online")
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    Path("twinkle.toml").write_text("[trust]\ndeny = ['hf://mallory/*']\n")
    with pytest.raises(NotTrusted, match="forbidden"):
        run(reference)


def test_a_repository_that_a_kernel_depends_on_is_judged_too(online: FakeHub, tmp_path: Path) -> None:
    base = online.add("other/base", repository(tmp_path / "base", "base", 7))
    base.branches["v1"] = base.branches["main"]
    top = repository(tmp_path / "top", "top", 7)
    facts = json.loads((top / "build" / "torch-cpu" / "metadata.json").read_text())
    facts["kernel-depends"] = [{"repo-id": "other/base", "version": 1}]
    (top / "build" / "torch-cpu" / "metadata.json").write_text(json.dumps(facts))
    online.add("acme/top", top)
    Path("twinkle.toml").write_text("[trust]\nallow = ['hf://acme/*']\n")
    with pytest.raises(NotTrusted, match="cannot run code from hf://other/base"):
        run(hub("acme/top:Twice", revision="main"))
    Path("twinkle.toml").write_text("[trust]\nallow = ['hf://acme/*', 'hf://other/base']\n")
    assert torch.equal(run(hub("acme/top:Twice", revision="main")), torch.full((2,), 7.0))
