"""MODEL may be the id of one at a hub: clients call it by that string, or by `--name`, and by nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_raw import Failed, Raw
from serving import Served
from tokenizers import Tokenizer

from twinkle.testing import FakeHub, tiny_model
from twinkle_server.serve import public_id, resolve
from twinkle_server.settings import Settings

from .conftest import Process

ID = "acme/tiny"
CLIENT = """
import json, sys, tinker

url, name = sys.argv[1:]
with tinker.ServiceClient(base_url=url, api_key="tml-local") as client:
    training = client.create_lora_training_client(base_model=name, rank=4).result(90)
    sampling = client.create_sampling_client(base_model=name).result(90)
    tokens = [made.get_tokenizer().encode("Who are you?") for made in (training, sampling)]
    print(json.dumps({"tokenizer": training.get_info().model_data.tokenizer_id, "tokens": tokens}))
"""


def command(data: Path, model: str) -> list[str]:
    return [sys.executable, "-m", "twinkle.cli", "serve", model, "--data", str(data), "--port", "0", "--no-auth"]


@pytest.mark.full
def test_clients_of_another_machine_use_the_id(tmp_path: Path) -> None:
    """The client has caches of its own, as it would elsewhere; all it knows is address and name."""
    folder = tiny_model(tmp_path / "model", "qwen3")
    with FakeHub() as hub:
        hub.add(ID, folder)
        online = {"HF_HUB_OFFLINE": "0", "TWINKLE_DEFAULT_HUB": "hf", "TINKER_TELEMETRY": "0"}
        service = Served(tmp_path / "data", command(tmp_path / "data", ID), hub.environment(tmp_path / "here") | online)
        try:
            service.start()
            with Raw(service.url) as raw:
                assert raw.base_model() == ID
            variables = {**os.environ, **hub.environment(tmp_path / "there"), **online}
            asked = [sys.executable, "-c", CLIENT, service.url, ID]
            done = subprocess.run(asked, env=variables, capture_output=True, text=True, timeout=300)
        finally:
            service.stop()
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Who are you?").ids
    assert told == {"tokenizer": ID, "tokens": [expected, expected]}


def test_a_hub_without_it_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with FakeHub() as hub:
        variables = {**os.environ, **hub.environment(tmp_path / "here"), "HF_HUB_OFFLINE": "0"}
        asked = command(tmp_path / "data", "hf://acme/none")
        done = subprocess.run(asked, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "acme/none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.full
def test_another_name_is_the_only_one(tmp_path: Path) -> None:
    process = Process(tmp_path / "data", "--name", "ours/best", "--no-auth").start()
    try:
        with Raw(process.url) as raw:
            assert raw.base_model() == "ours/best"
            assert raw.model().id
            with pytest.raises(Failed) as failed:
                raw.model(base_model="ledger/model")
    finally:
        assert process.stop() == 0
    assert failed.value.category == "user"
    assert "ledger/model" in failed.value.error
    assert "ours/best" in failed.value.error


@pytest.mark.parametrize(
    ("model", "hub", "found"),
    [
        ("hf://acme/tiny", "ms", ID),
        ("HF://acme/tiny", "ms", ID),
        (ID, "hf", ID),
        (ID, "ms", None),
        ("ms://acme/tiny", "hf", None),
        ("hf://acme/tiny@v2", "hf", None),
        ("builtin://tiny", "hf", None),
        ("aliased/model", "hf", None),
        ("folder/model", "hf", None),
        ("/a/b/c", "hf", None),
    ],
)
def test_a_tokenizer_is_public_where_its_model_is(
    model: str, hub: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINKLE_DEFAULT_HUB", hub)
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps({"aliased/model": str(tmp_path / "folder" / "model")}))
    assert public_id(model) == found


@pytest.mark.parametrize(("name", "served"), [(None, "hf://acme/tiny"), ("ours", "ours")])
def test_a_fetched_model_keeps_its_name(
    name: str | None, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle.hub.local_model", lambda model: tmp_path / "fetched")
    found = resolve(Settings("hf://acme/tiny", tmp_path / "data", name=name))
    assert (found.model, found.served_name, found.tokenizer) == (str(tmp_path / "fetched"), served, ID)
    assert Settings.parse(found.dump()).tokenizer == ID
