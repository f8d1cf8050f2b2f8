"""Sampling over plain HTTP: sessions, requests for samples, and what is refused before anything runs."""

from typing import Any

import httpx
import orjson
import pytest

from twinkle_server.errors import Busy
from twinkle_server.wire.codec import read_sample_response

BASE = "/models/of/tiny/v1"
PROMPT = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}


def session(client: httpx.Client) -> str:
    return str(client.post("/create_session", json={}).json()["session_id"])


def sampler(client: httpx.Client, session_id: str, number: int = 0, **source: Any) -> httpx.Response:
    body = {"session_id": session_id, "sampling_session_seq_id": number, **(source or {"base_model": BASE})}
    return client.post("/create_sampling_session", json=body)


def ask(client: httpx.Client, name: str, number: int = 0, **changes: Any) -> httpx.Response:
    params = {"max_tokens": 8, **changes.pop("sampling_params", {})}
    body = {"prompt": PROMPT, "sampling_params": params, "sampling_session_id": name, "seq_id": number, **changes}
    return client.post("/asample", json=body)


def result(client: httpx.Client, promise: httpx.Response, **headers: str) -> httpx.Response:
    assert promise.status_code == 200, promise.text
    return client.post("/retrieve_future", json={"request_id": promise.json()["request_id"]}, headers=headers)


@pytest.fixture
def client(served) -> httpx.Client:
    return served.http()


@pytest.fixture
def name(client: httpx.Client) -> str:
    return str(sampler(client, session(client)).json()["sampling_session_id"])


def test_a_sampling_session_is_described(client: httpx.Client):
    session_id = session(client)
    made = sampler(client, session_id, 4).json()["sampling_session_id"]
    assert made == f"{session_id}:sample:4"
    assert client.get(f"/samplers/{made}").json() == {"sampler_id": made, "base_model": BASE}
    assert sampler(client, session_id, 4).json()["sampling_session_id"] == made


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ({"base_model": "other"}, 400),
        ({"model_path": "tinker://nobody/sampler_weights/none"}, 404),
        ({"model_path": "/etc/passwd"}, 400),
        ({"model_path": "tinker://a/external_weights/b"}, 400),
        ({"model_path": "tinker://a/sampler_weights/../b"}, 400),
        ({"model_path": None}, 400),
    ],
)
def test_a_sampling_session_from_what_is_not_there_is_refused(client, source: dict[str, Any], status: int):
    answer = sampler(client, session(client), **source)
    assert answer.status_code == status
    assert answer.json()["detail"]


def test_a_request_gets_a_name_for_each_sequence_and_the_same_ones_again(served, client, name):
    promise = ask(client, name, 3_000_000_001, num_samples=3)
    names = promise.json()["sample_sequence_ids"]
    assert len(set(names)) == 3
    assert ask(client, name, 3_000_000_001, num_samples=3).json() == promise.json()
    assert len(served.service.submissions) == 1
    texts, _ = read_sample_response(result(client, promise, Accept="application/x-protobuf").content)
    assert [text.tokens.tolist() for text in texts] == [[7, 8]] * 3


def test_the_options_go_into_the_log_with_a_seed(served, client, name):
    ask(client, name, sampling_params={"stop": "x", "temperature": 0}, prompt_logprobs=True)
    ask(client, name, 1, sampling_params={"seed": 5, "stop": [3, 4]})
    ask(client, name, 2, sampling_params={"stop": []})
    first, second, third = (orjson.loads(made.payload) for made in served.service.submissions)
    assert (first["tokens"], first["stop"], first["temperature"], first["prompt_logprobs"]) == (
        [1, 2, 3],
        ["x"],
        0,
        True,
    )
    assert (second["seed"], second["stop"]) == (5, [3, 4])
    assert third["stop"] == []
    assert first["seed"] != third["seed"]
    assert served.service.submissions[0].tokens == 3 + 8


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sampling_params": {"max_tokens": 126}},
            "the prompt (3 tokens) and max_tokens (126) exceed the model's context of 128",
        ),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens must be at least 1, got 0"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stop": ""}}, "empty string"),
        ({"prompt": {"chunks": []}}, "at least one token"),
        ({"prompt": {"chunks": [{"data": "aaaa", "format": "png", "type": "image"}]}}, "must be text"),
        ({"prompt_logprobs_last_n": 1}, "requires prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "between 1 and 2"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, r"must have the shape \[2, K\]"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, "got 1"),
        ({"target_prompt_logprobs": {"data": [2**70], "dtype": "int64", "shape": [2, 1]}}, "64-bit integers"),
        ({"topk_prompt_logprobs": 2**20, "topk_sample_logprobs": 2**20, "num_samples": 16}, "must request at most"),
    ],
)
def test_what_cannot_be_sampled_fails_as_the_users_fault(client, name, changes: dict[str, Any], words: str):
    answer = result(client, ask(client, name, **changes)).json()
    assert answer["category"] == "user"
    assert words.replace("\\", "") in answer["error"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"num_samples": 0}, 400),
        ({"num_samples": 17}, 400),
        ({"num_samples": 10**30}, 400),
        ({"sampling_session_id": None}, 400),
        ({"sampling_session_id": "none:sample:0"}, 404),
        ({"prompt": [1]}, 422),
        ({"sampling_params": {"stop": ["a", 1]}}, 422),
        ({"sampling_params": {"stop": [2**64]}}, 422),
        ({"seq_id": -1}, 422),
        ({"seq_id": None}, 422),
        ({"sampling_params": {"max_tokens": 10**30}}, 422),
        ({"sampling_params": {"seed": 10**30}}, 422),
        ({"prompt_logprobs_last_n": 10**30}, 422),
    ],
)
def test_a_request_of_another_form_is_refused_at_once(client, name, changes: dict[str, Any], status: int):
    answer = ask(client, name, **changes)
    assert answer.status_code == status, answer.text
    assert len(answer.json()["detail"]) > 10


