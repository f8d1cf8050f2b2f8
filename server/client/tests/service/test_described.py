"""Responses of every protocol have the schemas of the OpenAPI description, which allow no further fields here."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from described import Described
from native_rows import CONFIG, rows
from server_raw import Failed, Raw, row
from serving import Served

from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler, wire
from twinkle_server.responses.routes import ROUTES

HELLO = [{"role": "user", "content": "hello"}]
ELSEWHERE = {
    "/twinkle/hub/", "/twinkle/merge", " /twinkle/data", "/api/v1/create_custom_loss", "/api/v1/copy_weights",
    "/healthz",
}  # fmt: skip
"""Beginnings of routes whose successes need another service; the tests of isolation check those."""


@pytest.fixture
def http(service: Served, described: Described) -> Iterator[httpx.Client]:
    hooks = {"response": [described.hook]}
    headers = {"X-API-Key": "tml-local"}
    with httpx.Client(base_url=service.url, headers=headers, event_hooks=hooks, trust_env=False, timeout=60) as client:
        yield client


def good(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json() if "json" in response.headers["content-type"] else response.text


def tinker(service: Served, described: Described) -> None:
    """Use every route of the Tinker protocol."""
    with Raw(service.url) as raw:
        raw.http.event_hooks["response"].append(described.hook)
        raw.session(display_name="described")
        model = raw.model(user_metadata={"a": "b"})
        session = model.session
        model.forward_backward([row([7, 8, 9])])
        raw.result(model.submit_pass([row([7, 8, 9])], forward_only=True))
        model.step(learning_rate=1e-3)
        given = {"chunks": [{"tokens": [7, 8], "type": "encoded_text"}]}
        targets = {"target_tokens": {"data": [8, 9], "dtype": "int64", "shape": [2]}}
        rows_of_json = {"data": [{"model_input": given, "loss_fn_inputs": targets}], "loss_fn": "cross_entropy"}
        raw.result(model.submit("forward", forward_input=rows_of_json))
        with pytest.raises(Failed):
            model.forward([row([7, 8])], loss="none")
        path, sampled, external = model.save("a"), model.save_sampler("b", ttl_seconds=7200), model.save_external("c")
        raw.result(model.submit("load_weights", path=path))
        raw.load(path)
        sampler = raw.sampler(model_path=sampled)
        options = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
        request = sampler.submit([7, 8, 9], 2, params={"max_tokens": 4}, **options)["request_id"]
        raw.result(request)
        raw.post("/join_sampling_session", {"sampling_session_id": sampler.id})
        raw.post("/retrieve_futures", {"target": {"sampling_session_id": sampler.id}, "timeout": 0})
        pending = model.submit("optim_step", number=50, adam_params={})
        raw.post("/cancel_future", {"request_id": pending})
        raw.poll(pending)
        for name in ("client/config", "client/dynamic_config", "telemetry"):
            raw.post(f"/{name}", {})
        raw.post("/get_info", {"model_id": model.id})
        raw.post("/weights_info", {"tinker_path": path})
        raw.post("/session_heartbeat", {"session_id": session})
        raw.post("/sessions/search", {"limit": 2})
        for name in (
            "audit",
            "auth/apikey/me",
            "billing/usage/checkpoints/current",
            "checkpoints",
            "healthz",
            "sessions",
        ):
            raw.get(f"/{name}")
        raw.get("/billing/usage/events", starting_on="2020-01-01")
        raw.get(f"/samplers/{sampler.id}")
        raw.get(f"/sessions/{session}")
        raw.get(f"/sessions/{session}/trace_export")
        run = f"/training_runs/{model.id}"
        for name in ("/training_runs", run, f"{run}/checkpoints"):
            raw.get(name)
        raw.get(f"{run}/checkpoints/external_weights/c/external_weights_urls")
        assert raw.http.get(f"{run}/checkpoints/weights/a/archive", follow_redirects=True).status_code == 200
        checkpoint = f"{run}/checkpoints/sampler_weights/b"
        assert external.endswith("/c")
        for method, end, body in (
            ("POST", "/publish", {}),
            ("DELETE", "/publish", None),
            ("PUT", "/ttl", {"ttl_seconds": 7200}),
            ("DELETE", "", None),
        ):
            assert raw.send(f"{checkpoint}{end}", body, method).status_code == 200
        assert raw.send(f"/sessions/{session}/project", {"project_id": "p"}, "PUT").status_code == 200
        raw.result(raw.post("/unload_model", {"model_id": raw.model(number=1).id})["request_id"])
        raw.post(f"/sessions/{session}/finish")


def chat(http: httpx.Client, model: str, embedder: str) -> None:
    """Use every route of the chat protocols, streamed and not."""
    body = {"model": model, "max_tokens": 4}
    for stream in (False, True):
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        scores = {"logprobs": True, "top_logprobs": 2}
        good(
            http.post(
                "/v1/chat/completions", json={**body, "messages": HELLO, "n": 2, "stream": stream, **scores, **usage}
            )
        )
        good(http.post("/v1/completions", json={**body, "prompt": "a b", "logprobs": 2, "stream": stream, **usage}))
        good(http.post("/v1/messages", json={**body, "messages": HELLO, "stream": stream}))
    good(http.post("/v1/completions", json={**body, "prompt": "a b", "logprobs": 2, "echo": True}))
    good(http.post("/v1/messages/count_tokens", json={"model": model, "messages": HELLO}))
    for encoding in ("float", "base64"):
        good(http.post("/v1/embeddings", json={"model": embedder, "input": ["a", "b"], "encoding_format": encoding}))
    good(http.get("/v1/models"))
    good(http.get(f"/v1/models/{model}"))


def native(http: httpx.Client, client: TwinkleClient) -> str:
    """Use native routes that the client's own tests do not, and return a model for embeddings."""
    model = MultiLoraTransformersModel("tiny", client=client)
    model.add_adapter_to_model("a", CONFIG, seed=1)
    model.set_optimizer("AdamW", lr=1e-3)
    model.forward_backward(rows(1, 6))
    model.clip_grad_and_step()
    saved = model.save("described", is_sampler=True)
    trained = model.save("trained", save_optimizer=True)
    model.load("trained")
    sampler = vLLMSampler("tiny", client=client)
    sampler.sample({"input_ids": [5, 6]}, {"max_tokens": 2}, adapter_uri=saved)
    prompt = {"inputs": [{"input_ids": [5, 6]}], "options": {"max_tokens": 3, "logprobs": 2, "topk_logprobs": 1}}
    [name] = {sampler.client.connection.run(sampler._sampler(None))}
    good(http.post(f"/twinkle/samplers/{name}/stream", json=prompt))
    run = model.training_run_id()
    for path in (
        "healthz", "get_server_capabilities", "capacity_info", "training_runs", f"training_runs/{run}",
        f"training_runs/{run}/checkpoints", f"checkpoint_path/{run}/weights/trained", f"models/{run}", "tokenizer",
        "status", "overview", "data",
    ):  # fmt: skip
        good(http.get(f"/twinkle/{path}"))
    good(http.post("/twinkle/session_heartbeat", json={"session_id": client.session_id}))
    good(http.get("/readyz"))
    good(http.get("/metrics"))
    good(http.post("/twinkle/weights_info", json={"twinkle_path": trained.twinkle_path}))
    assert http.delete(f"/twinkle/training_runs/{run}/checkpoints/weights/trained").status_code == 200
    other = MultiLoraTransformersModel("tiny", client=client)
    other.add_adapter_to_model("a", CONFIG, seed=1)
    ended = http.post(f"/twinkle/models/{other.training_run_id()}/get_progress", params={"seq_id": 1}, json={})
    request = ended.headers["x-twinkle-request"]
    assert http.get(f"/twinkle/futures/{request}").status_code == 200
    good(http.post(f"/twinkle/futures/{request}/cancel"))
    good(http.post(f"/twinkle/models/{run}/skip", params={"seq_id": 900}, json={}))
    assert http.delete(f"/twinkle/samplers/{name}").status_code == 200
    good(http.post(f"/twinkle/models/{other.training_run_id()}/unload", params={"seq_id": 2}, json={}))
    embedder = MultiLoraTransformersModel("tiny", client=client)
    embedder.add_adapter_to_model("a", CONFIG, seed=1)
    embedder.set_loss("InfonceLoss")
    embedder.forward_backward(
        [{**each, "labels": [1 - place % 2]} for place, each in enumerate(rows(1, 6, 6))], task="embedding"
    )
    return embedder.training_run_id()


@pytest.mark.full
def test_responses_of_every_protocol_are_as_described(
    service: Served, described: Described, http: httpx.Client, client: TwinkleClient
) -> None:
    tinker(service, described)
    embedder = native(http, client)
    chat(http, "tiny", embedder)
    client.close()
    assert not described.wrong, json.dumps(described.wrong[:20], indent=1)
    good_ones = {f"{method} {path}" for method, path, status, _ in described.seen if status in ("200", "302")}
    described_ones = {name for name, answers in ROUTES.items() if answers.json or answers.events or answers.other}
    missing = {name for name in described_ones - good_ones if not any(part in name for part in ELSEWHERE)}
    assert not missing
    kinds = {kind for *_, kind in described.seen}
    assert kinds >= {"application/json", "text/event-stream", wire.CONTENT_TYPE, "application/x-protobuf"}
