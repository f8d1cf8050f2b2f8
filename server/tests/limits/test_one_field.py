"""Bodies that are valid but for one field: no 5xx, no failure that is the service's, and the next valid one works."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from server_fuzz import LORA, PROMPT, SAMPLING, TARGETS, routes
from server_inside import PROTOBUF, Inside, inside
from server_mutations import json_mutations, mutated_json, mutated_proto, proto_mutations
from server_raw import datum, pass_body, row, sparse

from twinkle.testing import tiny_model
from twinkle_server.settings import Limits, Settings, Times
from twinkle_server.tenancy import quotas
from twinkle_server.wire import tinker_pb2 as wire

Made = tuple[str, Any]
"""A path, and a body: JSON, or a message; `None` is none."""
_SEGMENTS = ("none", "..", "%2e%2e", "%00", "%ed%a0%80", "é", "x" * 300, "a%2fb", "%f0%9f%98%80", "9" * 400, "-1")
_QUERIES = (
    "",
    "0",
    "-1",
    "x",
    "9" * 400,
    "nan",
    "1e400",
    "2026-01-01",
    "0001-01-01",
    "9999-12-31T23:59:59+14:00",
    "\0",
)
_ROW = {
    "model_input": PROMPT,
    "loss_fn_inputs": {
        "target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 0.5, -1.0], "dtype": "float32", "shape": [3]},
    },
}
_SCORES = {"logprobs": [-1.0, -2.0], "advantages": [1.0, -0.5]}


@dataclass
class Case:
    """A kind of request.

    Attributes:
        name: of it.
        make: returns a valid one.
        method: of HTTP.
        query: names of query parameters.
        again: a valid one is sent after each that is not.
    """

    name: str
    make: Callable[[], Awaitable[Made]]
    method: str = "POST"
    query: tuple[str, ...] = ()
    again: bool = True


@dataclass
class Valid:
    """Valid requests of every route, about a session, a model, a checkpoint and a sampling session that are there."""

    inside: Inside
    model: str = ""
    session: str = ""
    sampler: str = ""
    future: str = ""
    loss: str = ""
    last: int = 0
    created: list[str] = field(default_factory=list)

    async def begin(self) -> "Valid":
        """Make what the requests are about."""
        self.session = (await self.inside.post("/create_session"))["session_id"]
        self.model = await self.new_model()
        saved = {"model_id": self.model, "path": "a"}
        self.last = 3
        made = await self.inside.done("/save_weights", {**saved, "seq_id": 1})
        self.future = made["request_id"]
        await self.inside.done("/save_weights_external", {**saved, "seq_id": 2})
        await self.inside.done("/save_weights", {"model_id": self.model, "path": "gone", "seq_id": 3})
        self.sampler = (await self.inside.post("/create_sampling_session", **self.sampling_session()))[
            "sampling_session_id"
        ]
        path, body = await self.custom_loss()
        self.loss = (await self.inside.done(path, body))["loss_id"]
        return self

    async def new_model(self) -> str:
        """Make a model."""
        body = (await self.create_model())[1]
        made = await self.inside.done("/create_model", body)
        return str(made["model_id"])

    def number(self) -> int:
        """Return a number that no model, sampling session or sample had."""
        return next(self.inside.numbers)

    def _base(self) -> str:
        return str(self.inside.service.info.name)

    def sampling_session(self) -> dict[str, Any]:
        """Return the body of a new sampling session."""
        return {"session_id": self.session, "sampling_session_seq_id": self.number(), "base_model": self._base()}

    async def create_model(self) -> Made:
        """Make the body of a new model."""
        body = {"session_id": self.session, "model_seq_id": self.number(), "base_model": self._base()}
        return "/create_model", {**body, "lora_config": {**LORA, "rank": 2}, "user_metadata": {"a": "b"}}

    async def custom_loss(self) -> Made:
        """Make the body of a loss graph."""
        start = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}
        part = {"op": "call_function", "name": "part", "target": "operator.getitem", "args": [
            {"ref": "logprobs"}, {"tuple": [{"slice": [None, 2, None]}]}], "kwargs": {}}  # fmt: skip
        total = {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "part"}], "kwargs": {"dim": 0}}
        last = {"tuple": [{"ref": "total"}, {"dict": {"custom/x:sum": {"ref": "total"}}}]}
        end = {"op": "output", "name": "output", "target": "output", "args": [last], "kwargs": {}}
        inputs = [{"name": "logprobs", "rank": 1}]
        graph = {"format": 1, "nodes": [start, part, total, end]}
        body = {"session_id": self.session, "custom_loss_seq_id": 0, "name": "x", "inputs": inputs, "graph": graph}
        return "/create_custom_loss", body

    def numbered(self, path: str, /, **body: Any) -> Case:
        """Return a request that takes the model's next number."""

        async def make() -> Made:
            return path, {"model_id": self.model, "seq_id": self.last + 1, **body}

        return Case(path, make)

    def plain(self, path: str, name: str = "", /, *, method: str = "POST", **body: Any) -> Case:
        """Return a request that has no number."""

        async def make() -> Made:
            return path, body

        return Case(name or path, make, method)

    def fresh(self, name: str, make: Callable[[], Coroutine[Any, Any, Made]]) -> Case:
        """Return a request about something that is made for it."""
        return Case(name, make)

    def passes(self) -> list[Case]:
        """Return passes in protobuf, of every loss and form of arrays."""
        thin = datum([5, 6])
        thin.loss_fn_inputs["target_tokens"].CopyFrom(sparse([[0, 2], [3, 0]]))
        thin.loss_fn_inputs["weights"].CopyFrom(sparse([[0.0, 0.5], [1.0, 0.0]]))
        wide = datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[0.5, 0.5], [1.0, 0.0]])
        scored = datum([5, 6], target_tokens=[2, 3], **_SCORES)
        rows: dict[str, tuple[wire.Datum, dict[str, float | str]]] = {
            "cross_entropy": (row([1, 2, 3, 4]), {}),
            "importance_sampling": (scored, {}),
            "ppo": (scored, {"clip_low_threshold": 0.5}),
            "cispo": (scored, {}),
            "dro": (scored, {"beta": 1.0}),
            "gspo": (datum([5, 6], target_tokens=[2, 3], sequence_ratio_mask=[1.0, 1.0], **_SCORES), {}),
            "custom": (row([1, 2, 3, 4]), {"loss_id": self.loss}),
        }
        named = [(loss, loss, *what) for loss, what in rows.items()]
        named += [("sparse", "cross_entropy", thin, {}), ("two dimensions", "cross_entropy", wide, {})]

        def case(name: str, loss: str, data: wire.Datum, config: dict[str, float | str]) -> Case:
            async def make() -> Made:
                body = pass_body(self.model, self.last + 1, [data, data], loss, config=config)
                return "/forward_backward", wire.ForwardBackwardRequest.FromString(body)

            return Case(f"pass {name}", make)

        return [case(*what) for what in named]

    def cases(self) -> list[Case]:
        """Return requests of all routes that have a body."""
        path = f"tinker://{self.model}/weights/a"
        config = {"sdk_version": "0.38.0"}
        event = {"event": "GENERIC_EVENT", "event_id": "1", "event_name": "x", "event_data": {}, "severity": "INFO"}
        passed = {"data": [_ROW, _ROW], "loss_fn": "cross_entropy", "loss_fn_config": {}}
        run = f"/training_runs/{self.model}/checkpoints/weights/a"
        source = {"source_path": path, "session_id": self.session, "ttl_seconds": 3600}
        adam = {
            "learning_rate": 1e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        }
        target = {"type": "sampling_session", "sampling_session_id": self.sampler, "cloned_sampler_id": 0}

        async def load_new() -> Made:
            body = {"session_id": self.session, "model_seq_id": self.number(), "base_model": self._base()}
            return "/load_weights", {**body, "path": path, "optimizer": True, "user_metadata": {"a": "b"}}

        async def sampling_session() -> Made:
            return "/create_sampling_session", self.sampling_session()

        async def sample() -> Made:
            body = {"num_samples": 2, "prompt": PROMPT, "sampling_params": SAMPLING, "prompt_logprobs": True}
            scored = {"topk_prompt_logprobs": 2, "target_prompt_logprobs": TARGETS, "topk_sample_logprobs": 1}
            other = {"prompt_alt_tokens_k": 1, "sampling_session_id": self.sampler, "seq_id": self.number()}
            return "/asample", {**body, **scored, **other}

        async def copied() -> Made:
            return "/copy_weights", {**source, "model_seq_id": self.number()}

        async def unload() -> Made:
            return "/unload_model", {"model_id": await self.new_model()}

        async def finish() -> Made:
            session = (await self.inside.post("/create_session"))["session_id"]
            return f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": "x"}

        async def inflight() -> Made:
            body = {"model_id": self.model, "seq_id": self.last + 1, "kind": "inflight"}
            return "/save_weights_for_sampler", {**body, "sampling_session_seq_id": self.number(), "ttl_seconds": 3600}

        async def for_sampling() -> Made:
            body = {"model_id": self.model, "seq_id": self.last + 1, "path": f"b{self.number()}", "kind": "snapshot"}
            return "/save_weights_for_sampler", {**body, "ttl_seconds": 3600}

        plain, numbered = self.plain, self.numbered
        kept = {"path": "a", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {"a": "b"}}
        return [
            *self.passes(),
            numbered("/forward_backward", forward_backward_input=passed),
            numbered("/forward", forward_input=passed),
            numbered("/optim_step", adam_params=adam),
            numbered("/save_weights", **kept),
            self.fresh("save_weights_for_sampler", for_sampling),
            numbered("/save_weights_external", path="a", overwrite=True),
            numbered("/load_weights", path=path, optimizer=True),
            self.fresh("inflight", inflight),
            self.fresh("create_model", self.create_model),
            self.fresh("load_weights into a new model", load_new),
            self.fresh("create_custom_loss", self.custom_loss),
            self.fresh("create_sampling_session", sampling_session),
            self.fresh("asample", sample),
            self.fresh("copy_weights", copied),
            self.fresh("unload_model", unload),
            self.fresh("finish", finish),
            plain("/client/config", **config),
            plain("/client/dynamic_config", **config),
            Case("/auth/token", plain("/auth/token").make, again=False),
            plain("/telemetry", events=[event], platform="x", session_id=self.session, process_uuid="x", **config),
            plain("/create_session", tags=["a"], user_metadata={"a": "b"}, project_id="p", display_name="x", **config),
            plain("/session_heartbeat", session_id=self.session),
            plain("/sessions/search", user_metadata={"a": "b"}, owner={"type": "own"}, limit=50, project_ids=["p"],
                  display_name="x", statuses=[{"type": "client_finished", "reasons": ["success"]}],
                  cursor={"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "x"}),
            plain(f"/sessions/{self.session}/project", "project", method="PUT", project_id="p"),
            plain("/get_info", model_id=self.model),
            plain("/join_sampling_session", sampling_session_id=self.sampler),
            plain("/retrieve_future", request_id=self.future, allow_metadata_only=True),
            plain("/retrieve_future", "loss future", request_id=self.loss),
            plain("/cancel_future", request_id=self.future),
            plain("/retrieve_futures", target=target, prev_cursor=0, timeout=0.0, retrieved_request_ids=[self.future]),
            plain(f"{run}/ttl", "ttl", method="PUT", ttl_seconds=3600),
            plain("/weights_info", tinker_path=path),
        ]  # fmt: skip

    def lookups(self) -> list[Case]:
        """Return requests without a body, whose path or query is what can be wrong."""
        ids = {
            "session_id": self.session,
            "run": self.model,
            "kind": "weights",
            "name": "a",
            "sampler_id": self.sampler,
        }

        def case(method: str, path: str) -> Case:
            async def make() -> Made:
                names = ids if method == "GET" else {**ids, "name": "gone"}
                return path.removeprefix("/api/v1").format(**names), None

            query = ("limit", "offset", "day", "starting_on", "ending_before", "project_id")
            fails = "external_weights_urls" in path or "usage/events" in path
            return Case(f"{method} {path}", make, method, query, again=method == "GET" and not fails)

        found = [(method, path) for method, path in routes() if path.startswith("/api/v1/")]
        return [case(method, path) for method, path in found if method in ("GET", "DELETE")]


@dataclass(frozen=True)
class Change:
    """A body that is valid but for one field."""

    case: Case
    text: str
    apply: Callable[[Made], tuple[str, bytes | None]]


async def changes(cases: list[Case]) -> list[Change]:
    """Return all of all cases."""
    found: list[Change] = []
    for case in cases:
        path, body = await case.make()
        if body is None:
            found += [
                _of_path(case, path, place, segment) for place in range(1, path.count("/") + 1) for segment in _SEGMENTS
            ]
            found += [_of_query(case, name, value) for name in case.query for value in _QUERIES]
        elif isinstance(body, dict):
            found += [_of_json(case, kind, place) for kind, place in json_mutations(body)]
        else:
            found += [_of_proto(case, *what) for what in proto_mutations(body)]
            found.append(Change(case, "not UTF-8", lambda made: (made[0], _not_utf8(made[1].SerializeToString()))))
    return found


def _not_utf8(data: bytes) -> bytes:
    return data.replace(b"target_tokens", b"target_token\xff").replace(b"cross_entropy", b"cross_entrop\xff")


def _of_json(case: Case, kind: str, place: tuple[Any, ...]) -> Change:
    return Change(case, f"{place} {kind}", lambda made: (made[0], mutated_json(made[1], kind, place)))


def _of_proto(case: Case, place: tuple[Any, ...], action: str, value: Any) -> Change:
    return Change(
        case, f"{place} {action} {value!r:.60}", lambda made: (made[0], mutated_proto(made[1], place, action, value))
    )


def _of_path(case: Case, path: str, place: int, segment: str) -> Change:
    parts = path.split("/")
    parts[place] = segment
    return Change(case, f"segment {place} {segment:.40}", lambda made: ("/".join(parts), None))


def _of_query(case: Case, name: str, value: str) -> Change:
    return Change(case, f"{name}={value:.40}", lambda made: (f"{made[0]}?{name}={quote(value)}", None))


class Sender:
    """Sends changed and valid requests, and checks what is answered."""

    def __init__(self, valid: Valid) -> None:
        self.valid, self.inside = valid, valid.inside
        self.problems: list[str] = []
        self.sent = 0

    async def strike(self, change: Change) -> None:
        """Send one changed request, and a valid one after it."""
        case = change.case
        self.sent += 1
        try:
            made = await case.make()
            path, body = change.apply(made)
            headers = {"Content-Type": "application/json" if isinstance(made[1], dict) else PROTOBUF}
            answer = await self.inside.client.request(case.method, path, content=body, headers=headers)
            await self._check(change, answer)
            if case.again:
                await self.works(case)
        except (AssertionError, httpx.HTTPError, ValueError) as error:
            self.problems.append(f"{case.name}: {change.text}: {type(error).__name__}: {str(error)[:600]}")

    async def _check(self, change: Change, answer: httpx.Response) -> None:
        assert answer.status_code < 500, (answer.status_code, answer.text)
        if answer.status_code >= 400:
            detail = answer.json()["detail"]
            assert isinstance(detail, str), detail
            assert detail, answer.status_code
            assert "Traceback" not in detail
            assert len(answer.content) < 20_000
            return
        await self._settled(answer)

    async def _settled(self, answer: httpx.Response) -> dict[str, Any]:
        """Wait for the future of an answer, if it has one; what fails must be the client's fault."""
        said = answer.json() if answer.headers.get("content-type") == "application/json" else {}
        if not isinstance(said, dict) or "request_id" not in said or said.get("type") == "try_again":
            return {}
        accept = PROTOBUF if self.sent % 2 else "application/json"
        found = await self.inside.result(said["request_id"], accept)
        assert found.get("category", "user") == "user", found
        if "error" in found:
            assert isinstance(found["error"], str)
            assert found["error"]
        return found

    async def works(self, case: Case) -> None:
        """Demand that a valid request works; the changed one may have used its number up."""
        for _ in range(2):
            path, body = await case.make()
            content = body if isinstance(body, dict) or body is None else body.SerializeToString()
            answer = await self.inside.send(path, content, method=case.method)
            if answer.status_code != 409:
                break
            self.valid.last += 1
        assert answer.status_code < 400, ("a valid request", answer.status_code, answer.text)
        found = await self._settled(answer)
        assert "error" not in found, ("a valid request", found)
        if (isinstance(body, dict) and "seq_id" in body and "model_id" in body) or isinstance(
            body, wire.ForwardBackwardRequest
        ):
            self.valid.last += 1
        model = answer.json().get("model_id") if answer.headers["content-type"] == "application/json" else None
        if case.name in ("create_model", "load_weights into a new model") and model:
            await self.inside.done("/unload_model", {"model_id": model})


async def bystander(inside: Inside) -> Callable[[], Awaitable[Any]]:
    """Make a model that was trained, and return what shows its state."""
    valid = await Valid(inside).begin()
    tokens = [row([7, 8, 9, 10])]

    async def state() -> Any:
        sent = await inside.send("/forward_backward", pass_body(valid.model, valid.last + 1, tokens, forward_only=True))
        valid.last += 1
        found = await inside.result(sent.json()["request_id"])
        return found["loss_fn_outputs"][0]["logprobs"]["data"]

    for number in (valid.last + 1, valid.last + 3):
        answer = await inside.send("/forward_backward", pass_body(valid.model, number, tokens))
        await inside.result(answer.json()["request_id"])
        step = {"model_id": valid.model, "seq_id": number + 1, "adam_params": {"learning_rate": 1e-2}}
        await inside.done("/optim_step", step)
    valid.last += 4
    return state


async def strike(folder: Path, count: int | None, seed: int) -> None:
    """Send so many changed requests, drawn from all of all routes, and demand that each was answered well."""
    base = tiny_model(folder / "base", "qwen3", initializer_range=0.1)
    times = Times(poll=10.0, gap_pause=0.01, gap_fail=0.05, session=3600.0, resend=0.0)
    settings = Settings(
        str(base), folder / "data", auth=False, custom_losses=True, times=times, limits=Limits(body_bytes=2**20)
    )
    async with inside(settings) as made:
        state = await bystander(made)
        before = await state()
        valid = await Valid(made).begin()
        every = await changes([*valid.cases(), *valid.lookups()])
        chosen = random.Random(seed).sample(every, count) if count is not None and count < len(every) else every
        sender = Sender(valid)
        for case in {change.case.name: change.case for change in every}.values():
            if case.again:
                await sender.works(case)
        for change in chosen:
            await sender.strike(change)
        problems = sender.problems
        assert not problems, f"{len(problems)} of {sender.sent}:\n" + "\n".join(problems[:40])
        np.testing.assert_array_equal(await state(), before)


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one tenant be refused as often as there are bodies."""
    monkeypatch.setattr(quotas, "_REFUSALS_AT_ONCE", 1e9)


@pytest.mark.full
def test_a_body_that_is_wrong_in_one_field_hurts_nobody(tmp_path: Path) -> None:
    asyncio.run(strike(tmp_path, 150, 1))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_ten_thousand_of_them_do_not_either(tmp_path: Path, seed: int) -> None:
    asyncio.run(strike(tmp_path, 10_000, seed))
