"""What belongs to another tenant is answered, on every route, exactly as what does not exist.

The routes are those of the service's own description and of the dashboard. A route is in one of the tables below, or
its request must name something of the other tenant: one that is new fails until it does.
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from described import Described
from ledger_engine import MODEL
from safetensors.numpy import save_file
from server_fuzz import as_json, seeds

from twinkle_client import wire
from twinkle_server.application import describe_routes
from twinkle_server.cli.server import main as server
from twinkle_server.dashboard.pages import Dashboard
from twinkle_server.settings import Settings
from twinkle_server.store import open_store

from .conftest import Process

FORM = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
Route = tuple[str, str]
Ids = dict[str, str]
PLACES = {
    "session_id": "session", "model_id": "model", "run_id": "model", "run": "model", "model": "model",
    "sampler_id": "sampler", "request_id": "future", "resource_id": "resource", "upload_id": "upload", "job": "merge",
    "operation": "operation", "rollout": "operation",
}  # fmt: skip
"""The thing that a place in a path names."""
CONSTANT = {"kind": "weights", "name": "a"}
"""Places whose values are not secret: they belong to the place before."""
LATER = {"resource", "upload", "merge"}
"""Things that take a process each: the quick test leaves out the routes that name them."""
LISTS: set[Route] = {
    ("GET", "/api/v1/audit"), ("GET", "/api/v1/billing/usage/checkpoints/current"),
    ("GET", "/api/v1/billing/usage/events"), ("GET", "/api/v1/checkpoints"), ("GET", "/api/v1/sessions"),
    ("GET", "/api/v1/training_runs"), ("POST", "/api/v1/sessions/search"), ("GET", "/twinkle/training_runs"),
    ("GET", "/twinkle/data"), ("GET", "/twinkle/hub/uploads"), ("GET", "/twinkle/merge"), ("GET", "/twinkle/overview"),
    ("GET", "/twinkle/capacity_info"), ("GET", "/v1/models"), ("GET", "/ui/models"), ("GET", "/ui/operations"),
    ("GET", "/ui/checkpoints"), ("GET", "/ui/errors"), ("GET", "/"),
}  # fmt: skip
"""Routes that name nothing, and list what the caller has."""
NOBODYS: set[Route] = {
    ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/api/v1/healthz"), ("GET", "/metrics"),
    ("GET", "/twinkle/status"), ("GET", "/twinkle/healthz"), ("GET", "/twinkle/tokenizer"),
    ("GET", "/twinkle/tokenizer/{file}"), ("GET", "/twinkle/get_server_capabilities"),
    ("GET", "/api/v1/get_server_capabilities"), ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"), ("POST", "/api/v1/auth/token"), ("GET", "/api/v1/auth/apikey/me"),
    ("DELETE", "/api/v1/auth/apikey/me"), ("POST", "/api/v1/create_session"), ("POST", "/twinkle/create_session"),
    ("POST", "/api/v1/telemetry"), ("GET", "/ui/login"), ("POST", "/ui/login"), ("POST", "/ui/logout"),
    ("GET", "/ui/drain"), ("POST", "/ui/drain"), ("GET", "/ui/static/{file}"),
}  # fmt: skip
"""Routes of the service, of the caller's key, or of operators alone."""
SIGNED: set[Route] = {("GET", "/download/{token}/{file}")}
"""Links that are made for their owner, and are valid for whoever has them."""
ENDING = ("finish", "finish_session", "unload", "unload_model", "cancel", "cancel_future", "skip", "forget", "publish")


def described() -> set[Route]:
    """Return the routes of the description."""
    return {(method.upper(), path) for path, methods in describe_routes()["paths"].items() for method in methods}


def pages(data: Path) -> set[Route]:
    """Return the routes of the dashboard, which are not described."""
    store, nothing = open_store(data), None
    try:
        made: Any = Dashboard(nothing, store, Settings("m", data), nothing, nothing)  # type: ignore[arg-type]
        return {(method, route.path) for route in made.router().routes for method in route.methods}
    finally:
        store.close()


def naming(routes: set[Route]) -> list[Route]:
    """Return the routes that name things: all that are in no table."""
    return sorted(routes - LISTS - NOBODYS - SIGNED)


