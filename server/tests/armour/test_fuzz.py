"""Whatever arrives on whichever route, the answer is no 5xx, errors are JSON, and others go on as before."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from server_raw import Raw, datum, pass_body, row, sparse
from serving import Served, ledger

from twinkle_server.application import create_application
from twinkle_server.settings import Settings

PROTOBUF, JSON = "application/x-protobuf", "application/json"
LORA = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
PROMPT = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}
SAMPLING = {"max_tokens": 4, "seed": 7, "stop": ["\n"], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
CHUNK = {"loss_fn_inputs": {"target_tokens": {"data": [1, 2], "dtype": "int64", "shape": [2]}}, "model_input": PROMPT}
TARGETS = {"data": [1, -1], "dtype": "int64", "shape": [2, 1]}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.5, 1e308, float("nan"), float("inf"), "", "x", "\0",
    "é\u202e", "../../secret", "tinker://", "tinker://a/weights/..", "x" * 5000, [], {}, [[]], [None], {"": None},
    [1] * 2000, "18446744073709551616", "\ud800",
]  # fmt: skip


def seeds(session: str, model: str) -> dict[str, dict[str, Any]]:
    """Return a good body of each route that takes one."""
    numbered = {"model_id": model, "seq_id": 900}
    path = f"tinker://{model}/weights/a"
    made = {"session_id": session, "model_seq_id": 3}
    config = {"sdk_version": "0.38.0"}
    event = {"event": "GENERIC_EVENT", "event_id": "1", "event_name": "x", "event_data": {}, "severity": "INFO"}
    passed = {"data": [CHUNK], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 1.0}}
    sample = {"num_samples": 2, "prompt": PROMPT, "sampling_params": SAMPLING, "sampling_session_id": "s", "seq_id": 1}
    node = {"op": "call", "name": "x", "target": "y", "args": [], "kwargs": {}}
    graph = {"inputs": [{"name": "x", "rank": 1}], "graph": {"format": 1, "nodes": [node]}}
    return {
        "/client/config": config,
        "/client/dynamic_config": config,
        "/auth/token": {},
        "/telemetry": {"events": [event], "platform": "x", **config, "session_id": session, "process_uuid": "x"},
        "/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, **config, "project_id": "p"},
        "/session_heartbeat": {"session_id": session},
        "/sessions/search": {"user_metadata": {}, "owner": {"type": "own"}, "limit": 50, "cursor": "x"},
        "/sessions/{session_id}/finish": {"reason": {"type": "success"}, "detail": None},
        "/sessions/{session_id}/project": {"project_id": "p"},
        "/create_model": {**made, "base_model": "ledger/model", "lora_config": LORA, "user_metadata": {"a": "b"}},
        "/get_info": {"model_id": model},
        "/load_weights": {**made, "path": path, "optimizer": True},
        "/unload_model": {"model_id": "none"},
        "/forward_backward": {**numbered, "forward_backward_input": passed},
        "/forward": {**numbered, "forward_input": passed},
        "/optim_step": {**numbered, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "grad_clip_norm": 0.0}},
        "/create_custom_loss": {"session_id": session, "custom_loss_seq_id": 0, "name": "x", **graph},
        "/save_weights": {**numbered, "path": "a", "ttl_seconds": 3600, "overwrite": False, "user_metadata": {}},
        "/save_weights_for_sampler": {**numbered, "sampling_session_seq_id": 1, "kind": "inflight"},
        "/save_weights_external": {**numbered, "path": "a", "age_encryption_recipients": ["x"]},
        "/create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "ledger/model"},
        "/join_sampling_session": {"sampling_session_id": "s"},
        "/asample": {**sample, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "target_prompt_logprobs": TARGETS},
        "/retrieve_future": {"request_id": "x", "allow_metadata_only": True},
        "/cancel_future": {"request_id": "x"},
        "/retrieve_futures": {
            "target": {"type": "sampling_session", "sampling_session_id": "s", "cloned_sampler_id": 0},
            "prev_cursor": 0, "timeout": 0.0, "retrieved_request_ids": ["x"],
        },
        "/training_runs/{run}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": 3600},
        "/weights_info": {"tinker_path": path},
        "/copy_weights": {"source_path": path, "session_id": session, "model_seq_id": 9, "ttl_seconds": 3600},
    }  # fmt: skip


def routes() -> list[tuple[str, str]]:
    """Return method and template of every route of the application, from its own description."""
    application = create_application(None, None, Settings("m", Path("none")))  # type: ignore[arg-type]
    described = application.openapi()["paths"].items()
    return [(method.upper(), path) for path, operations in described for method in operations]


def mutated(chance: random.Random, value: Any) -> Any:
    """Return a value with one place changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        if chance.random() < 0.1:
            return {**value, "unknown": chance.choice(ODD)}
        return {**value, key: mutated(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], mutated(chance, value[place]), *value[place + 1 :]]
    return chance.choice(ODD)


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return bytes of which some were flipped, cut out or put in."""
    body = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(body) + 1)
        kind = chance.randrange(4)
        if kind == 0 and place < len(body):
            body[place] = chance.randrange(256)
        elif kind == 1:
            body[place:place] = chance.randbytes(chance.randint(1, 9))
        elif kind == 2:
            del body[place : place + chance.randint(1, 9)]
        elif kind == 3 and chance.random() < 0.3:
            del body[place:]
    return bytes(body)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


class Fuzz:
    """Makes requests.

    Args:
        chance: all that is random.
        session: that is there.
        model: that is there.
    """

    def __init__(self, chance: random.Random, session: str, model: str) -> None:
        self.chance = chance
        self.model = model
        self.seeds = seeds(session, model)
        self.values = [session, model, "weights", "a", "none", "..", "%2e%2e", "%00", "é", "x" * 300, "a%2fb"]

    def request(self, method: str, path: str) -> dict[str, Any]:
        """Return a request of a route."""
        chance = self.chance
        while "{" in path:
            start, end = path.index("{"), path.index("}")
            path = path[:start] + chance.choice(self.values) + path[end + 1 :]
        if chance.random() < 0.05:
            method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
        made: dict[str, Any] = {"method": method, "url": path, "headers": {}}
        if method in ("POST", "PUT"):
            made["content"], made["headers"] = self.body(path)
        else:
            made["params"] = {
                name: chance.choice(["", "0", "-1", "x", "9" * 30, "nan", "2026-01-01"])
                for name in ("limit", "offset", "day", "starting_on", "ending_before", "project_id")
                if chance.random() < 0.3
            }
        return made

    def body(self, path: str) -> tuple[bytes, dict[str, str]]:
        chance = self.chance
        seed = self.seeds.get(path.removeprefix("/api/v1"), {"reason": {"type": "success"}, "ttl_seconds": 1})
        content, kind = as_json(mutated(chance, mutated(chance, seed) if chance.random() < 0.5 else seed)), JSON
        if path.endswith(("forward_backward", "forward")) and chance.random() < 0.7:
            content, kind = damaged(chance, self.protobuf()), PROTOBUF
        if chance.random() < 0.15:
            content = damaged(chance, content)
        headers = {"Content-Type": kind if chance.random() < 0.93 else chance.choice(["", "text/plain", "x", PROTOBUF])}
        if chance.random() < 0.1:
            content, headers["Content-Encoding"] = zstandard.compress(content), "zstd"
            content = damaged(chance, content) if chance.random() < 0.5 else content
        if path.endswith("retrieve_future") and chance.random() < 0.5:
            headers["Accept"] = PROTOBUF
        return content, headers

    def protobuf(self) -> bytes:
        rows = [
            row([1, 2, 3, 4]),
            datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[0.5, 0.5], [1.0, 0.0]]),
            datum(
                [5, 6], target_tokens=sparse([[0, 2], [3, 0]]) and [2, 3], logprobs=[-1.0, -2.0], advantages=[1.0, 0.0]
            ),
        ]
        chosen = self.chance.sample(rows, self.chance.randint(1, 3))
        number = self.chance.choice([1, 5, 10**6])
        return pass_body(self.model, number, chosen, self.chance.choice(["cross_entropy", "ppo"]), config={"beta": 1.0})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    times = {"poll": 0.02, "gap_pause": 0.01, "gap_fail": 3600.0}
    served = ledger(tmp_path_factory.mktemp("fuzz") / "data", {"times": times, "limits": {"body_bytes": 2**20}})
    try:
        yield served.start()
    finally:
        served.stop()


def check(answer: httpx.Response, asked: dict[str, Any]) -> None:
    """Demand an answer that a client can read."""
    shown = {**asked, "content": asked.get("content", b"")[:2000]}
    assert answer.status_code < 500, (answer.status_code, answer.text, shown)
    if answer.status_code >= 400 and asked["method"] != "HEAD":
        assert answer.json()["detail"], (answer.text, shown)
        assert "Traceback" not in answer.text


def run(service: Served, count: int, seed: int, good: Callable[[], None]) -> None:
    """Send so many requests, spread over all routes."""
    chance = random.Random(seed)
    with Raw(service.url) as raw:
        session = raw.session()
        model = raw.post("/create_model", raw.create_body(session))["request_id"] and f"{session}:train:0"
    every, fuzz = routes(), Fuzz(chance, session, model)
    with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client:
        for number in range(count):
            asked = fuzz.request(*every[number % len(every)])
            check(client.request(**asked), asked)
            if number % 500 == 0:
                good()


def goes_on(service: Served) -> None:
    """Demand that somebody else trains as if nothing were."""
    with Raw(service.url) as raw:
        session = raw.session()
        raw.result(raw.post("/create_model", raw.create_body(session))["request_id"])
        body = pass_body(f"{session}:train:0", 1, [row([1, 2, 3])])
        future = raw.send("/forward_backward", body).json()["request_id"]
        raw.result(future, "pass")
        said = raw.http.get(f"{service.url}/twinkle/status").json()
    assert said["engine_restarts"] == 0
    assert said["ready"] is True


def test_mutated_requests_on_every_route_give_no_5xx(service: Served) -> None:
    run(service, 1500, 1, lambda: goes_on(service))
    goes_on(service)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_more_of_them_do_not_either(service: Served, seed: int) -> None:
    run(service, 5000, seed, lambda: goes_on(service))


def test_every_route_with_a_body_has_a_good_one_to_start_from() -> None:
    with_body = {path.removeprefix("/api/v1") for method, path in routes() if method in ("POST", "PUT")}
    missing = {path for path in with_body - set(seeds("s", "m")) if not path.endswith("/publish")}
    assert not missing
