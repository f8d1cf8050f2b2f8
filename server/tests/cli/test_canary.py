"""Secrets that pass through the service are nowhere afterwards: not in rows, files, logs or the engine's process."""

import asyncio
import io
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from fastapi import APIRouter, Request, Response

from twinkle.testing import tiny_model
from twinkle_server.application import create_application
from twinkle_server.cli.server import main as server
from twinkle_server.settings import Settings
from twinkle_server.telemetry import logs
from twinkle_server.telemetry.health import INSIDE
from twinkle_server.tenancy.keys import new_key
from twinkle_server.wire import tinker_pb2 as wire

from .conftest import Process

BASE = "served/model"
PROTOBUF = {"Content-Type": "application/x-protobuf"}
TEXT = "ZEBRA-CROSSING-CANARY"
"""Stands for what a tenant trains on."""
TOKENS = [1, *TEXT.encode(), 2]
FORM = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}


def pass_body(model: str, number: int, loss: str = "cross_entropy") -> bytes:
    body = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss)
    datum = body.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(TOKENS, np.int32).tobytes()
    for name, values in (("target_tokens", np.asarray(TOKENS, "<i8")), ("weights", np.ones(len(TOKENS), "<f4"))):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = wire.DTYPE_INT64 if values.dtype.kind == "i" else wire.DTYPE_FLOAT32
        tensor.shape.append(len(values))
        tensor.dense = values.tobytes()
    return body.SerializeToString()


def post(client: httpx.Client, path: str, body: Any, **options: Any) -> httpx.Response:
    return client.post(f"/api/v1{path}", json=body, **options)


