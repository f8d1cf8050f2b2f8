"""Checkpoints go to both hubs, private by default; failures are typed, and a token is nowhere but in the request."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_data import DataService, data_service

from twinkle.errors import HubError
from twinkle.testing import FakeHub
from twinkle_client.data import Client
from twinkle_client.errors import NotFound, RequestRefused
from twinkle_client.hub import set_automatic, upload, upload_status
from twinkle_server.data.limits import DataLimits
from twinkle_server.engine.files import publish
from twinkle_server.hub_uploads import routes
from twinkle_server.hub_uploads.limits import UploadLimits
from twinkle_server.hub_uploads.process import collect
from twinkle_server.hub_uploads.uploads import HubUploads
from twinkle_server.native.routes import PREFIX
from twinkle_server.requests import add_routes
from twinkle_server.store.records import Checkpoint, Model
from twinkle_testing.fakehub import TOKEN

WEIGHTS = b"w" * 5000


def _write(folder: Path) -> None:
    (folder / "state.safetensors").write_bytes(b"state of the optimizer")
    (folder / "peft.adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "peft.adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "/srv/models/secret"}')


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub({TOKEN: "tester"}) as running:
        yield running


@pytest.fixture(scope="module")
def service(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataService]:
    folder = tmp_path_factory.mktemp("service")
    environment = {
        name: value
        for name, value in hub.environment(folder / "home").items()
        if "HOME" not in name and "CACHE" not in name
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    with data_service(folder / "data", folder, DataLimits(resources=0)) as served:
        store = served.state.store

        async def saved(tenant: str, run: str) -> list[Checkpoint]:
            return (await store.checkpoints.page(tenant, 0.0, 100, run=run)).rows

        served.state.uploads = HubUploads(UploadLimits(pause=0.05, waiting=4), folder / "data", "org/tiny", saved)
        add_routes(served.application.router, routes.router, PREFIX)
        yield served
        served.wait(served.state.uploads.close())
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture
def client(service: DataService, request: pytest.FixtureRequest) -> Client:
    return service.tenant(request.node.name[:60])


def tenant_of(client: Client) -> str:
    return client.connection._key


def save(service: DataService, client: Client, name: str = "last", created: float = 1.0) -> str:
    """Write a checkpoint as a save does, and return its path."""
    tenant, run = tenant_of(client), f"{client.session_id}:train:0"
    folder = f"checkpoints/{client.session_id}-{name}"
    published = publish(service.state.settings.data / folder, _write)
    made = Checkpoint(tenant, run, "weights", name, folder, published.size, published.digest, "org/tiny", 8, created)
    service.wait(service.state.store.checkpoints.create(made))
    return f"twinkle://{run}/weights/{name}"


def test_a_whole_model_is_uploaded_without_the_state_of_training(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    kept = {"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"}
    for name in (*kept, "state.json", "state.safetensors", "native.json", "manifest.json"):
        (tmp_path / "saved" / name).write_text("{}")
    assert {path.name for path in collect(tmp_path / "saved", tmp_path / "out", "org/tiny").iterdir()} == kept


def run(client: Client, call: Any) -> Any:
    return client.connection.run(call)


def push(client: Client, path: str, name: str, token: str = TOKEN, **options: Any) -> Any:
    return run(client, upload(client.connection, path, name, token, False, 0.05, timeout=60, **options))


def head(hub: FakeHub, name: str) -> dict[str, bytes]:
    repository = hub.store.find(name, "model")
    assert repository is not None
    return dict(repository.commits[repository.branches["main" if "main" in repository.branches else "master"]].files)


@pytest.mark.parametrize("scheme", ["hf", "ms"])
def test_an_adapter_is_uploaded_in_the_standard_format(
    service: DataService, hub: FakeHub, client: Client, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    name, seen = f"tester/{scheme}-adapter", []
    state = push(client, save(service, client), f"{scheme}://{name}", progress=seen.append)
    assert state["status"] == "succeeded"
    assert name in state["url"]
    assert (state["files"], state["attempts"]) == (2, 1)
    assert hub.store.find(name, "model").private  # type: ignore[union-attr]
    files = {path: data for path, data in head(hub, name).items() if path.startswith("adapter")}
    assert files["adapter_model.safetensors"] == WEIGHTS
    assert json.loads(files["adapter_config.json"]) == {"r": 8, "base_model_name_or_path": "org/tiny"}
    assert not any("state" in path or "manifest" in path for path in head(hub, name))
    assert TOKEN not in caplog.text
    stored = [path.read_bytes() for path in service.state.settings.data.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in data for data in stored)


def test_an_upload_is_repeated_while_the_hub_fails(service: DataService, hub: FakeHub, client: Client) -> None:
    path = save(service, client)
    hub.fail("POST .*create", 503, times=30)
    with pytest.raises(HubError, match="answered 503"):
        push(client, path, "hf://tester/later")
    hub.mend()
    [failed] = run(client, client.connection.request("GET", "/hub/uploads"))["uploads"]
    assert (failed["status"], failed["attempts"]) == ("failed", 3)
    assert push(client, path, "hf://tester/later")["status"] == "succeeded"


def test_a_wrong_token_is_a_failure_that_names_the_remedy(service: DataService, client: Client) -> None:
    with pytest.raises(HubError, match="rejected the token") as failed:
        push(client, save(service, client), "hf://tester/denied", token="hf_wrong0token")
    assert "hf_wrong0token" not in str(failed.value)
    state = run(client, client.connection.request("GET", "/hub/uploads"))["uploads"][0]
    assert state["attempts"] == 1


def test_another_tenant_finds_nothing(service: DataService, client: Client) -> None:
    path = save(service, client)
    mine = push(client, path, "hf://tester/mine")
    stranger = service.tenant("stranger")
    with pytest.raises(NotFound):
        push(stranger, path, "hf://tester/stolen")
    for method in ("GET", "DELETE"):
        with pytest.raises(NotFound):
            run(stranger, stranger.connection.request(method, f"/hub/uploads/{mine['request_id']}"))
    assert run(stranger, stranger.connection.request("GET", "/hub/uploads")) == {"uploads": []}
    model = f"{client.session_id}:train:0"
    for method in ("GET", "DELETE"):
        with pytest.raises(NotFound):
            run(stranger, stranger.connection.request(method, f"/hub/automatic/{model}"))
    with pytest.raises(NotFound):
        run(stranger, set_automatic(stranger.connection, model, "hf://tester/x", TOKEN))


@pytest.mark.parametrize("target", ["file:///tmp/x", "evil://a/b", "hf://no-owner", "hf://a/b/c", "/tmp/x"])
def test_other_places_are_refused(service: DataService, client: Client, target: str) -> None:
    with pytest.raises(RequestRefused, match=r"upload|owner/name"):
        push(client, save(service, client), target)


@pytest.mark.parametrize("route", ["/hub/uploads", "/hub/automatic/a:train:0"])
def test_a_misspelled_field_is_refused(service: DataService, client: Client, route: str) -> None:
    body = {"hub_model_id": "hf://tester/typo", "hub_token": TOKEN, "prviate": False}
    if route == "/hub/uploads":
        body["checkpoint_path"] = save(service, client)
    method = "POST" if route == "/hub/uploads" else "PUT"
    with pytest.raises(RequestRefused, match="prviate: Extra inputs are not permitted"):
        run(client, client.connection.request(method, route, body=json.dumps(body).encode()))
    assert run(client, client.connection.request("GET", "/hub/uploads")) == {"uploads": []}


def test_a_request_without_a_token_is_refused_here(service: DataService, client: Client, monkeypatch: Any) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(HubError, match="give hub_token=, or set HF_TOKEN"):
        push(client, save(service, client), "hf://tester/none", token="")


@pytest.mark.parametrize("scheme", ["hf", "ms"])
def test_later_checkpoints_of_a_run_are_uploaded_by_themselves(
    service: DataService, hub: FakeHub, client: Client, scheme: str
) -> None:
    uploads = service.state.uploads
    assert uploads is not None
    tenant, model = tenant_of(client), f"{client.session_id}:train:0"
    made = Model(model, tenant, client.session_id, 0, "org/tiny", 8, 0.0, 0.0)
    service.wait(service.state.store.database.write(lambda connection: _insert(connection, made)))
    save(service, client, "before", created=1.0)
    run(client, set_automatic(client.connection, model, f"{scheme}://tester/{scheme}-automatic", TOKEN))
    assert run(client, client.connection.request("GET", f"/hub/automatic/{model}"))["hub_model_id"].endswith(
        "automatic"
    )
    save(service, client, "after", created=9e9)
    service.wait(uploads.sweep())
    service.wait(uploads.sweep())  # it is uploaded once
    [state] = run(client, client.connection.request("GET", "/hub/uploads"))["uploads"]
    assert state["checkpoint_path"].endswith("/after")
    while run(client, upload_status(client.connection, state["request_id"]))["status"] in ("queued", "running"):
        pass
    assert head(hub, f"tester/{scheme}-automatic")["adapter_model.safetensors"] == WEIGHTS
    assert hub.store.find(f"tester/{scheme}-automatic", "model").private  # type: ignore[union-attr]
    run(client, set_automatic(client.connection, model, None))
    save(service, client, "last", created=9e9)
    service.wait(uploads.sweep())
    assert len(run(client, client.connection.request("GET", "/hub/uploads"))["uploads"]) == 1


def _insert(connection: Any, model: Model) -> None:
    from sqlalchemy import insert

    from twinkle_server.store import rows, tables

    connection.execute(insert(tables.models).values(rows.values(tables.models, model)))
