"""Clients before 0.25: JSON both ways, and the routes that newer ones no longer use."""

from typing import Any

import httpx
import pytest

from twinkle_server.wire.codec import parse_request

BASE = "/models/of/tiny/v1"
WORK = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}},
        }
    ],
    "loss_fn": "cross_entropy",
}
JSON = {"Accept": "application/json"}


@pytest.fixture
def client(served) -> httpx.Client:
    return served.http()


@pytest.fixture
def model(client: httpx.Client) -> str:
    session_id = client.post("/create_session", json={"tags": [], "sdk_version": "0.16.1"}).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    return str(result(client, client.post("/create_model", json=body)).json()["model_id"])


def result(client: httpx.Client, promise: httpx.Response) -> httpx.Response:
    assert promise.status_code == 200, promise.text
    return client.post("/retrieve_future", json={"request_id": promise.json()["request_id"]}, headers=JSON)


def test_a_pass_in_json_gives_a_result_in_json(served, client, model):
    body = {"forward_backward_input": WORK, "model_id": model, "seq_id": 1}
    answer = result(client, client.post("/forward_backward", json=body)).json()
    assert answer["loss_fn_outputs"] == [{"logprobs": {"data": [-1.0] * 3, "dtype": "float32", "shape": [3]}}]
    assert answer["metrics"] == {"loss:sum": 3.0}
    made = parse_request(served.service.submissions[-1].payload)
    assert (made.seq_id, made.forward_only, served.service.submissions[-1].tokens) == (1, False, 3)


def test_forward_has_a_route_of_its_own(served, client, model):
    answer = result(client, client.post("/forward", json={"forward_input": WORK, "model_id": model, "seq_id": 1}))
    assert answer.json()["metrics"] == {"loss:sum": 3.0}
    assert served.service.submissions[-1].kind == "forward"
    assert parse_request(served.service.submissions[-1].payload).forward_only


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_backward_input": None}, "absent"),
        ({"forward_backward_input": {**WORK, "data": [{"model_input": {"chunks": [{"tokens": ["a"]}]}}]}}, "tokens"),
        ({"forward_backward_input": {**WORK, "data": []}}, "at least one row"),
        ({"forward_backward_input": {**WORK, "loss_fn": 5}}, "loss_fn"),
    ],
)
def test_what_is_wrong_inside_fails_and_uses_up_its_number(served, client, model, changes: dict[str, Any], words: str):
    body = {"forward_backward_input": WORK, "model_id": model, "seq_id": 1, **changes}
    answer = result(client, client.post("/forward_backward", json=body)).json()
    assert answer["category"] == "user"
    assert words in answer["error"]
    assert served.service.submissions[-1].number == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes", [{"model_id": None}, {"model_id": 5}, {"seq_id": 0}, {"seq_id": "1"}, {"seq_id": 2**40}]
)
def test_a_pass_of_nobody_is_refused_at_once(client, model, changes: dict[str, Any]):
    body = {"forward_backward_input": WORK, "model_id": model, "seq_id": 1, **changes}
    assert client.post("/forward_backward", json=body).status_code == 422


def test_samples_in_json_say_none_where_nothing_was_computed(client, model):
    session_id = model.partition(":")[0]
    made = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    name = client.post("/create_sampling_session", json=made).json()["sampling_session_id"]
    body = {
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {},
        "sampling_session_id": name,
        "seq_id": 0,
        "prompt_logprobs": True,
    }
    answer = result(client, client.post("/asample", json=body)).json()
    assert answer["sequences"] == [{"stop_reason": "stop", "tokens": [7, 8], "logprobs": [-0.5, -0.25]}]
    assert answer["prompt_logprobs"] == [None, -1.0]


def test_clients_between_get_protobuf_where_they_read_both(client, model):
    body = {"forward_backward_input": WORK, "model_id": model, "seq_id": 1}
    request = client.post("/forward_backward", json=body).json()["request_id"]
    both = {"Accept": "application/x-protobuf, application/json"}
    answer = client.post("/retrieve_future", json={"request_id": request}, headers=both)
    assert answer.headers["content-type"] == "application/x-protobuf"


def test_a_model_goes_on_from_a_checkpoint_in_three_steps(client, model):
    saved = result(client, client.post("/save_weights", json={"model_id": model, "seq_id": 1, "path": "a"})).json()
    info = client.post("/weights_info", json={"tinker_path": saved["path"]}).json()
    session_id = model.partition(":")[0]
    create = {"session_id": session_id, "model_seq_id": 1, "base_model": info["base_model"]}
    made = result(client, client.post("/create_model", json={**create, "lora_config": {"rank": info["lora_rank"]}}))
    load = {"model_id": made.json()["model_id"], "seq_id": 1, "path": saved["path"], "optimizer": True}
    assert result(client, client.post("/load_weights", json=load)).json()["path"] == saved["path"]
