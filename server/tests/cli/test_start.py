"""What a start tells that cannot succeed, what it leaves behind, and what a directory keeps from one to the next."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from ledger_engine import ENGINE, MODEL
from server_raw import Failed, Raw
from serving import commanded

from twinkle.errors import ComponentNotFound, OutputError
from twinkle.testing import tiny_model
from twinkle_server.cli.serve import main as serve
from twinkle_server.cli.server import main as server
from twinkle_server.serve import resolve
from twinkle_server.settings import Settings

from .conftest import Process


def served(model: Path, data: Path) -> "subprocess.CompletedProcess[str]":
    """Run `twinkle serve` on a model that it cannot load, to its end."""
    command = [sys.executable, "-m", "twinkle_server", str(model), "--data", str(data), "--port", "0"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_is_told_in_one_sentence_and_no_key_is_lost(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    done = served(model, tmp_path / "data")
    assert (done.returncode, done.stdout) == (2, f"Loading {model.name} ...\n")
    *log, last = done.stderr.splitlines()
    assert last.startswith(f"Error: the engine cannot start: {model} has a config.json but no weights")
    assert [line for line in log if "Traceback" in line or "SIGKILL" in line] == []
    assert len([line for line in log if "no weights" in json.loads(line)["event"]]) == 1  # tried once, not again
    keys = CliRunner().invoke(server, ["keys", "list", "--all", "--data", str(tmp_path / "data")])
    assert keys.output.strip() == "no keys"  # the start that succeeds shows the first one


def test_a_model_in_a_relative_folder_is_found_by_clients_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    settings = resolve(Settings(model="tiny", data=tmp_path / "data"))
    assert (settings.model, settings.served_name) == (str(folder), "tiny")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_that_is_none_of_this_machine_is_told_as_such(tmp_path: Path, host: str) -> None:
    arguments = [str(MODEL), "--backend", ENGINE, "--data", str(tmp_path / "data"), "--port", "0", "--host", host]
    error = CliRunner().invoke(serve, arguments).exception
    assert isinstance(error, OutputError)
    assert re.search(rf"{re.escape(host)}:0: .*; use an address of this machine", str(error)), str(error)
    assert not (tmp_path / "data").exists()


@pytest.mark.full
def test_what_was_trained_belongs_to_the_name_of_its_model(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, "one") as url, Raw(url) as raw:
        saved = raw.model().save("kept")
    with running(data, "other") as url, Raw(url) as raw, pytest.raises(Failed) as failed:
        raw.load(saved)
    assert (failed.value.category, "base_model must be 'other', the served model, got 'one'" in str(failed.value)) == (
        "user",
        True,
    )
    with running(data, "one") as url, Raw(url) as raw:
        assert raw.load(saved).id


@contextlib.contextmanager
def running(data: Path, name: str) -> Iterator[str]:
    """Serve a directory under a name of the model, and give the address."""
    process = Process(data, "--name", name, "--no-auth").start()
    try:
        yield process.url
    finally:
        assert process.stop() == 0


def test_a_loss_that_nobody_offers_is_told_at_the_start(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    arguments = [str(model), "--data", str(tmp_path / "data"), "--port", "0", "--loss", "CrossEntropyLos"]
    error = CliRunner().invoke(serve, arguments).exception
    assert isinstance(error, ComponentNotFound)
    assert "CrossEntropyLoss" in str(error)
    assert not (tmp_path / "data").exists()


@pytest.mark.full
def test_a_model_without_tokenizer_is_told_at_the_start(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "qwen3")
    for file in (base / "tokenizer.json", base / "tokenizer_config.json"):
        file.unlink()
    command = commanded(["twinkle", "serve", str(base), "--data", str(tmp_path / "data"), "--no-auth"])
    command.start().stop()
    assert f"Warning: {base} has no tokenizer" in command.log()
