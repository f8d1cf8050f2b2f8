"""Requests that no client sends: good ones of every route with places changed, and bytes that were damaged."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zstandard
from fastapi import FastAPI
from google.protobuf.message import DecodeError
from server_raw import Raw, datum, pass_body, row, sparse

from twinkle_client import wire as frames
from twinkle_server.application import assemble, create_application
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings
from twinkle_server.store import open_store
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.wire import tinker_pb2 as wire

PROTOBUF, JSON, FRAME = "application/x-protobuf", "application/json", frames.CONTENT_TYPE
_LIFE = 150  # requests
_PLACES = ("none", "..", "%2e%2e", "%00", "é", "x" * 300, "a%2fb")
_LOSSES: dict[str, dict[str, float | str]] = {
    "cross_entropy": {}, "ppo": {"clip_low_threshold": 0.5}, "gspo": {}, "dro": {"beta": 1.0}, "none": {}
}  # fmt: skip
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


CHAT = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
MESSAGES = [
    {"role": "user", "content": "x"}, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]},
]  # fmt: skip
TOOL = {"name": "f", "description": "x", "input_schema": {"type": "object"}}


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
        "/v1/chat/completions": {
            "model": model, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "n": 2,
            "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
            "max_completion_tokens": 4, "seed": 7, "stop": ["x"], "logit_bias": {"3": 1.0}, **CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        },
        "/v1/completions": {
            "model": model, "prompt": [[1, 2], [3]], "max_tokens": 4, "logprobs": 2, "echo": True, **CHAT,
        },
        "/v1/embeddings": {"model": model, "input": ["x", "y"], "encoding_format": "float"},
        "/v1/messages": {
            "model": model, "max_tokens": 4, "system": "x", "messages": MESSAGES, "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "f"}, "stop_sequences": ["x"], "stream": True, "top_k": 3,
        },
        "/v1/messages/count_tokens": {"model": model, "messages": MESSAGES},
        **native_seeds(session, path),
    }  # fmt: skip


def native_seeds(session: str, path: str) -> dict[str, dict[str, Any]]:
    """Return a good body of each native route that takes one."""
    row = {"input_ids": list(range(5, 25)), "labels": [-100, *range(7, 25), -100]}
    rows = {"inputs": [row, {"input_ids": [5, 6], "labels": [6, -100]}]}
    made = {"session_id": session, "model_seq_id": 40, "config": {"r": 4, "target_modules": "all-linear"}, "seed": 1}
    sampled = {"inputs": [{"input_ids": [1, 2, 3]}], "options": {"max_tokens": 4, "logprobs": 2, "stop": ["x"]}}
    passed = {**rows, "temperature": 0.5, "loss_inputs": {"advantages": [1.0, 2.0], "ref_outputs": {"logps": [[0.0]]}}}
    of_model = {
        "forward_backward": passed, "forward_only": {**rows, "disable_lora": True, "topk_logprobs": 3},
        "forward": rows, "calculate_loss": {"loss_inputs": {}}, "backward": {},
        "clip_grad_and_step": {"max_grad_norm": 1.0, "norm_type": 2.0, "flush": True},
        "clip_grad_norm": {"max_grad_norm": 1.0, "norm_type": "inf"},
        "step": {"optim_params": {"lr": 0.1}}, "zero_grad": {"gradient_accumulation_steps": 2, "flush": True},
        "lr_step": {"metrics": 1.0}, "set_loss": {"name": "GRPOLoss", "options": {"beta": 0.1}},
        "set_optimizer": {"name": "AdamW", "options": {"lr": 0.1, "betas": [0.5, 0.5]}},
        "set_lr_scheduler": {"name": "SequentialLR", "options": {"schedulers": [{"scheduler": "LinearLR"}]}},
        "set_template": {"name": "Template", "options": {"max_length": 5}},
        "set_processor": {"name": "InputProcessor", "options": {"padding_side": "left"}},
        "add_metric": {"name": "GRPOMetric", "options": {"top_k_kl": 3}, "is_training": True},
        "apply_patch": {"name": "NoSplitModulesPatch"}, "calculate_metric": {"is_training": False},
        "get_state_dict": {}, "get_train_configs": {}, "get_progress": {}, "skip": {}, "unload": {"x": 1},
        "save": {"name": "n", "save_optimizer": True, "consumed_train_samples": 3, "ttl_seconds": 3600},
        "load": {"path": path, "load_optimizer": False},
    }  # fmt: skip
    return {f"/twinkle/models/{{model_id}}/{name}": body for name, body in of_model.items()} | {
        "/twinkle/create_session": {"metadata": {"a": "b"}, "tags": ["x"], "client_version": "1"},
        "/twinkle/session_heartbeat": {"session_id": session},
        "/twinkle/finish_session": {"session_id": "none"},
        "/twinkle/models": made,
        "/twinkle/futures/{request_id}/cancel": {},
        "/twinkle/samplers": {"session_id": session, "sampler_seq_id": 7, "adapter_uri": path},
        "/twinkle/samplers/{sampler_id}/sample": {**sampled, "seq_id": 50},
        "/twinkle/samplers/{sampler_id}/stream": sampled,
        "/twinkle/weights_info": {"twinkle_path": path},
    }


def routes() -> list[tuple[str, str]]:
    """Return method and template of every route of the protocol, from the application's own description."""
    return _described(create_application(None, None, Settings("m", Path("none"))))  # type: ignore[arg-type]


