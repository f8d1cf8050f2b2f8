"""Training over plain HTTP: models, passes, updates; what is wrong fails the operation and uses up its number."""

import asyncio
import base64
import json
import time
import zlib
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from twinkle_server import requests
from twinkle_server.requests import LARGE, parse
from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import read_forward_backward_output, write_tensor

np = pytest.importorskip("numpy")
PROTOBUF = {"Content-Type": "application/x-protobuf"}
WANTS = {"Accept": "application/x-protobuf"}


def session(client: httpx.Client) -> str:
    return str(client.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"])


def create(client: httpx.Client, session_id: str, number: int = 0, **changes: Any) -> httpx.Response:
    body = {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": "/models/of/tiny/v1",
        "lora_config": {"rank": 8},
        **changes,
    }
    return client.post("/create_model", json=body)


def retrieve(client: httpx.Client, promise: httpx.Response, **headers: str) -> httpx.Response:
    assert promise.status_code == 200, promise.text
    return client.post("/retrieve_future", json={"request_id": promise.json()["request_id"]}, headers=headers)


def model(client: httpx.Client) -> str:
    session_id = session(client)
    return str(retrieve(client, create(client, session_id)).json()["model_id"])


def pass_body(model_id: str, number: int, rows: int = 1, **changes: Any) -> bytes:
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cross_entropy", **changes)
    for _ in range(rows):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(write_tensor(np.array([2, 3, 4])))
    return bytes(request.SerializeToString())


def test_a_model_has_the_id_that_clients_compute(served):
    client = served.http()
    session_id = session(client)
    promise = create(client, session_id, 3)
    answer = retrieve(client, promise).json()
    assert answer == {"model_id": f"{session_id}:train:3", "type": "create_model"}
    assert create(client, session_id, 3).json() == promise.json()
    assert len(served.service.submissions) == 1


def test_a_model_is_described_at_once(served):
    client = served.http()
    info = client.post("/get_info", json={"model_id": model(client), "type": "get_info"}).json()
    assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 8, "/models/of/tiny/v1")
    assert info["model_data"] == {
        "arch": "TinyForCausalLM",
        "model_name": "/models/of/tiny/v1",
        "tokenizer_id": "v1",  # the folder itself is not for tenants
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": "other"}, "base_model must be '/models/of/tiny/v1', the served model, got 'other'"),
        ({"lora_config": None}, "LoRA"),
        ({"lora_config": {"rank": 0}}, "rank must be between 1 and 1024, got 0"),
        (
            {"lora_config": {"rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False}},
            "at least one of train_attn",
        ),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "'dimuon'"),
    ],
)
def test_a_model_that_cannot_be_made_fails_as_the_users_fault(served, changes: dict[str, Any], words: str):
    client = served.http()
    answer = retrieve(client, create(client, session(client), **changes)).json()
    assert answer["category"] == "user"
    assert words in answer["error"]


def test_flags_and_seed_of_an_adapter_are_kept(served):
    client = served.http()
    lora = {"rank": 4, "seed": 7, "train_mlp": False}
    retrieve(client, create(client, session(client), lora_config=lora, user_metadata={"renderer_name": "x", "n": 1}))
    [made] = served.service.submissions
    create_payload = orjson.loads(made.payload)
    assert (create_payload["rank"], create_payload["seed"], create_payload["train_mlp"]) == (4, 7, False)
    run = client.get(f"/training_runs/{made.queue_id}").json()
    assert run["user_metadata"] == {"renderer_name": "x", "n": "1"}


def test_a_pass_goes_into_the_log_as_it_came_and_its_result_is_protobuf(served):
    client = served.http()
    name = model(client)
    body = pass_body(name, 1, rows=2)
    answer = retrieve(client, client.post("/forward_backward", content=body, headers=PROTOBUF), **WANTS)
    assert answer.headers["content-type"] == "application/x-protobuf"
    outputs, metrics = read_forward_backward_output(answer.content)
    assert [output["logprobs"].tolist() for output in outputs] == [[-1, -1, -1]] * 2
    assert metrics == {"loss:sum": 6.0}
    made = served.service.submissions[-1]
    assert (made.payload, made.kind, made.number, made.tokens) == (body, "forward_backward", 1, 6)


def test_forward_only_is_another_kind_of_operation(served):
    client = served.http()
    name = model(client)
    retrieve(client, client.post("/forward_backward", content=pass_body(name, 1, forward_only=True), headers=PROTOBUF))
    assert served.service.submissions[-1].kind == "forward"


