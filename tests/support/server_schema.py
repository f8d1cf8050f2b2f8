"""Requests that schemathesis derives from the service's own description, about things that are there or not."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from described import plain, strict
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_raw import Raw

from twinkle_client import wire

CHECKS: list[Any] = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
_ENDING = ("finish", "unload", "unload_model", "ttl", "publish", "skip", "finish_session", "automatic")
"""Parts of paths of operations that end or hide what the others ask about."""
_KEYS = {"x-api-key", "authorization", "cookie"}
_LONG = {"timeout", "wait"}
"""Parameters that let an answer wait."""


@schemathesis.serializer(wire.CONTENT_TYPE)
def _frame(context: Any, value: Any) -> bytes:
    try:
        return wire.pack(value)
    except (wire.WireError, UnicodeEncodeError, ValueError):
        return json.dumps(value).encode("utf-8", "surrogatepass")


schemathesis.serializer.alias("application/x-protobuf", "application/octet-stream")


@schemathesis.deserializer(wire.CONTENT_TYPE)
def _value(context: Any, response: Any) -> Any:
    return plain(wire.unpack(response.content))


class Things:
    """A session, a model, a checkpoint and a sampling session of a service.

    Args:
        raw: a connection to the service.
    """

    def __init__(self, raw: Raw) -> None:
        model = raw.model()
        path = model.save("a")
        sampler, base = raw.sampler(model.session).id, raw.base_model()
        self.number = model.last + 1
        self._places: dict[str, Any] = {
            "session_id": model.session, "model_id": model.id, "run": model.id, "run_id": model.id, "kind": "weights",
            "name": "a", "sampler_id": sampler, "model": model.id,
        }  # fmt: skip
        self._fields: dict[str, Any] = {
            "session_id": model.session, "model_id": model.id, "sampling_session_id": sampler, "model": model.id,
            "path": path, "tinker_path": path, "source_path": path, "checkpoint_path": path, "base_model": base,
            "twinkle_path": path.replace("tinker://", "twinkle://"),
        }  # fmt: skip

    def place(self, case: Any) -> None:
        """Let a case ask about these, and take the next number of the model."""
        if case.method == "DELETE" or case.path.rpartition("/")[2] in _ENDING:
            return
        for name in case.path_parameters or {}:
            case.path_parameters[name] = self._places.get(name, case.path_parameters[name])
        if "seq_id" in (case.query or {}):
            case.query["seq_id"] = self.number
        if isinstance(case.body, dict):
            case.body = self._filled(case.body)

    def _filled(self, body: dict[str, Any]) -> dict[str, Any]:
        own = {**self._fields, "seq_id": self.number}
        return {
            name: own.get(name, self._filled(value) if isinstance(value, dict) else value)
            for name, value in body.items()
        }

    def heard(self, answer: httpx.Response) -> None:
        """Count the number up after an answer that says that it is used."""
        self.number += answer.status_code in (200, 202)


def operations(url: str) -> Iterator[Any]:
    """Return the operations of a service's description."""
    described = strict(httpx.get(f"{url}/openapi.json", trust_env=False).json())
    for result in schemathesis.openapi.from_dict(described).get_all_operations():
        yield result.ok()


def modes(operation: Any) -> tuple[GenerationMode, ...]:
    """Return the modes of data that an operation can have: texts in paths, and no parameters, are always valid."""
    free = operation.body or any(True for _ in operation.query)
    return MODES if free else MODES[:1]


@dataclass
class Found:
    """What came of many cases.

    Attributes:
        sent: number of cases.
        wrong: what was wrong with the answers.
        good: labels of operations that answered a case with success.
        asked: labels of all operations.
    """

    sent: int = 0
    wrong: list[str] = field(default_factory=list)
    good: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)


def strike(url: str, count: int, seed: int = 0) -> Found:
    """Send cases of every operation: valid and invalid ones, most of them about things that are there.

    Args:
        url: of the service.
        count: cases of each operation and mode.
        seed: 0 derives all from the operations alone.
    """
    found = Found()
    with Raw(url) as raw, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        things = Things(raw)
        for operation in operations(url):
            for mode in modes(operation):
                for case in _cases(operation, mode, count, seed):
                    if found.sent % 3:
                        things.place(case)
                    for name in _LONG & (case.query or {}).keys():
                        case.query[name] = 0
                    found.sent += 1
                    _send(client, things, case, found)
    return found


def _cases(operation: Any, mode: GenerationMode, count: int, seed: int) -> list[Any]:
    cases: list[Any] = []

    @settings(
        max_examples=count, derandomize=not seed, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        cases.append(case)

    run: Callable[[], None] = seeded(seed)(collect) if seed else collect
    run()
    return cases


def _send(client: httpx.Client, things: Things, case: Any, found: Found) -> None:
    asked = case.as_transport_kwargs(base_url=str(client.base_url))
    headers = {name: value for name, value in (asked.get("headers") or {}).items() if name.lower() not in _KEYS}
    try:
        request = client.build_request(
            asked["method"], asked["url"], params=asked.get("params"), headers=headers, content=asked.get("data"),
            json=asked.get("json"),
        )  # fmt: skip
        answer = client.send(request)
    except (ValueError, httpx.InvalidURL, httpx.LocalProtocolError):
        return  # no HTTP client can send it
    things.heard(answer)
    label = case.operation.label
    found.asked.add(label)
    if answer.is_success:
        found.good.add(label)
    try:
        case.validate_response(answer, checks=CHECKS)
    except FailureGroup as failures:
        shown = f"{label} with {case.meta.generation.mode} data: {answer.status_code} {answer.text[:300]}"
        found.wrong += [f"{shown}: {one}; asked with {str(asked)[:600]}" for one in failures.exceptions]