def every_route(data: Path) -> list[tuple[str, str]]:
    """Return those of all that is served, probes, figures and downloads too.

    Args:
        data: an empty folder to open a store in.
    """
    settings, store = Settings("m", data, auth=False), open_store(data)
    try:
        metrics = Metrics(store.secret)
        found = assemble(settings, store, Service(settings, store, metrics), metrics)
        while not isinstance(found, FastAPI):
            found = getattr(found, "_application", None) or found._app
    finally:
        store.close()
    return _described(found)


def _described(application: FastAPI) -> list[tuple[str, str]]:
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
    """Makes requests about a session, a model, a checkpoint and a sampling session that are there.

    Args:
        chance: all that is random.
        raw: a connection to the service.
    """

    def __init__(self, chance: random.Random, raw: Raw) -> None:
        self.chance = chance
        made = raw.model()
        made.save("a")
        self.model = made.id
        sampler, base = raw.sampler(made.session).id, raw.base_model()
        self.seeds = seeds(made.session, made.id)
        for route in ("/create_model", "/create_sampling_session"):
            self.seeds[route]["base_model"] = base
        for route in self.seeds:
            if route.startswith("/v1/") and chance.random() < 0.5:
                self.seeds[route]["model"] = base
        self.seeds["/asample"]["sampling_session_id"] = sampler
        self.seeds["/retrieve_futures"]["target"]["sampling_session_id"] = sampler
        del self.seeds["/retrieve_futures"]["timeout"]  # another one than that of the service would be waited for
        self.values = [made.session, made.id, sampler, "weights", "a", *_PLACES]
        link = raw.send(f"/training_runs/{made.id}/checkpoints/weights/a/archive", method="GET").json()["url"]
        taken = made.save_external("e").removeprefix(f"tinker://{made.id}")
        files = raw.get(f"/training_runs/{made.id}/checkpoints{taken}/external_weights_urls")["urls"]
        self.number = made.last + 1
        self.tokens = [url.split("/")[-2] for url in (link, *files.values())]
        self.names = ["archive.tar", "manifest.json", *files]
        self.plain = b""

    def request(self, method: str, path: str) -> dict[str, Any]:
        """Return a request of a route."""
        chance, template = self.chance, path
        while "{" in path:
            start, end = path.index("{"), path.index("}")
            path = path[:start] + self.value(path[start + 1 : end]) + path[end + 1 :]
        if chance.random() < 0.05:
            method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
        made: dict[str, Any] = {"method": method, "url": path, "headers": {}}
        if method in ("POST", "PUT"):
            made["content"], made["headers"] = self.body(template)
            if template.startswith("/twinkle/models/"):
                number = self.number if chance.random() < 0.9 else chance.choice(["", "0", "x", 1, 10**30])
                made["params"] = {"seq_id": number}
        else:
            made["params"] = {
                name: chance.choice(["", "0", "-1", "x", "9" * 30, "nan", "2026-01-01"])
                for name in ("limit", "offset", "day", "starting_on", "ending_before", "project_id")
                if chance.random() < 0.3
            }
        return made

    def value(self, name: str) -> str:
        """Return what stands in a place of a path."""
        chance = self.chance
        if name == "token" and chance.random() < 0.8:
            token = chance.choice(self.tokens)
            return token if chance.random() < 0.5 else damaged(chance, token.encode()).hex()[: chance.choice([9, 999])]
        return chance.choice(self.names if name == "file" and chance.random() < 0.7 else self.values)

    def body(self, path: str) -> tuple[bytes, dict[str, str]]:
        """Return a body, and the headers that say what it is."""
        chance, path = self.chance, path.removeprefix("/api/v1")
        seed = self.seeds.get(path, {"reason": {"type": "success"}, "ttl_seconds": 1})
        if path == "/load_weights" and chance.random() < 0.5:
            seed = {"model_id": self.model, "seq_id": 0, "path": seed["path"], "optimizer": True}
        if "seq_id" in seed:
            seed = {**seed, "seq_id": chance.getrandbits(31) if path == "/asample" else self.number}
        content, kind = as_json(mutated(chance, mutated(chance, seed) if chance.random() < 0.5 else seed)), JSON
        if path in ("/forward_backward", "/forward") and chance.random() < 0.7:
            content, kind = self.protobuf(), PROTOBUF
            content = damaged(chance, content) if chance.random() < 0.8 else content
        if path.startswith("/twinkle/") and chance.random() < 0.7:
            content, kind = self.frame(mutated(chance, seed)), FRAME
        if chance.random() < 0.15:
            content = damaged(chance, content)
        headers = {"Content-Type": kind if chance.random() < 0.93 else chance.choice(["", "text/plain", "x", PROTOBUF])}
        self.plain = content
        if chance.random() < 0.1:
            content, headers["Content-Encoding"] = zstandard.compress(content), "zstd"
            content = damaged(chance, content) if chance.random() < 0.5 else content
        if path == "/retrieve_future" and chance.random() < 0.5:
            headers["Accept"] = PROTOBUF
        return content, headers

    def frame(self, value: Any) -> bytes:
        """Return a value as a frame, if it has that form."""
        try:
            return frames.pack(value)
        except (frames.WireError, UnicodeEncodeError, ValueError):
            return frames.pack({})

    def protobuf(self) -> bytes:
        """Return the body of a pass; some of its rows fit no loss, or not this one."""
        thin = datum([5, 6])
        thin.loss_fn_inputs["target_tokens"].CopyFrom(sparse([[0, 2], [3, 0]]))
        thin.loss_fn_inputs["weights"].CopyFrom(sparse([[0.0, 0.5], [1.0, 0.0]]))
        score = {"logprobs": [-1.0, -2.0], "advantages": [1.0, 0.0]}
        rows = [
            row([1, 2, 3, 4]),
            datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[0.5, 0.5], [1.0, 0.0]]),
            thin,
            datum([5, 6], target_tokens=[2, 3], **score),
        ]
        chosen = self.chance.sample(rows, self.chance.randint(1, 3))
        number = self.number if self.chance.random() < 0.9 else self.chance.choice([1, self.number + 4, 10**6])
        loss = self.chance.choice(list(_LOSSES))
        return pass_body(self.model, number, chosen, loss, config=_LOSSES[loss])

    def heard(self, answer: httpx.Response) -> str | None:
        """Count the number up if an answer says that it is used; return the future's id if there is one."""
        if answer.status_code not in (200, 202, 409) or not answer.request.content:
            return None
        if answer.request.url.path.startswith("/twinkle/"):
            self.number += answer.request.url.params.get("seq_id") == str(self.number)
            return answer.headers.get("x-twinkle-request")
        self.number += _number_of(self.plain) == self.number
        said = answer.json() if answer.headers["content-type"] == "application/json" else None
        if not isinstance(said, dict) or "request_id" not in said or said.get("type") == "try_again":
            return None
        self.seeds["/retrieve_future"]["request_id"] = said["request_id"]
        return str(said["request_id"])