def test_a_repeated_pass_has_the_same_future_and_another_one_is_not_run(served):
    client = served.http()
    name = model(client)
    first = client.post("/forward_backward", content=pass_body(name, 1), headers=PROTOBUF)
    again = client.post("/forward_backward", content=pass_body(name, 1), headers=PROTOBUF)
    other = client.post("/forward_backward", content=pass_body(name, 1, rows=2), headers=PROTOBUF)
    assert again.json() == first.json()
    assert other.status_code == 409
    assert other.headers["x-should-retry"] == "false"
    assert len(served.service.submissions) == 2


@pytest.mark.parametrize(
    ("rows", "words"), [(0, "at least one row"), (65, "64 rows, got 65"), (40, "")], ids=["none", "many", "some"]
)
def test_a_pass_that_is_too_large_fails_and_uses_up_its_number(served, rows: int, words: str):
    client = served.http()
    name = model(client)
    answer = retrieve(client, client.post("/forward_backward", content=pass_body(name, 1, rows), headers=PROTOBUF))
    if words:
        assert answer.json() == {"error": served.service.submissions[-1].refusal, "category": "user"}
        assert words in answer.json()["error"]
    else:
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"\xff\xff\xff", 400), (b"", 400), (pass_body("", 1), 400), (pass_body("unknown", 1), 404), (None, 422)],
)
def test_a_pass_of_nobody_is_refused_at_once_in_words(served, body: bytes | None, status: int):
    client = served.http()
    body = pass_body(model(client), 0) if body is None else body
    answer = client.post("/forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == status
    assert len(answer.json()["detail"]) > 10


def test_an_update_has_the_sdks_defaults(served):
    client = served.http()
    name = model(client)
    promise = client.post("/optim_step", json={"model_id": name, "seq_id": 1, "adam_params": {}})
    assert retrieve(client, promise).json() == {"metrics": {"grad_norm": 1.0}}
    assert orjson.loads(served.service.submissions[-1].payload) == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adam_params": {"beta1": 1.0}}, "beta1 must be at least 0 and less than 1, got 1.0"),
        ({"adam_params": {"learning_rate": -1}}, "learning_rate must be at least 0, got -1.0"),
        ({"adam_params": {"eps": "x"}}, "adam_params.eps"),
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "'dimuon'"),
    ],
)
def test_an_update_that_makes_no_sense_fails_and_uses_up_its_number(served, fields: dict[str, Any], words: str):
    client = served.http()
    name = model(client)
    answer = retrieve(client, client.post("/optim_step", json={"model_id": name, "seq_id": 1, **fields})).json()
    assert answer["category"] == "user"
    assert words in answer["error"]
    assert served.service.submissions[-1].number == 1


def test_custom_losses_are_refused_with_what_to_do_instead(served):
    client = served.http()
    body = {"session_id": session(client), "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {"nodes": []}}
    answer = client.post("/create_custom_loss", json=body)
    assert answer.status_code == 400
    assert "forward_backward_custom" in answer.json()["detail"]


def test_custom_losses_are_checked_and_named_where_they_are_switched_on(served):
    client = served.http()
    served.state.settings = replace(served.state.settings, custom_losses=True)
    assert client.post("/client/config", json={}).json()["custom_loss_server_side"] is True
    start = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    total = {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]}
    end = {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]}
    inputs = [{"name": "logprobs", "rank": 1}]
    body = {"session_id": session(client), "custom_loss_seq_id": 0, "name": "x", "inputs": inputs}
    promise = client.post("/create_custom_loss", json={**body, "graph": {"format": 1, "nodes": [start, total, end]}})
    answer = retrieve(client, promise).json()
    assert answer["type"] == "create_custom_loss"
    assert answer["loss_id"].startswith("loss.")
    evil = {**total, "op": "call_function", "target": "os.system"}
    refused = client.post("/create_custom_loss", json={**body, "graph": {"nodes": [start, evil, end]}})
    assert refused.status_code == 400
    assert "unsupported operation 'os.system'" in refused.json()["detail"]
    assert client.post("/retrieve_future", json={"request_id": "loss.x"}).status_code == 404


@pytest.mark.parametrize("depth", [50, 900])
def test_an_id_of_a_loss_that_is_nested_deeply_is_none(served, depth: int):
    nodes = [["total", "sum", json.loads("[" * depth + "]" * depth), {}]]
    said = json.dumps({"inputs": [["logprobs", 1]], "nodes": nodes, "loss": "total", "metrics": {}})
    name = "loss." + base64.urlsafe_b64encode(zlib.compress(said.encode())).decode().rstrip("=")
    assert served.http().post("/retrieve_future", json={"request_id": name}).status_code == 404