def test_scores_of_given_tokens_go_into_the_log_as_they_were_asked_for(served, client, name):
    asked: dict[str, Any] = {"data": [5, -1], "dtype": "int64", "shape": [2, 1]}
    ask(client, name, target_prompt_logprobs=asked, topk_prompt_logprobs=2, prompt_alt_tokens_k=3)
    payload = orjson.loads(served.service.submissions[0].payload)
    del asked["dtype"]
    assert (payload["targets"], payload["topk_prompt_logprobs"], payload["alternatives"]) == (asked, 2, 3)


def test_too_much_at_once_may_come_again(served, client, name):
    served.service.refuse = Busy("too much at the moment", retry_after=2.4)
    answer = ask(client, name)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    served.service.refuse = None
    assert ask(client, name).status_code == 200


def test_a_pending_request_is_told_why_it_waits(served, client, name):
    served.service.held = True
    answer = result(client, ask(client, name)).json()
    assert (answer["type"], answer["queue_state"]) == ("try_again", "paused_capacity")
    assert answer["queue_state_reason"]


def test_a_request_is_cancelled(served, client, name):
    served.service.held = True
    request = ask(client, name).json()["request_id"]
    assert client.post("/cancel_future", json={"request_id": request}).status_code == 200
    assert served.service.cancelled == [request]
    assert client.post("/cancel_future", json={"request_id": "none"}).status_code == 404


def test_copies_of_a_client_get_numbers_of_their_own(client, name):
    join = {"sampling_session_id": name, "type": "join_sampling_session"}
    assert [client.post("/join_sampling_session", json=join).json()["client_counter"] for _ in range(2)] == [1, 2]
    assert client.post("/join_sampling_session", json={"sampling_session_id": "none"}).status_code == 404


def test_finished_requests_of_a_client_are_listed_behind_its_cursor(client, name):
    first = ask(client, name, 1).json()["request_id"]
    ask(client, name, 1_000_000_001)
    target = {"type": "sampling_session", "sampling_session_id": name, "cloned_sampler_id": 0}
    body = {"target": target, "prev_cursor": 0, "retrieved_request_ids": [first]}
    found = client.post("/retrieve_futures", json=body).json()
    assert found["completions"] == [{"state": "finished", "request_id": first}]
    assert found["cursor"] > 0
    rest = client.post("/retrieve_futures", json={**body, "prev_cursor": found["cursor"], "timeout": 0.0}).json()
    assert rest["cursor"] == found["cursor"]


def test_nobody_elses_sampling_session_can_be_seen_or_used(served, client, name):
    other = served.http("b")
    assert other.get(f"/samplers/{name}").status_code == 404
    assert ask(other, name).status_code == 404
    assert other.post("/join_sampling_session", json={"sampling_session_id": name}).status_code == 404
    target = {"target": {"sampling_session_id": name}}
    assert other.post("/retrieve_futures", json=target).status_code == 404
    assert sampler(other, name.partition(":")[0], 1).status_code == 404


def test_a_session_that_ended_samples_no_more(client, name):
    session_id = name.partition(":")[0]
    assert client.post(f"/sessions/{session_id}/finish", json={}).status_code == 200
    assert ask(client, name).status_code == 410
    assert sampler(client, session_id, 1).status_code == 410
