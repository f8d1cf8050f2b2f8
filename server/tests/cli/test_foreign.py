"""What belongs to another tenant is answered, on every route, exactly as what does not exist."""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from server_fuzz import as_json, routes, seeds

from twinkle_server.cli.server import main as server

from .conftest import Process

FORM = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
Ids = dict[str, str]


def result(client: httpx.Client, route: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Submit an operation; return its future and what it gave."""
    answer = client.post(f"/api/v1{route}", json=body)
    assert answer.status_code == 200, answer.text
    future = answer.json()["request_id"]
    return future, client.post("/api/v1/retrieve_future", json={"request_id": future}).json()


@pytest.fixture(scope="module")
def parties(service: Process) -> Iterator[tuple[httpx.Client, Ids]]:
    """A stranger with a key of their own, and the ids of what the owner has."""
    made = CliRunner().invoke(server, ["keys", "create", "stranger", "--data", str(service.data)])
    with service.client() as owner, service.client(made.output.strip()) as stranger:
        session = owner.post("/api/v1/create_session", json=FORM).json()["session_id"]
        model = f"{session}:train:0"
        body = {"session_id": session, "model_seq_id": 0, "base_model": "ledger/model", "lora_config": LORA}
        result(owner, "/create_model", body)
        future, saved = result(owner, "/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        assert saved["path"] == f"tinker://{model}/weights/a"
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        sampler = owner.post("/api/v1/create_sampling_session", json=sampling).json()["sampling_session_id"]
        yield stranger, {"session": session, "model": model, "sampler": sampler, "future": future}


def unknown(ids: Ids) -> Ids:
    """Return ids of the same form that nobody has."""
    session = secrets.token_hex(16)
    forged = re.sub(r"[0-9a-f]", lambda found: secrets.choice("0123456789abcdef"), ids["future"])
    return {"session": session, "model": f"{session}:train:0", "sampler": f"{session}:sample:0", "future": forged}


def ask(client: httpx.Client, method: str, path: str, ids: Ids) -> httpx.Response:
    """Ask a route about things."""
    if path.startswith("/twinkle/"):
        return ask_native(client, method, path, ids)
    for name, value in (("{session_id}", "session"), ("{sampler_id}", "sampler"), ("{run}", "model")):
        path = path.replace(name, ids[value])
    path = path.replace("{kind}", "weights").replace("{name}", "a")
    template = re.sub(re.escape(ids["model"]), "{run}", path.removeprefix("/api/v1"))
    template = template.replace(ids["session"], "{session_id}").replace("weights/a/", "{kind}/{name}/")
    body = seeds(ids["session"], ids["model"]).get(template)
    if body is None:
        return client.request(method, path)
    body.pop("cursor", None)  # of no list
    text = as_json(body).decode().replace('"model_id": "none"', f'"model_id": {json.dumps(ids["model"])}')
    text = text.replace('"request_id": "x"', f'"request_id": {json.dumps(ids["future"])}')
    text = text.replace('"sampling_session_id": "s"', f'"sampling_session_id": {json.dumps(ids["sampler"])}')
    return client.request(method, path, content=text, headers={"Content-Type": "application/json"})


def ask_native(client: httpx.Client, method: str, template: str, ids: Ids) -> httpx.Response:
    """Ask a native route about things."""
    places = {"model_id": "model", "run_id": "model", "sampler_id": "sampler", "request_id": "future"}
    path = template.replace("{kind}", "weights").replace("{name}", "a")
    for name, value in places.items():
        path = path.replace(f"{{{name}}}", ids[value])
    body = seeds(ids["session"], ids["model"]).get(template)
    parameters = {"seq_id": 2} if "/models/" in path else {}
    headers = {"Content-Type": "application/json"}
    return client.request(
        method, path, content=None if body is None else as_json(body), params=parameters, headers=headers
    )


def told(answer: httpx.Response, ids: Ids) -> tuple[int, str]:
    """Return status and text, ids taken out; of a success what it has, since promises differ each time."""
    if answer.status_code == 200:
        said = answer.json()
        return 200, " ".join(sorted(said)) if isinstance(said, dict) else "list"
    text = answer.text
    for value in sorted(ids.values(), key=len, reverse=True):
        text = text.replace(value, "ID")
    return answer.status_code, text


@pytest.mark.sample(6)
@pytest.mark.parametrize(("method", "path"), routes(), ids=lambda value: value)
def test_foreign_is_what_unknown_is(parties: tuple[httpx.Client, Ids], method: str, path: str) -> None:
    stranger, theirs = parties
    nobodys = unknown(theirs)
    assert told(ask(stranger, method, path, theirs), theirs) == told(ask(stranger, method, path, nobodys), nobodys)


def test_no_list_and_no_answer_names_what_is_theirs(parties: tuple[httpx.Client, Ids]) -> None:
    stranger, theirs = parties
    said = "".join(stranger.get(path).text for method, path in routes() if method == "GET" and "{" not in path)
    found = stranger.post("/api/v1/sessions/search", json={"user_metadata": {}, "owner": {"type": "own"}, "limit": 50})
    assert found.status_code == 200, found.text
    said += found.text
    assert theirs["session"] not in said
    for method, path in routes():
        answer = ask(stranger, method, path, theirs)
        if "{" in path and not path.endswith("trace_export"):
            assert answer.status_code in (404, 422, 400), (method, path, answer.text)


@pytest.mark.full
def test_the_owner_still_has_everything(parties: tuple[httpx.Client, Ids], service: Process) -> None:
    _, ids = parties
    with service.client() as owner:
        assert ids["session"] in owner.get("/api/v1/sessions").text
        assert owner.get(f"/api/v1/samplers/{ids['sampler']}").status_code == 200
        names = owner.get(f"/api/v1/training_runs/{ids['model']}/checkpoints").json()["checkpoints"]
        assert [each["checkpoint_id"] for each in names] == ["weights/a"]
        assert names[0]["public"] is False
        assert owner.post("/api/v1/session_heartbeat", json={"session_id": ids["session"]}).status_code == 200
