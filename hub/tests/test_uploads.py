"""Uploads to both hubs: private unless asked, whole commits, and failures that somebody hears of."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import ArgumentError, HubError
from twinkle.hub import HubOperation
from twinkle.testing import FakeHub
from twinkle_hub import uploads
from twinkle_testing.fakehub import TOKEN

LARGE = b"w" * 5000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-1"
    (folder / "sub").mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(LARGE)
    (folder / "sub" / "optimizer.pt").write_bytes(b"state")
    return folder


@pytest.fixture
def push(client: Any, scheme: str, name: str, checkpoint: Path):
    """Push the checkpoint in the other process, with a token."""

    def call(**options: Any) -> str:
        arguments = {"repo_id": f"{scheme}://{name}", "folder_path": str(checkpoint), "token": TOKEN, **options}
        return client("HubOperation.push_to_hub(**arguments)", arguments=arguments)

    return call


def head(hub: FakeHub, name: str, branch: str = "main") -> dict[str, bytes]:
    repository = hub.store.find(name, "model")
    assert repository is not None
    return dict(repository.commits[repository.branches[branch]].files)


def test_a_folder_becomes_one_commit_of_a_private_repository(hub: FakeHub, push, name: str, checkpoint: Path) -> None:
    address = push(commit_message="After step 1")
    assert address.startswith(hub.url)
    assert name in address
    repository = hub.store.find(name, "model")
    assert repository is not None
    assert repository.private
    assert len(repository.commits) == 2  # the empty one that a repository begins with, and ours
    assert repository.commits[repository.branches["main"]].message.startswith("After step 1")
    assert head(hub, name) == {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": LARGE,
        "sub/optimizer.pt": b"state",
    }
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "sub",
    ], "nothing is left in the folder"


def test_a_repository_is_public_if_asked(hub: FakeHub, push, name: str) -> None:
    push(private=False)
    repository = hub.store.find(name, "model")
    assert repository is not None
    assert not repository.private


def test_files_go_where_they_are_sent_and_others_stay(hub: FakeHub, push, name: str) -> None:
    hub.add(name, {"README.md": "ours"})
    push(path_in_repo="runs/1", ignore_patterns="sub/*")
    assert sorted(head(hub, name)) == ["README.md", "runs/1/adapter_config.json", "runs/1/adapter_model.safetensors"]
    push(revision="side", ignore_patterns=["*.safetensors", "sub/*"])
    assert "adapter_config.json" in head(hub, name, "side")
    assert "adapter_config.json" not in head(hub, name)


def test_what_is_pushed_comes_back(client: Any, push, scheme: str, name: str) -> None:
    push()
    got = client("files(HubOperation.download_file(id, token=token))", id=f"{scheme}://{name}", token=TOKEN)
    assert got["adapter_model.safetensors"].encode() == LARGE


def test_a_data_set_may_be_pushed(hub: FakeHub, push, name: str) -> None:
    push(repo_type="dataset")
    repository = hub.store.find(name, "dataset")
    assert repository is not None
    assert repository.private
    assert hub.store.find(name, "model") is None


def test_no_token_a_wrong_one_and_no_folder(client: Any, push, asked) -> None:
    with pytest.raises(client.told, match=r"HubError: cannot write to .*: no token was given; give token=, set"):
        push(token=None)
    with pytest.raises(client.told, match="there is no such folder; give the folder of a checkpoint"):
        push(folder_path="/nowhere")
    assert asked("POST") == []
    with pytest.raises(client.told, match=r"HubError: .*rejected the token") as error:
        push(token="hf_wrong_secret")
    assert "wrong_secret" not in str(error.value)


def test_a_namespace_of_others_is_refused(client: Any, scheme: str, checkpoint: Path) -> None:
    with pytest.raises(client.told, match=r"HubError: .*the token lacks the permission for this \(403\)"):
        client(
            "HubOperation.create_repo(id, token=token)", id=f"{scheme}://forbidden/x", token=TOKEN
        )  # fmt: skip
    with pytest.raises(client.told, match=r"HubError: cannot write to .*: HF_HUB_OFFLINE is set"):
        client("HubOperation.create_repo(id)", id=f"{scheme}://a/x", environment={"HF_HUB_OFFLINE": "1"})


def test_a_repository_is_made_once(hub: FakeHub, client: Any, scheme: str, name: str) -> None:
    ask = "HubOperation.create_model_repo(id, token=token)"
    assert client(ask, id=f"{scheme}://{name}", token=TOKEN) == client(ask, id=f"{scheme}://{name}", token=TOKEN)
    assert hub.store.find(name, "model").private


def test_a_login_is_known_or_not(client: Any, scheme: str) -> None:
    ask = "HubOperation.try_login(token)"
    default = {"TWINKLE_DEFAULT_HUB": scheme}
    assert [client(ask, token=token, environment=default) for token in (TOKEN, "hf_wrong", None)] == [
        True,
        False,
        False,
    ]


# In the background: the hub is a folder here, so that nothing but the background is tested.


def test_an_upload_goes_on_in_the_background_and_can_be_asked_or_awaited(checkpoint: Path, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/hub"
    upload = HubOperation.async_push_to_hub(place, checkpoint)
    assert upload.result(timeout=30) == place
    assert upload.done()
    assert (tmp_path / "hub" / "adapter_model.safetensors").read_bytes() == LARGE

    async def wait() -> str:
        return await HubOperation.async_push_to_hub(place, checkpoint, path_in_repo="again")

    assert asyncio.run(wait()) == place
    assert (tmp_path / "hub" / "again" / "adapter_config.json").is_file()
    assert HubOperation.wait_for() == {place: place}
    assert HubOperation.wait_for() == {}


def test_what_is_uploaded_is_what_was_there_at_the_call(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    waited = uploads.begin("x", checkpoint, lambda kept: str(gate.wait(30)))
    upload = HubOperation.async_push_to_hub(f"file://{tmp_path}/hub", checkpoint)
    work = checkpoint.with_name("new")
    work.mkdir()
    (work / "adapter_config.json").write_text("newer")
    checkpoint.rename(tmp_path / "old")
    work.rename(checkpoint)
    gate.set()
    upload.result(timeout=30)
    waited.result(timeout=30)
    HubOperation.wait_for()
    assert (tmp_path / "hub" / "adapter_config.json").read_text() == "{}"
    assert (tmp_path / "hub" / "adapter_model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".upload")] == []


def test_a_failure_is_logged_at_once_and_raised_to_whoever_asks(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place = f"file://{tmp_path}/file/hub"
    upload = HubOperation.async_push_to_hub(place, checkpoint)
    assert isinstance(upload.exception(timeout=30), HubError)
    assert f"upload to {place} failed: cannot create {place}" in caplog.text
    with pytest.raises(HubError, match="cannot create"):
        upload.result()
    good = f"file://{tmp_path}/hub"
    HubOperation.async_push_to_hub(good, checkpoint)
    HubOperation.async_push_to_hub(good, checkpoint, path_in_repo="twice")
    with pytest.raises(HubError, match=r"1 of 3 uploads failed: cannot create .*file/hub"):
        HubOperation.wait_for([place, good])
    assert (tmp_path / "hub" / "adapter_config.json").is_file()


def test_what_cannot_begin_is_told_at_the_call(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="there is no such folder"):
        HubOperation.async_push_to_hub(f"file://{tmp_path}/hub", tmp_path / "nothing")
    with pytest.raises(ArgumentError, match=r"async_push_to_hub: unknown argument 'privat', nearest: 'private'"):
        HubOperation.async_push_to_hub(f"file://{tmp_path}/hub", checkpoint, privat=True)
    with pytest.raises(ArgumentError, match="no upload to 'x' is in progress; in progress: none"):
        HubOperation.wait_for("x")


@pytest.mark.full
def test_a_process_ends_when_its_uploads_have(hub: FakeHub, run, scheme: str, name: str, checkpoint: Path) -> None:
    hub.slow(rf"POST .*{name}/commit", 0.5)
    done = run(
        "import sys\n"
        "from twinkle.hub import HubOperation\n"
        f"HubOperation.async_push_to_hub('{scheme}://{name}', {str(checkpoint)!r})\n"
        f"HubOperation.async_push_to_hub('{scheme}://forbidden/x', {str(checkpoint)!r})\n"
        "print('torch' in sys.modules)\n",
        HF_TOKEN=TOKEN,
        MODELSCOPE_API_TOKEN=TOKEN,
    )
    assert head(hub, name)["adapter_model.safetensors"] == LARGE
    assert done.stdout == "False\n"
    assert "uploaded to http" in done.stderr
    assert f"upload to {scheme}://forbidden/x failed: " in done.stderr
    assert TOKEN not in done.stderr
    assert "\r" not in done.stderr, "no bars in a file"