def train(client: httpx.Client, base: str) -> tuple[str, list[httpx.Response]]:
    """Train a little; return the model, and answers."""
    session = post(client, "/create_session", {**FORM, "user_metadata": {"note": "fine"}}).json()["session_id"]
    model = f"{session}:train:0"
    made = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": LORA}
    answers = [post(client, "/create_model", made)]
    for number in (1, 2):
        body = pass_body(model, number)
        answers.append(client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF))
    answers.append(post(client, "/optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}))
    answers.append(post(client, "/save_weights", {"model_id": model, "seq_id": 4, "path": "final"}))
    return model, answers


def misplace(client: httpx.Client, model: str) -> list[httpx.Response]:
    """Put the key wherever a confused client might, and return answers."""
    key, session = client.headers["X-API-Key"], model.partition(":")[0]
    event = {"event": "UNHANDLED_EXCEPTION", "event_id": "1", "event_session_index": 0, "severity": "ERROR"}
    event |= {"timestamp": "2026-01-01T00:00:00Z", "error_type": "X", "error_message": f"headers X-API-Key: {key}"}
    telemetry = {"events": [event], "platform": "x", "sdk_version": "0.38.0", "session_id": session}
    numbered = {"model_id": model, "seq_id": 8}
    path = f"tinker://{key}/weights/final"
    sampling = {"session_id": session, "sampling_session_seq_id": 0}
    return [
        post(client, "/telemetry", {**telemetry, "process_uuid": "x"}),
        client.get(f"/api/v1/sessions/{key}"),
        client.get(f"/api/v1/{key}/none", params={"key": key}),
        post(client, "/retrieve_future", {"request_id": key}),
        post(client, "/get_info", {"model_id": key}),
        client.post("/api/v1/create_session", content=b"{" + key.encode()),
        client.get("/api/v1/sessions", headers={"X-API-Key": key[:-1] + ("A" if key[-1] != "A" else "B")}),
        client.get("/api/v1/sessions", headers={"Authorization": f"Bearer {key}", "Cookie": f"key={key}"}),
        client.get(f"/download/{key}/archive.tar"),
        post(client, "/weights_info", {"tinker_path": path}),
        post(client, "/copy_weights", {"source_path": path}, headers={"X-Idempotency-Key": key}),
        post(client, "/create_sampling_session", {**sampling, "model_path": path}),
        post(client, "/optim_step", {**numbered, "adam_params": {"learning_rate": key}}),
        post(client, f"/sessions/{session}/finish", {"reason": {"type": "errored"}, "detail": f"X-API-Key: {key}"}),
    ]  # fmt: skip


def misname(client: httpx.Client, model: str) -> list[httpx.Response]:
    """Put the key into operations that fail, and whose failure is kept: return their promises."""
    key, session = client.headers["X-API-Key"], model.partition(":")[0]
    made = {"session_id": session, "model_seq_id": 1, "lora_config": LORA}
    path = f"tinker://{key}/weights/final"
    odd = {"type": key}
    return [
        post(client, "/create_model", {**made, "base_model": key}),
        post(client, "/create_model", {**made, "model_seq_id": 2, "base_model": BASE, "optimizer_config": odd}),
        post(client, "/load_weights", {"session_id": session, "model_seq_id": 3, "path": path}),
        client.post("/api/v1/forward_backward", content=pass_body(model, 5, loss=key), headers=PROTOBUF),
        post(client, "/save_weights", {"model_id": model, "seq_id": 6, "path": f"{key}/x"}),
        post(client, "/save_weights", {"model_id": model, "seq_id": 7, "path": key}),
    ]  # fmt: skip


def links(client: httpx.Client, model: str) -> list[str]:
    """Fetch a checkpoint by its link, spoil another one, and return the links' tokens."""
    url = client.get(f"/api/v1/training_runs/{model}/checkpoints/weights/final/archive").json()["url"]
    token = url.split("/")[-2]
    with httpx.Client(base_url=str(client.base_url), trust_env=False) as anyone:
        assert len(anyone.get(f"/download/{token}/archive.tar").content) > 1024
        assert anyone.get(f"/download/{token}/no-such-file").status_code == 404
        assert anyone.get(f"/download/{token[:-2]}/archive.tar").status_code == 404
    return [token]


def look(client: httpx.Client, model: str) -> dict[str, bytes]:
    """Return all that can be read without naming a secret."""
    session = model.partition(":")[0]
    told = {}
    for path in ("/metrics", "/twinkle/status", "/readyz", "/healthz", *(f"/api/v1{path}" for path in (
        "/sessions", f"/sessions/{session}", "/training_runs", f"/training_runs/{model}", "/checkpoints",
        f"/training_runs/{model}/checkpoints", "/get_server_capabilities",
    ))):  # fmt: skip
        answer = client.get(path)
        assert answer.status_code == 200 or (path in INSIDE and answer.status_code == 403), (path, answer.text)
        told[path] = answer.content
    found = post(client, "/sessions/search", {"user_metadata": {}, "limit": 50})
    return {**told, "search": found.content}


@dataclass(frozen=True)
class Worked:
    """A service after work.

    Attributes:
        service: that runs.
        secrets: in pieces, so that one that was cut is found too.
        seen: what can be seen of it from outside, processes and answers.
    """

    service: Process
    secrets: list[bytes]
    seen: dict[str, bytes]

    def found_in(self, data: bytes) -> list[bytes]:
        """Return the secrets that are in there."""
        return [secret for secret in self.secrets if secret in data]


@pytest.fixture(scope="module", params=["ledger", pytest.param("transformers", marks=pytest.mark.soak)])
def worked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worked]:
    """A service that says all it can, after an operator and a tenant worked and made every mistake."""
    folder = tmp_path_factory.mktemp("canary")
    service = Process(folder / "data", "--log-level", "debug", "--name", BASE)
    service.fresh = True  # its command line is searched, too
    if request.param == "transformers":
        service.arguments[0] = str(tiny_model(folder / "base", "qwen3"))
        service.arguments += ["--backend", "TransformersEngine"]
    try:
        service.start()
        made = CliRunner().invoke(server, ["keys", "create", "ana", "--data", str(service.data)])
        yield work(service, [service.key, made.output.strip()])
    finally:
        if service.process is not None:
            service.stop()


def work(service: Process, keys: list[str]) -> Worked:
    tokens: list[str] = []
    seen: dict[str, bytes] = {}
    for key in keys:
        with service.client(key) as client:
            model, done = train(client, BASE)
            results = [result(client, answer) for answer in done]
            assert not [said for said in results if "error" in said], results
            tokens += links(client, model)
            failures = [result(client, answer) for answer in misname(client, model)]
            assert [said["category"] for said in failures] == ["user"] * 6, failures
            assert not [answer for answer in misplace(client, model) if answer.status_code >= 500]
            seen |= {f"{path} {key[:6]}": data for path, data in look(client, model).items()}
    assert service.process is not None
    for pid, name in ((service.engine(), "engine"), (service.process.pid, "api")):
        seen[f"cmdline of {name}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
    seen["environ of engine"] = Path(f"/proc/{service.engine()}/environ").read_bytes()
    secret = (service.data / "secret").read_bytes()
    pieces = [
        piece for text in (*(key.removeprefix("tml-") for key in keys), *tokens) for piece in (text[:20], text[-20:])
    ]
    return Worked(service, [secret, secret.hex().encode(), *(piece.encode() for piece in pieces)], seen)


def result(client: httpx.Client, promise: httpx.Response) -> dict[str, Any]:
    """Return what a future gave; of a message that it is there."""
    assert promise.status_code == 200, promise.text
    for _ in range(4):
        answer = post(client, "/retrieve_future", {"request_id": promise.json()["request_id"]})
        said = answer.json() if answer.headers["content-type"] == "application/json" else {"message": True}
        if said.get("type") != "try_again":
            return dict(said)
    raise AssertionError(said)


@pytest.mark.full
def test_nothing_is_in_the_data_directory(worked: Worked) -> None:
    files = [path for path in worked.service.data.rglob("*") if path.is_file() and path.name != "secret"]
    assert {"twinkle.db", "twinkle.db-wal", "server.json"} <= {path.name for path in files}
    assert {path.name: found for path in files if (found := worked.found_in(path.read_bytes()))} == {}


@pytest.mark.full
def test_failures_are_kept_without_it(worked: Worked) -> None:
    with sqlite3.connect(f"file:{worked.service.data / 'twinkle.db'}?mode=ro", uri=True) as connection:
        errors = [error for (error,) in connection.execute("SELECT error FROM operations WHERE error IS NOT NULL")]
        details = [detail for (detail,) in connection.execute("SELECT detail FROM sessions")]
    connection.close()
    assert sum("[hidden]" in error for error in errors) == 12
    assert details == ["X-API-Key: [hidden]"] * 2


@pytest.mark.full
def test_keys_are_rows_of_hashes(worked: Worked) -> None:
    with sqlite3.connect(f"file:{worked.service.data / 'twinkle.db'}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT * FROM keys").fetchall()
    connection.close()
    assert len(rows) == 2
    for row in rows:
        assert re.search(r"\$argon2id\$v=19\$m=\d+,t=\d+,p=\d+\$", str(row))


def test_nothing_is_in_the_logs_not_even_what_was_trained_on(worked: Worked) -> None:
    log = worked.service.log
    assert "refused" in log
    assert '"level":"debug"' in log
    assert worked.found_in(log.encode()) == []
    for trained in (TEXT, ", ".join(map(str, TOKENS[:8])), str(TOKENS[:8])):
        assert trained not in log
    assert '"tenant":"operator"' not in log
    assert '"tenant":"ana"' not in log


def test_nothing_is_in_what_can_be_read_of_it(worked: Worked) -> None:
    assert {name: found for name, data in worked.seen.items() if (found := worked.found_in(data))} == {}


@pytest.mark.full
def test_a_failure_that_nobody_foresaw_is_logged_without_it(tmp_path: Path) -> None:
    router, key = APIRouter(), new_key()

    @router.post("/broken")
    async def broken(request: Request) -> Response:
        """Fail with all that was sent."""
        raise ZeroDivisionError(f"{request.headers} {request.query_params}")

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    stream = io.StringIO()
    logs.configure("DEBUG", stream)
    scope = {"type": "http", "method": "POST", "path": "/broken", "query_string": f"key={key}".encode()}
    scope["headers"] = [(b"x-api-key", key.encode()), (b"authorization", f"Bearer {key}".encode())]
    application = create_application(None, None, Settings("model", tmp_path), router=router)  # type: ignore[arg-type]
    asyncio.run(application(scope, receive, send))
    assert sent[0]["status"] == 500
    assert b"ZeroDivision" not in sent[1]["body"]
    assert "ZeroDivisionError" in stream.getvalue()
    assert not [start for start in range(4, len(key) - 12) if key[start : start + 12] in stream.getvalue()]


def test_files_are_for_their_owner_alone(worked: Worked) -> None:
    assert worked.service.data.stat().st_mode & 0o777 == 0o700
    assert (worked.service.data / "secret").stat().st_mode & 0o777 == 0o600
