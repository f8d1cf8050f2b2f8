"""The fake hub is taken for the real ones by their own client libraries, unpatched, each in a process of its own."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from twinkle.testing import FakeHub
from twinkle_testing.fakehub import TOKEN

FILES = {"config.json": "{}", "model.safetensors": "w" * 3000, "sub/notes.txt": "hello"}


def test_the_client_of_hugging_face(hub: FakeHub, run, name: str, tmp_path: Path) -> None:
    repository = hub.add(name, FILES)
    first = repository.branches["main"]
    repository.commit({"config.json": "2"})
    hub.add(name + "-old", FILES)
    hub.rename(name + "-old", name + "-new")
    done = run(f"""
import json, pathlib
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import *
told = {{}}
folder = pathlib.Path(snapshot_download("{name}", revision="{first}"))
told["files"] = {{str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}}
told["one"] = pathlib.Path(hf_hub_download("{name}", "config.json")).read_text()
api = HfApi(token="{TOKEN}")
told["moved"] = api.model_info("{name}-old").id
told["user"] = api.whoami()["name"]
told["url"] = str(api.create_repo("{name}-up", private=True))
api.upload_folder(repo_id="{name}-up", folder_path=folder, commit_message="all")
told["listed"] = sorted(api.list_repo_files("{name}-up"))
told["refs"] = [branch.name for branch in api.list_repo_refs("{name}").branches]
for label, call in dict(
    strange=lambda: HfApi(token=False).model_info("{name}-up"),
    missing=lambda: api.model_info("{name}-nothing"),
    wrong=lambda: HfApi(token="hf_wrong").model_info("{name}-up"),
    revision=lambda: api.model_info("{name}", revision="nope"),
    entry=lambda: hf_hub_download("{name}", "nope.json"),
    again=lambda: api.create_repo("{name}-up"),
).items():
    try:
        call()
    except HfHubHTTPError as error:
        told[label] = [type(error).__name__, error.response.status_code]
print(json.dumps(told))
""")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "files": FILES,
        "one": "2",
        "moved": name + "-new",
        "user": "tester",
        "url": f"{hub.url}/{name}-up",
        "listed": sorted(FILES),
        "refs": ["main"],
        "strange": ["RepositoryNotFoundError", 401],
        "missing": ["RepositoryNotFoundError", 404],
        "wrong": ["HfHubHTTPError", 401],
        "revision": ["RevisionNotFoundError", 404],
        "entry": ["RemoteEntryNotFoundError", 404],
        "again": ["HfHubHTTPError", 409],
    }
    repository = hub.store.find(name + "-up", "model")
    assert repository is not None
    assert repository.private
    assert repository.commits[repository.branches["main"]].message == "all"


@pytest.mark.full
def test_the_client_of_modelscope(hub: FakeHub, run, name: str) -> None:
    repository = hub.add(name, FILES)
    first = repository.branches["main"]
    repository.commit({"config.json": "2"})
    repository.commit({"config.json": "3"}, branch="side")
    hub.add(name + "-old", FILES)
    hub.rename(name + "-old", name + "-new")
    hub.add(name + "-rows", {f"{n:04}.txt": str(n) for n in range(450)}, repo_type="dataset")
    done = run(f"""
import json, pathlib
from modelscope.hub.api import HubApi
from modelscope.hub.file_download import model_file_download
from modelscope.hub.snapshot_download import dataset_snapshot_download, snapshot_download
from modelscope_hub import HubApi as Client
from modelscope_hub.errors import APIError
told = {{}}
folder = pathlib.Path(snapshot_download("{name}", revision="{first}"))
told["files"] = {{str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}}
told["one"] = pathlib.Path(model_file_download("{name}", "config.json", revision="side")).read_text()
told["moved"] = sorted(p.name for p in pathlib.Path(snapshot_download("{name}-old")).iterdir())
told["pages"] = len(list(pathlib.Path(dataset_snapshot_download("{name}-rows")).iterdir()))
client = Client(token="{TOKEN}")
told["user"] = client.whoami().username
client.create_repo("{name}-up", "model", visibility="private")
client.create_repo("{name}-up", "dataset", visibility="private")
client.upload_folder("{name}-up", "model", folder, commit_message="all", disable_tqdm=True, use_cache=False)
HubApi(token="{TOKEN}").upload_file(
    path_or_fileobj=b"more", path_in_repo="more.txt", repo_id="{name}-up", commit_message="one", disable_tqdm=True)
told["listed"] = sorted(file.path for file in client.list_repo_files("{name}-up", "model"))
told["branches"] = sorted(entry["Revision"] for entry in client.list_repo_revisions("{name}", "model"))
for label, call in dict(
    strange=lambda: Client(token="").list_repo_files("{name}-up", "model"),
    missing=lambda: client.list_repo_files("{name}-nothing", "model"),
    wrong=lambda: Client(token="wrong").list_repo_files("{name}-up", "model"),
    revision=lambda: client.list_repo_files("{name}", "model", revision="nope"),
    again=lambda: client.create_repo("{name}-up", "model"),
).items():
    try:
        call()
    except APIError as error:
        told[label] = [type(error).__name__, error.status_code]
print(json.dumps(told))
""")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "files": FILES,
        "one": "3",
        "moved": ["config.json", "model.safetensors", "sub"],
        "pages": 450,
        "user": "tester",
        "listed": sorted([*FILES, "more.txt"]),
        "branches": ["master", "side"],
        "strange": ["NotExistError", 404],
        "missing": ["NotExistError", 404],
        "wrong": ["AuthenticationError", 401],
        "revision": ["NotExistError", 404],
        "again": ["AlreadyExistsError", 400],
    }
    assert hub.store.find(name + "-up", "dataset") is not None


def test_the_older_variable_of_modelscope_is_enough(hub: FakeHub, run, name: str) -> None:
    hub.add(name, FILES)
    done = run(
        "import os; os.environ.pop('MODELSCOPE_ENDPOINT')\n"
        "from twinkle.hub import local_model\n"
        f"print(local_model('{name}'))",
        PYTHONWARNINGS="error",
    )
    assert "modelscope" in done.stdout


@pytest.mark.full
def test_a_new_download_writes_lines_into_a_file_and_bars_on_a_terminal(
    hub: FakeHub, run, name: str, tmp_path: Path
) -> None:
    hub.add(name, FILES)
    script = f"""
from twinkle.hub import local_model
for id in ("hf://{name}", "ms://{name}"):
    local_model(id)
    local_model(id)
"""
    lines = run(script).stderr.splitlines()
    assert [line.partition("INFO ")[2] for line in lines] == [
        f"twinkle: downloading hf://{name}",
        f"twinkle: downloading ms://{name}",
    ]
    hub.add(name + "-t", FILES)
    shown = on_a_terminal(script.replace(name, name + "-t"), hub.environment(tmp_path / "terminal"))
    assert shown.count("100%|") >= 2
    assert "downloading" not in shown
    assert "INFO" not in shown


def on_a_terminal(script: str, environment: dict[str, str]) -> str:
    """Run a script whose errors go to a terminal, and return what stood there."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **environment}, stderr=end)
    os.close(end)
    parts = []
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while part := os.read(terminal, 4096):
            parts.append(part)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    return b"".join(parts).decode()