def test_a_graph_larger_than_any_loss_is_refused_before_it_is_walked_through(served):
    client = served.http()
    served.state.settings = replace(served.state.settings, custom_losses=True)
    node = {"op": "call_function", "name": "n", "target": "torch.sum", "args": [[{"ref": "logprobs"}] * 200_000]}
    body = {"session_id": session(client), "custom_loss_seq_id": 0, "name": "x", "inputs": []}
    answer = client.post("/create_custom_loss", json={**body, "graph": {"nodes": [node]}})
    assert answer.status_code == 400
    assert "at most 1048576 bytes" in answer.json()["detail"]


def test_unload_takes_the_next_number_and_ends_the_model(served):
    client = served.http()
    name = model(client)
    client.post("/optim_step", json={"model_id": name, "seq_id": 1, "adam_params": {}})
    answer = retrieve(client, client.post("/unload_model", json={"model_id": name, "type": "unload_model"})).json()
    assert answer == {"model_id": name, "type": "unload_model"}
    assert client.post("/optim_step", json={"model_id": name, "seq_id": 3}).status_code == 410


def test_nobody_elses_model_can_be_seen_or_used(served):
    mine, other = served.http(), served.http("b")
    name = model(mine)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/get_info", {"model_id": name}),
        ("/optim_step", {"model_id": name, "seq_id": 1}),
        ("/save_weights", {"model_id": name, "seq_id": 1, "path": "x"}),
        ("/save_weights_for_sampler", {"model_id": name, "seq_id": 1, "path": "x"}),
        ("/save_weights_external", {"model_id": name, "seq_id": 1, "path": "x"}),
        ("/load_weights", {"model_id": name, "seq_id": 1, "path": "tinker://a/weights/b", "optimizer": False}),
        ("/unload_model", {"model_id": name}),
    ]
    for path, body in bodies:
        foreign, unknown = other.post(path, json=body), other.post(path, json={**body, "model_id": "none"})
        assert (foreign.status_code, unknown.status_code) == (404, 404), path
        assert foreign.json()["detail"].replace(name, "none") == unknown.json()["detail"], path
    assert other.post("/forward_backward", content=pass_body(name, 1), headers=PROTOBUF).status_code == 404
    assert create(other, name.partition(":")[0], 1).status_code == 404


def test_a_future_is_its_owners_alone(served):
    mine, other = served.http(), served.http("b")
    promise = create(mine, session(mine))
    assert retrieve(other, promise).status_code == 404
    assert mine.post("/retrieve_future", json={"request_id": "none"}).status_code == 404


@pytest.mark.full
def test_a_poll_ends_with_its_clients_connection(served, monkeypatch: pytest.MonkeyPatch):
    settings, wait, held = served.state.settings, served.service.wait, []

    async def counted(*arguments: Any) -> Any:
        held.append(arguments)
        try:
            return await wait(*arguments)
        finally:
            held.pop()

    monkeypatch.setattr(served.service, "wait", counted)
    monkeypatch.setattr(served.state, "settings", replace(settings, times=replace(settings.times, poll=30.0)))
    client = served.http()
    served.service.held = True
    request = create(client, session(client)).json()["request_id"]
    with pytest.raises(httpx.ReadTimeout):
        client.post("/retrieve_future", json={"request_id": request}, timeout=1.0)
    client.close()
    ends = time.monotonic() + 15.0  # half of what it would wait for
    while held and time.monotonic() < ends:
        time.sleep(0.02)
    assert not held


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["good", "refused", "unreadable"])
@pytest.mark.parametrize("path", ["/optim_step", "/load_weights"])
def test_large_bodies_are_read_off_the_loop(served, monkeypatch: pytest.MonkeyPatch, path: str, form: str):
    client, on_the_loop = served.http(), list[bool]()
    body: dict[str, Any] = {"model_id": model(client), "seq_id": 1, "path": "tinker://x/weights/y", "more": "x" * LARGE}
    body |= {"refused": {"path": 5, "adam_params": 5}, "unreadable": {"seq_id": "x"}}.get(form, {})

    def recorded(data: bytes, kind: Any) -> Any:
        on_the_loop.append(asyncio._get_running_loop() is not None)
        return parse(data, kind)

    monkeypatch.setattr(requests, "parse", recorded)
    assert client.post(path, json=body).status_code == (422 if form == "unreadable" else 200)
    assert on_the_loop
    assert not any(on_the_loop)
