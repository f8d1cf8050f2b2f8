"""Secrets that pass through the service are nowhere afterwards: not in rows, files, logs or the engine's process."""

import re
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from twinkle_server.wire import tinker_pb2 as wire

from .conftest import Process

TEXT = "ZEBRA-CROSSING-CANARY"
"""Stands for what a tenant trains on."""
TOKENS = [1, *TEXT.encode(), 2]
FORM = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}


def pass_body(model: str, number: int) -> bytes:
    body = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = body.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(TOKENS, np.int32).tobytes()
    for name, values in (("target_tokens", np.asarray(TOKENS, "<i8")), ("weights", np.ones(len(TOKENS), "<f4"))):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = wire.DTYPE_INT64 if values.dtype.kind == "i" else wire.DTYPE_FLOAT32
        tensor.shape.append(len(values))
        tensor.dense = values.tobytes()
    return body.SerializeToString()


def work(client: httpx.Client) -> list[int]:
    """Train a little, and put the key wherever a confused client might; return statuses."""
    key = client.headers["X-API-Key"]

    def post(path: str, body: Any, **options: Any) -> httpx.Response:
        return client.post(f"/api/v1{path}", json=body, **options)

    session = post("/create_session", {**FORM, "user_metadata": {"note": "fine"}}).json()["session_id"]
    model = f"{session}:train:0"
    made = {"session_id": session, "model_seq_id": 0, "base_model": "ledger/model", "lora_config": LORA}
    answers = [post("/create_model", made)]
    headers = {"Content-Type": "application/x-protobuf"}
    for number in (1, 2):
        answers.append(client.post("/api/v1/forward_backward", content=pass_body(model, number), headers=headers))
    answers.append(post("/optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}))
    answers.append(post("/save_weights", {"model_id": model, "seq_id": 4, "path": "final"}))
    for answer in list(answers):
        answers.append(post("/retrieve_future", {"request_id": answer.json()["request_id"]}))
    event = {"event": "UNHANDLED_EXCEPTION", "event_id": "1", "event_session_index": 0, "severity": "ERROR"}
    event |= {"timestamp": "2026-01-01T00:00:00Z", "error_type": "X", "error_message": f"headers X-API-Key: {key}"}
    telemetry = {"events": [event], "platform": "x", "sdk_version": "0.38.0", "session_id": session}
    answers.append(post("/telemetry", {**telemetry, "process_uuid": "x"}))
    answers.append(client.get(f"/api/v1/sessions/{key}"))
    answers.append(client.get(f"/api/v1/{key}/none", params={"key": key}))
    answers.append(post("/retrieve_future", {"request_id": key}))
    answers.append(post("/get_info", {"model_id": key}))
    answers.append(client.post("/api/v1/create_session", content=b"{" + key.encode()))
    wrong = client.get("/api/v1/sessions", headers={"X-API-Key": key[:-1] + ("A" if key[-1] != "A" else "B")})
    answers.append(wrong)
    return [answer.status_code for answer in answers]


@pytest.fixture(scope="module")
def worked(service: Process) -> tuple[Process, dict[str, bytes]]:
    """A service after work, and what of its engine's process can be seen from outside."""
    with service.client() as client:
        statuses = work(client)
    assert not [status for status in statuses if status >= 500], statuses
    assert statuses[:10] == [200] * 10
    place = Path(f"/proc/{service.engine()}")
    assert service.process is not None
    seen = {name: (place / name).read_bytes() for name in ("environ", "cmdline")}
    seen["own cmdline"] = Path(f"/proc/{service.process.pid}/cmdline").read_bytes()
    return service, seen


def secrets_of(service: Process) -> list[bytes]:
    """The key in pieces, so that one that was cut is found too, and the directory's secret."""
    key = service.key.removeprefix("tml-")
    secret = (service.data / "secret").read_bytes()
    return [key[:20].encode(), key[-20:].encode(), secret, secret.hex().encode()]


def test_nothing_is_in_the_data_directory(worked: tuple[Process, dict[str, bytes]]) -> None:
    service, _ = worked
    files = [path for path in service.data.rglob("*") if path.is_file() and path.name != "secret"]
    assert any(path.name == "twinkle.db" for path in files)
    for path in files:
        data = path.read_bytes()
        assert not [secret for secret in secrets_of(service) if secret in data], path.name


def test_keys_are_rows_of_hashes(worked: tuple[Process, dict[str, bytes]]) -> None:
    service, _ = worked
    with sqlite3.connect(f"file:{service.data / 'twinkle.db'}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT * FROM keys").fetchall()
    connection.close()
    assert len(rows) == 1
    assert re.search(r"\$argon2id\$v=19\$m=\d+,t=\d+,p=\d+\$", str(rows[0]))


def test_nothing_is_in_the_logs_not_even_what_was_trained_on(worked: tuple[Process, dict[str, bytes]]) -> None:
    service, _ = worked
    log = service.log
    assert "refused" in log
    for secret in secrets_of(service):
        assert secret.decode("latin-1") not in log
    for trained in (TEXT, ", ".join(map(str, TOKENS[:8])), str(TOKENS[:8])):
        assert trained not in log
    assert '"tenant":"operator"' not in log


def test_nothing_is_in_the_engines_process(worked: tuple[Process, dict[str, bytes]]) -> None:
    service, seen = worked
    for name, data in seen.items():
        assert not [secret for secret in secrets_of(service) if secret in data], name


def test_files_are_for_their_owner_alone(worked: tuple[Process, dict[str, bytes]]) -> None:
    service, _ = worked
    assert service.data.stat().st_mode & 0o777 == 0o700
    assert (service.data / "secret").stat().st_mode & 0o777 == 0o600
