"""The command, the keys and the status of a service that runs."""

import contextlib
import json
import os
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from ledger_engine import ENGINE, MODEL

from twinkle.errors import ConfigError, ModelLoadError, OutputError
from twinkle_server.cli.serve import main as serve
from twinkle_server.cli.server import main as server
from twinkle_server.store.opening import open_store
from twinkle_server.telemetry.status import Presence, announce

from .conftest import KEY, READY, Process


def run(*arguments: str) -> str:
    """Run `twinkle server ...`, demand success, and return what it wrote."""
    result = CliRunner().invoke(server, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def status_of(client: httpx.Client) -> int:
    return client.get("/api/v1/get_server_capabilities").status_code


@pytest.mark.full
def test_the_first_start_shows_one_key_and_one_line(service: Process) -> None:
    assert len(KEY.findall(service.said)) == 1
    assert len(READY.findall(service.said)) == 1
    assert len(service.said.splitlines()) == 4  # also that it loads, and that the model has no tokenizer
    with service.client() as client:
        models = client.get("/api/v1/get_server_capabilities").json()["supported_models"]
    assert models[0]["model_name"] == "ledger/model"


@pytest.mark.full
def test_strangers_get_401_everywhere_but_at_the_probes(service: Process) -> None:
    with httpx.Client(base_url=service.url, trust_env=False) as stranger:
        for path in ("/api/v1/create_session", "/api/v1/none", "/none", "/api/v1/forward_backward"):
            answer = stranger.post(path, content=b"x")
            assert answer.status_code == 401
            assert answer.json()["detail"]
        for path in ("/healthz", "/readyz", "/api/v1/healthz"):
            assert stranger.get(path).status_code == 200


@pytest.mark.full
def test_keys_made_and_revoked_while_it_runs_count_at_once(service: Process) -> None:
    key = run("keys", "create", "alice", "--data", str(service.data)).strip()
    assert KEY.fullmatch(key)
    with service.client(key) as alice, service.client() as operator:
        assert status_of(alice) == 200
        shown = run("keys", "list", "--data", str(service.data))
        assert "alice  user  tenant alice" in shown
        assert key not in shown
        run("keys", "revoke", "alice", "--data", str(service.data))
        time.sleep(1.0)  # so long may a key that was known go unasked for
        assert status_of(alice) == 401
        assert status_of(operator) == 200
    assert "alice" not in run("keys", "list", "--data", str(service.data))
    assert "revoked" in run("keys", "list", "--all", "--data", str(service.data))


@pytest.mark.full
def test_a_key_has_no_more_adapters_than_it_may(service: Process) -> None:
    arguments = ["--adapters", "1", "--json"]
    made = json.loads(run("keys", "create", "small", "--data", str(service.data), *arguments))
    with service.client(made["key"]) as client:
        session = client.post("/api/v1/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        body = {
            "session_id": session.json()["session_id"],
            "base_model": "ledger/model",
            "lora_config": {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True},
        }
        first = client.post("/api/v1/create_model", json={**body, "model_seq_id": 0})
        assert first.status_code == 200
        second = client.post("/api/v1/create_model", json={**body, "model_seq_id": 1})
        assert second.status_code == 403
        assert "limit of this key: 1" in second.json()["detail"]
        again = client.post("/api/v1/create_model", json={**body, "model_seq_id": 0})
        assert (again.status_code, again.json()) == (200, first.json())


def test_a_key_without_room_for_checkpoints_is_told_so_and_trains_on(service: Process) -> None:
    key = run("keys", "create", "tiny", "--data", str(service.data), "--bytes", "1").strip()
    with service.client(key) as client:

        def post(route: str, **body: Any) -> dict[str, Any]:
            answer = client.post(f"/api/v1{route}", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def result(route: str, **body: Any) -> dict[str, Any]:
            return post("/retrieve_future", request_id=post(route, **body)["request_id"])

        session = post("/create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"]
        lora = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
        made = {"session_id": session, "model_seq_id": 0, "base_model": "ledger/model", "lora_config": lora}
        model = result("/create_model", **made)["model_id"]
        saved = result("/save_weights", model_id=model, seq_id=1, path="a")
        assert saved["path"] == f"tinker://{model}/weights/a"
        refused = result("/save_weights", model_id=model, seq_id=2, path="b")
        assert refused["category"] == "user"
        assert "limit of this key: 1" in refused["error"]
        assert "error" not in result("/optim_step", model_id=model, seq_id=3, adam_params={})
        copied = client.post("/api/v1/copy_weights", json={"source_path": saved["path"]})
        assert copied.status_code == 403
        client.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a")
        assert "error" not in result("/save_weights", model_id=model, seq_id=4, path="b")


def test_status_asks_the_server(service: Process) -> None:
    said = json.loads(run("status", "--data", str(service.data), "--json"))
    assert said["running"] is True
    assert said["url"] == service.url
    assert said["model"] == "ledger/model"
    assert said["engine"] == "up"
    shown = run("status", "--data", str(service.data))
    assert shown.startswith(f"serves ledger/model at {service.url} (pid ")


def test_status_tells_that_a_server_starts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    open_store(data).close()
    announce(data, Presence(os.getpid(), "http://127.0.0.1:1", "tiny", time.time(), ready=False))
    assert run("status", "--data", str(data)).startswith(f"the server (pid {os.getpid()}) is starting; status from its")
    fields = json.loads(run("status", "--data", str(data), "--json"))
    assert (fields["running"], fields["starting"], fields["silent"]) == (False, True, os.getpid())


@pytest.mark.parametrize("command", ["status", "check"])
def test_a_folder_that_no_service_has_used_is_said_to_be_one(command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no twinkle\.db: no service has used it"):
        run(command, "--data", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_changes_something_is_in_the_audit(service: Process) -> None:
    with service.client() as client:
        client.post("/api/v1/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        end = time.monotonic() + 10
        events: list[str] = []
        while "session.create" not in events and time.monotonic() < end:
            answer = client.get("/api/v1/audit", params={"event_type": "all"})
            events = [entry["event"] for entry in answer.json()["entries"]]
    assert {"session.create", "key.create"} <= set(events)


def test_neither_process_has_torch(service: Process) -> None:
    assert service.process is not None
    for pid in (service.process.pid, service.engine()):
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_sigterm_ends_it_well_and_the_next_start_shows_no_key(tmp_path: Path) -> None:
    process = Process(tmp_path / "data")
    process.fresh = True
    process.start()
    key = process.key
    assert process.stop() == 0
    assert not (process.data / "server.json").exists()
    assert run("status", "--data", str(process.data)).startswith("no server runs on this folder")
    try:
        process.start()
        lines = process.said.splitlines()
        assert [line.split()[0] for line in lines] == ["Loading", "Warning:", "Twinkle"]
        with process.client(key) as client:
            assert status_of(client) == 200
    finally:
        assert process.stop() == 0


def refused(tmp_path: Path, *arguments: str, data: Path | None = None) -> Exception:
    """Return the error with which `twinkle serve` ends."""
    result = CliRunner().invoke(serve, ["--data", str(data or tmp_path / "data"), "--port", "0", *arguments])
    assert isinstance(result.exception, Exception), result.output
    return result.exception


def test_nobody_is_served_without_keys_but_this_machine(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        error = refused(tmp_path, str(MODEL), "--backend", ENGINE, "--no-auth", "--host", host)
        assert isinstance(error, ConfigError)
        assert "--no-auth" in str(error)
    assert not (tmp_path / "data").exists()


def test_what_cannot_be_served_is_told_before_anything_is_made(tmp_path: Path) -> None:
    missing = refused(tmp_path, str(tmp_path / "none"))
    assert isinstance(missing, ModelLoadError)
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = refused(tmp_path, str(MODEL), "--backend", ENGINE, "--port", str(taken.getsockname()[1]))
        assert isinstance(error, OutputError)
        assert "--port 0" in str(error)
    assert not (tmp_path / "data").exists()


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    error = refused(tmp_path, str(MODEL), "--backend", ENGINE, data=tmp_path)
    assert isinstance(error, ConfigError)
    assert "thesis.tex" in str(error)


@pytest.mark.full
def test_a_folder_of_another_machine_is_taken_only_on_request(tmp_path: Path) -> None:
    process = Process(tmp_path / "data").start()
    assert process.stop() == 0
    with contextlib.closing(sqlite3.connect(process.data / "twinkle.db")) as database:
        database.execute("UPDATE lease SET host = 'elsewhere', boot = 'another', released = 0")
        database.commit()
    error = refused(tmp_path, str(MODEL), "--name", "ledger/model", "--backend", ENGINE)
    assert "elsewhere" in str(error)
    assert "--take-over" in str(error)
    process.arguments.append("--take-over")
    try:
        process.start()
    finally:
        assert process.stop() == 0


def test_one_directory_is_served_once(service: Process) -> None:
    error = refused(service.data, str(MODEL), "--backend", ENGINE, data=service.data)
    assert isinstance(error, ConfigError)
    assert str(service.process and service.process.pid) in str(error)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "arguments", [("keys", "revoke", "nobody"), ("keys", "create", "a/b"), ("keys", "create", "operator")]
)
def test_what_a_command_cannot_do_it_says(service: Process, arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        run(*arguments, "--data", str(service.data))