def _number_of(content: bytes) -> Any:
    try:
        return json.loads(content).get("seq_id")
    except (ValueError, AttributeError):
        pass
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return None
    return message.seq_id


@dataclass
class Struck:
    """What came of many requests.

    Attributes:
        futures: ids of those that became operations.
        refused: seconds until each error was answered.
    """

    futures: list[str] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)


def strike(url: str, count: int, seed: int, paths: list[tuple[str, str]]) -> Struck:
    """Send so many requests, spread over routes, and demand answers that a client can read."""
    chance, struck = random.Random(seed), Struck()
    with Raw(url) as raw, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        for number in range(count):
            if number % _LIFE == 0:  # what it asks about does not outlive all that it asks for
                fuzz = Fuzz(chance, raw)
            asked = fuzz.request(*paths[number % len(paths)])
            answer = client.request(**asked)
            check(answer, asked)
            if future := fuzz.heard(answer):
                struck.futures.append(future)
            if answer.status_code >= 400:
                struck.refused.append(answer.elapsed.total_seconds())
    return struck


def check(answer: httpx.Response, asked: dict[str, Any]) -> None:
    """Demand an answer that a client can read."""
    shown = {**asked, "content": asked.get("content", b"")[:2000]}
    assert answer.status_code < 500, (answer.status_code, answer.text, shown)
    if answer.status_code >= 400 and asked["method"] != "HEAD":
        said = answer.json()
        assert said["detail"] if "detail" in said else said["error"]["message"], (answer.text, shown)
        assert "Traceback" not in answer.text