def result(client: httpx.Client, route: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Submit an operation; return its future and what it gave."""
    answer = client.post(f"/api/v1{route}", json=body)
    assert answer.status_code == 200, answer.text
    future = answer.json()["request_id"]
    return future, client.post("/api/v1/retrieve_future", json={"request_id": future}).json()


@dataclass
class Parties:
    """An owner, a stranger with a key of their own, and the ids of what the owner has."""

    owner: httpx.Client
    stranger: httpx.Client
    ids: Ids
    visits: dict[int, httpx.Client] = field(default_factory=dict)

    def pages(self, client: httpx.Client) -> httpx.Client:
        """Return a client of the same key that is logged in to the dashboard."""
        if id(client) not in self.visits:
            visit = httpx.Client(base_url=client.base_url, trust_env=False, timeout=60)
            assert visit.post("/ui/login", data={"key": client.headers["X-API-Key"]}).status_code == 303
            self.visits[id(client)] = visit
        return self.visits[id(client)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A running service whose base model has weights, so that a merge is accepted; it fails when it reads them."""
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copytree(MODEL, folder / "model")
    save_file({"weight": np.zeros(2, np.float32)}, folder / "model" / "model.safetensors")
    process = Process(folder / "data", "--custom-losses")
    process.arguments[0] = str(folder / "model")
    try:
        yield process.start()
    finally:
        if process.process is not None:
            process.stop()


@pytest.fixture(scope="module")
def conformance() -> Iterator[Described]:
    """Compares every response of these tests with the description."""
    found = Described()
    yield found
    assert not found.wrong, "\n".join(found.wrong[:20])


@pytest.fixture(scope="module")
def parties(service: Process, conformance: Described) -> Iterator[Parties]:
    keys = []
    for name in ("owner", "stranger"):
        made = CliRunner().invoke(server, ["keys", "create", name, "--data", str(service.data)])
        keys.append(made.output.strip())
    with service.client(keys[0]) as owner, service.client(keys[1]) as stranger:
        for client in (owner, stranger):
            client.event_hooks["response"].append(conformance.hook)
        session = owner.post("/api/v1/create_session", json=FORM).json()["session_id"]
        model = f"{session}:train:0"
        body = {"session_id": session, "model_seq_id": 0, "base_model": "ledger/model", "lora_config": LORA}
        result(owner, "/create_model", body)
        future, saved = result(owner, "/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        assert saved["path"] == f"tinker://{model}/weights/a"
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        sampler = owner.post("/api/v1/create_sampling_session", json=sampling).json()["sampling_session_id"]
        ids = {"session": session, "model": model, "sampler": sampler, "future": future, "operation": "1"}
        made_parties = Parties(owner, stranger, ids)
        yield made_parties
        for visit in made_parties.visits.values():
            visit.close()


@pytest.fixture(scope="module")
def more(parties: Parties) -> Parties:
    """The same, with things that take a process each: a data resource, an upload and a merge."""
    owner, ids = parties.owner, parties.ids
    query = {"session_id": ids["session"], "kind": "preprocessor", "name": "GSM8KProcessor"}
    made = owner.post("/twinkle/data", params=query, content=wire.pack({"args": [], "kwargs": {}}))
    assert made.status_code == 200, made.text
    ids["resource"] = made.json()["resource_id"]
    target = {"hub_model_id": "hf://nobody/nothing", "hub_token": "hf_none"}
    path = f"{ids['model']}/weights/a"
    made = owner.post("/twinkle/hub/uploads", json={"checkpoint_path": f"twinkle://{path}", **target})
    assert made.status_code == 200, made.text
    ids["upload"] = made.json()["request_id"]
    result(owner, "/save_weights_for_sampler", {"model_id": ids["model"], "seq_id": 2, "path": "a"})
    made = owner.post("/twinkle/merge", json={"path": f"tinker://{ids['model']}/sampler_weights/a"})
    assert made.status_code == 200, made.text
    ids["merge"] = made.json()["id"]
    waiting = {"model_id": ids["model"], "seq_id": 900, "adam_params": {}}  # for the numbers before
    assert owner.post("/api/v1/optim_step", json=waiting).status_code == 200
    [ids["operation"]] = set(re.findall(r"operations/(\d+)/cancel", parties.pages(owner).get("/ui/operations").text))
    return parties


def unknown(ids: Ids) -> Ids:
    """Return ids of the same form that nobody has."""
    session = secrets.token_hex(16)

    def forged(name: str) -> str:
        return re.sub(r"[0-9a-f]", lambda found: secrets.choice("0123456789abcdef"), ids[name])

    found = {name: forged(name) for name in ids}
    model = {"session": session, "model": f"{session}:train:0", "sampler": f"{session}:sample:0"}
    return found | model | {"operation": str(10**9)}


def asked(route: Route, ids: Ids) -> dict[str, Any]:
    """Return a request of a route about things."""
    method, template = route
    path = template
    for name in re.findall(r"\{(\w+)\}", template):
        assert name in PLACES or name in CONSTANT, f"{template}: say in PLACES what {{{name}}} names"
        path = path.replace(f"{{{name}}}", ids[PLACES[name]] if name in PLACES else CONSTANT[name])
    if template.startswith("/twinkle/"):  # another checkpoint than that of the other protocol, for what deletes it
        path = path.replace("/weights/", "/sampler_weights/")
    made: dict[str, Any] = {"method": method, "url": path, "params": {}}
    body = bodies(ids).get(template.removeprefix("/api/v1"))
    if body is not None and method in ("POST", "PUT"):
        made |= {"content": as_json(body), "headers": {"Content-Type": "application/json"}}
    if template.startswith("/twinkle/models/") and method == "POST":
        made["params"] = {"seq_id": 2}
    if template == "/twinkle/data":
        made["params"] = {
            "session_id": ids["session"],
            "kind": "reward",
            "name": "x",
            "parent": ids.get("resource", "x"),
        }
    if template == "/twinkle/data/{resource_id}/call":
        made |= {"params": {"method": "__len__", "number": 1}, "content": wire.pack({})}
    return made


def bodies(ids: Ids) -> dict[str, dict[str, Any]]:
    """Return the body of each route that takes one, about things."""
    path = f"tinker://{ids['model']}/weights/a"
    sampler = path.replace("/weights/", "/sampler_weights/")
    target = {"hub_model_id": "hf://nobody/nothing", "hub_token": "hf_none"}
    own = {
        "/twinkle/merge": {"path": sampler},
        "/twinkle/samplers": {"session_id": ids["session"], "sampler_seq_id": 7, "adapter_uri": sampler},
        "/twinkle/hub/uploads": {**target, "checkpoint_path": path.replace("tinker:", "twinkle:")},
        "/twinkle/hub/automatic/{run}": target,
    }
    text = as_json({**seeds(ids["session"], ids["model"]), **own}).decode()
    text = text.replace('"model_id": "none"', f'"model_id": {json.dumps(ids["model"])}')
    text = text.replace('"session_id": "none"', f'"session_id": {json.dumps(ids["session"])}')
    text = text.replace('"request_id": "x"', f'"request_id": {json.dumps(ids["future"])}')
    text = text.replace('"sampling_session_id": "s"', f'"sampling_session_id": {json.dumps(ids["sampler"])}')
    made: dict[str, dict[str, Any]] = json.loads(text)
    made["/sessions/search"].pop("cursor")  # of no list
    return made


def ask(parties: Parties, client: httpx.Client, route: Route, ids: Ids, method: str | None = None) -> httpx.Response:
    """Ask a route about things."""
    if route[1].startswith("/ui/"):
        client = parties.pages(client)
    made = asked(route, ids)
    return client.request(**{**made, "method": method or made["method"]})


def told(answer: httpx.Response, ids: Ids) -> tuple[int, str]:
    """Return status and text, ids taken out; of a success what it has, since promises differ each time."""
    if answer.status_code == 200 and answer.headers.get("content-type", "").startswith("application/json"):
        said = answer.json()
        return 200, " ".join(sorted(said)) if isinstance(said, dict) else "list"
    text = re.sub(rf"\b((?:operation|rollout)s?(?:[ /']|&#39;)+){ids['operation']}\b", r"\1ID", answer.text)
    for value in sorted((value for name, value in ids.items() if name != "operation"), key=len, reverse=True):
        text = text.replace(value, "ID").replace(value.replace(":", "%3A"), "ID")
    return answer.status_code, text


def differences(parties: Parties, routes: list[Route], method: str | None = None) -> list[str]:
    """Return the routes that tell a stranger whether a thing exists."""
    found, theirs, nobodys = [], parties.ids, unknown(parties.ids)
    for route in routes:
        answers = [told(ask(parties, parties.stranger, route, ids, method), ids) for ids in (theirs, nobodys)]
        if answers[0] != answers[1]:
            found.append(f"{route}: {answers}")
    return found


def quick(routes: list[Route]) -> list[Route]:
    """Return the routes that name nothing of `LATER`."""
    return [route for route in routes if not {PLACES.get(name) for name in re.findall(r"\{(\w+)\}", route[1])} & LATER]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Route]:
    """Return all routes that name things."""
    return naming(described() | pages(tmp_path_factory.mktemp("pages")))


def test_every_route_is_in_a_table_or_names_a_thing(everything: list[Route], tmp_path: Path) -> None:
    there = described() | pages(tmp_path)
    assert not (LISTS | NOBODYS | SIGNED) - there, "a route of a table no longer exists"
    ids = {name: f"<{name}>" for name in {*PLACES.values()}}
    for route in everything:
        made = str(asked(route, ids))
        assert any(value in made for value in ids.values()), f"{route} names nothing; see the tables of this test"


def test_foreign_is_what_unknown_is(parties: Parties, everything: list[Route]) -> None:
    assert len(everything) > 90
    assert differences(parties, quick(everything)) == []


def test_it_is_with_other_methods_too(parties: Parties, everything: list[Route]) -> None:
    places = list({path: (method, path) for method, path in quick(everything) if "{" in path}.values())
    for method in ("HEAD", "OPTIONS", "PATCH"):
        assert differences(parties, places, method) == []


def test_names_of_models_are_too(parties: Parties) -> None:
    for name in ("{}", "{}/latest", "{}/a", "tinker://{}/weights/a", "twinkle://{}/sampler_weights/a"):
        answers = []
        for ids in (parties.ids, unknown(parties.ids)):
            model = name.format(ids["model"])
            found = [parties.stranger.get(f"/v1/models/{model}")]
            for path, body in bodies(ids).items():
                if path.startswith("/v1/"):
                    found.append(parties.stranger.post(path, json={**body, "model": model}))
            assert {answer.status_code for answer in found} == {404}, name
            answers.append([told(answer, ids) for answer in found])
        assert answers[0] == answers[1], name


def test_no_list_and_no_answer_names_what_is_theirs(parties: Parties, everything: list[Route]) -> None:
    stranger, ids = parties.stranger, parties.ids
    for method, path in sorted(LISTS):
        client = parties.pages(stranger) if path.startswith("/ui/") or path == "/" else stranger
        body = bodies(ids).get(path.removeprefix("/api/v1"))
        params = {"starting_on": "2026-01-01", "ending_before": "2027-01-01"} if "events" in path else {}
        answer = client.request(method, path, params=params, json=body if method == "POST" else None)
        assert answer.status_code == 200, (method, path, answer.text)
        assert ids["session"] not in answer.text, (method, path)
    bearer = {"Authorization": f"Bearer {stranger.headers['X-API-Key']}"}
    with httpx.Client(base_url=stranger.base_url, headers=bearer, trust_env=False, timeout=60) as other:
        for path in ("/api/v1/sessions", "/twinkle/overview", "/twinkle/data", "/v1/models"):
            assert other.get(path).status_code == 200, path
    for route in quick(everything):
        answer = ask(parties, stranger, route, ids)
        assert answer.status_code in (303, 400, 403, 404, 410, 422), (route, answer.text)


@pytest.mark.full
def test_foreign_is_what_unknown_is_of_things_with_a_process(more: Parties, everything: list[Route]) -> None:
    routes = [route for route in everything if route not in quick(everything) or "/twinkle/data" in route[1]]
    assert len(routes) >= 6
    assert differences(more, routes) == []


@pytest.mark.full
def test_the_owner_is_answered_otherwise_and_still_has_everything(more: Parties, everything: list[Route]) -> None:
    """What a stranger is not told can be told: the comparison above is not one of requests that all fail."""
    owner, ids = more.owner, more.ids
    assert ids["session"] in owner.get("/api/v1/sessions").text
    names = owner.get(f"/api/v1/training_runs/{ids['model']}/checkpoints").json()["checkpoints"]
    assert {"weights/a", "sampler_weights/a"} <= {each["checkpoint_id"] for each in names}
    assert not any(each["public"] for each in names)
    assert owner.post("/api/v1/session_heartbeat", json={"session_id": ids["session"]}).status_code == 200
    ending = {route for route in everything if route[0] == "DELETE" or route[1].rpartition("/")[2] in ENDING}
    same = []
    for route in sorted(everything, key=lambda route: (route in ending, not route[1].endswith("publish"), route)):
        foreign, own = told(ask(more, more.stranger, route, ids), ids), told(ask(more, owner, route, ids), ids)
        if foreign == own:
            same.append((route, own))
    assert not same
