"""A client of the Tinker protocol in plain HTTP, for what the SDK does not show or never does."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import numpy as np
import pytest

from twinkle_server.wire import tinker_pb2 as wire

PROTOBUF = "application/x-protobuf"
LORA = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
SECONDS = 60.0


class Failed(Exception):
    """A future that failed.

    Attributes:
        error: the service's words.
        category: user, server or unknown.
    """

    def __init__(self, error: str, category: str) -> None:
        super().__init__(f"{category}: {error}")
        self.error = error
        self.category = category


def datum(tokens: Sequence[int], **inputs: Any) -> wire.Datum:
    """Return a datum; integers become int64 tensors, floats float32 ones, of one dimension or two."""
    made = wire.Datum()
    made.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    for name, values in inputs.items():
        made.loss_fn_inputs[name].CopyFrom(tensor(values))
    return made


def tensor(values: Any) -> wire.Tensor:
    """Return a dense tensor of the wire."""
    array = np.asarray(values)
    whole = array.dtype.kind in "iu"
    made = wire.Tensor(dtype=wire.DTYPE_INT64 if whole else wire.DTYPE_FLOAT32, shape=array.shape)
    made.dense = array.astype("<i8" if whole else "<f4").tobytes()
    return made


def sparse(values: Any) -> wire.Tensor:
    """Return a tensor of two dimensions in CSR form; what is 0 is left out."""
    array = np.asarray(values)
    whole = array.dtype.kind in "iu"
    rows, columns = np.nonzero(array)
    made = wire.Tensor(dtype=wire.DTYPE_INT64 if whole else wire.DTYPE_FLOAT32, shape=array.shape)
    made.sparse_csr.values = array[rows, columns].astype("<i8" if whole else "<f4").tobytes()
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))])
    made.sparse_csr.crow_indices = crow.astype("<i8").tobytes()
    made.sparse_csr.col_indices = columns.astype("<i8").tobytes()
    return made


def row(tokens: Sequence[int], weights: Sequence[float] | None = None) -> wire.Datum:
    """Return a row for cross entropy: every token but the first is a target."""
    return datum(tokens[:-1], target_tokens=list(tokens[1:]), weights=list(weights or [1.0] * (len(tokens) - 1)))


def pass_body(
    model: str, number: int, data: Sequence[wire.Datum], loss: str = "cross_entropy", *, forward_only: bool = False,
    config: Mapping[str, float | str] | None = None,
) -> bytes:  # fmt: skip
    """Return the body of `forward_backward`."""
    body = wire.ForwardBackwardRequest(
        model_id=model, seq_id=number, data=data, loss_fn=loss, forward_only=forward_only
    )
    for name, value in (config or {}).items():
        if isinstance(value, str):
            body.loss_fn_config_v2[name].text = value
        else:
            body.loss_fn_config[name] = value
            body.loss_fn_config_v2[name].number = value
    return body.SerializeToString()


def arrays(output: wire.ForwardBackwardOutput, name: str = "logprobs") -> list[np.ndarray[Any, Any]]:
    """Return one array a datum of a pass's output."""
    found: list[np.ndarray[Any, Any]] = []
    for record in output.loss_fn_outputs:
        batch = record.fields[name]
        kind = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}[batch.dtype]
        ends = np.frombuffer(batch.offsets, "<i8")
        for start, end in itertools.pairwise(ends):
            found.append(np.frombuffer(batch.data[start:end], kind).reshape(-1, *batch.trailing_shape))
    return found


class Raw:
    """One key's connection.

    Args:
        url: of the service.
        key: sent as `X-API-Key`; None sends none.
    """

    def __init__(self, url: str, key: str | None = "tml-local") -> None:
        headers = {"X-API-Key": key} if key else {}
        self.url = url
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False, timeout=SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def send(self, path: str, body: Any = None, method: str = "POST", **options: Any) -> httpx.Response:
        """Send JSON, or bytes as a protobuf, and return whatever is answered."""
        if isinstance(body, bytes):
            headers = {"Content-Type": PROTOBUF, **options.pop("headers", {})}
            return self.http.request(method, path, content=body, headers=headers, **options)
        if body is not None:
            options["json"] = body
        return self.http.request(method, path, **options)

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """Send, demand 200, and return the JSON."""
        return _good(self.send(path, {} if body is None else body))

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Ask, demand 200, and return the JSON."""
        return _good(self.http.get(path, params=query))

    def refusal(self, path: str, body: Any) -> str:
        """Send what has a number that must be used up, demand that it fails as the user's fault, and return the words.

        Such a request is accepted and its future fails: the numbers behind it go on.
        """
        with pytest.raises(Failed) as failed:
            self.result(self.post(path, body)["request_id"])
        assert failed.value.category == "user"
        return failed.value.error

    def figures(self) -> dict[str, float]:
        """Return the service's figures for Prometheus, by name and labels as they stand there."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=SECONDS).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def status(self) -> dict[str, Any]:
        """Return what the service says of itself."""
        return _good(httpx.get(f"{self.url}/twinkle/status", trust_env=False, timeout=SECONDS))

    def poll(self, request: str, proto: bool = False) -> httpx.Response:
        """Ask once for a future's result."""
        headers = {"Accept": PROTOBUF if proto else "application/json"}
        return self.send("/retrieve_future", {"request_id": request, "allow_metadata_only": False}, headers=headers)

    def result(self, request: str, kind: str = "json", polls: int = 6) -> Any:
        """Wait for a future.

        Args:
            request: its id.
            kind: of the result: "json", "pass" or "sample".
            polls: after which it is taken for lost; each holds up to half a minute.

        Raises:
            Failed: it failed.
        """
        for _ in range(polls):
            answer = self.poll(request, proto=kind != "json")
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, (answer.status_code, answer.text[:500])
            if answer.headers["content-type"].startswith(PROTOBUF):
                made = wire.SampleResponse() if kind == "sample" else wire.ForwardBackwardOutput()
                made.ParseFromString(answer.content)
                return made
            found = answer.json()
            if found.get("type") == "try_again":
                continue
            if "error" in found:
                raise Failed(found["error"], found["category"])
            return found
        raise AssertionError(f"the future {request} was not over after {polls} polls")

    def session(self, **fields: Any) -> str:
        """Open a session and return its id."""
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session", **fields}
        return str(self.post("/create_session", body)["session_id"])

    def base_model(self) -> str:
        """Return the name of the model that is served."""
        return str(self.get("/get_server_capabilities")["supported_models"][0]["model_name"])

    def create_body(self, session: str, number: int = 0, **fields: Any) -> dict[str, Any]:
        """Return the body of `create_model`."""
        lora = {**LORA, **fields.pop("lora", {})}
        base = fields.pop("base_model", None) or self.base_model()
        body = {"session_id": session, "model_seq_id": number, "base_model": base, "lora_config": lora}
        return {**body, "type": "create_model", **fields}

    def model(self, session: str | None = None, number: int = 0, **fields: Any) -> "RawModel":
        """Create a model, wait for it, and return it."""
        session = session or self.session()
        request = self.post("/create_model", self.create_body(session, number, **fields))["request_id"]
        return RawModel(self, str(self.result(request)["model_id"]))

    def load(self, path: str, session: str | None = None, number: int = 0, optimizer: bool = True) -> "RawModel":
        """Create a model from a checkpoint, wait for it, and return it."""
        session = session or self.session()
        body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        self.result(self.post("/load_weights", {**body, "type": "load_weights"})["request_id"])
        return RawModel(self, f"{session}:train:{number}")

    def sampler(self, session: str | None = None, number: int = 0, **source: str) -> "RawSampler":
        """Open a sampling session on `model_path=` or on the base model."""
        session = session or self.session()
        source = source or {"base_model": self.base_model()}
        body = {"session_id": session, "sampling_session_seq_id": number, "type": "create_sampling_session", **source}
        return RawSampler(self, str(self.post("/create_sampling_session", body)["sampling_session_id"]))


@dataclass
class RawModel:
    """One model, with the next sequence number; methods whose name begins with `submit` return a future's id."""

    raw: Raw
    id: str
    last: int = 0

    def next(self) -> int:
        """Take the next sequence number."""
        self.last += 1
        return self.last

    @property
    def session(self) -> str:
        """Return the session that it belongs to."""
        return self.id.partition(":")[0]

    def submit_pass(self, data: Sequence[wire.Datum], loss: str = "cross_entropy", **options: Any) -> str:
        """Submit a pass."""
        number = options.pop("number", None) or self.next()
        return str(
            _good(self.raw.send("/forward_backward", pass_body(self.id, number, data, loss, **options)))["request_id"]
        )

    def forward_backward(self, data: Sequence[wire.Datum], loss: str = "cross_entropy", **options: Any) -> Any:
        """Do a pass that adds gradients, and return its output."""
        return self.raw.result(self.submit_pass(data, loss, **options), "pass")

    def forward(self, data: Sequence[wire.Datum], loss: str = "cross_entropy", **options: Any) -> Any:
        """Do a pass that changes nothing, and return its output."""
        return self.forward_backward(data, loss, forward_only=True, **options)

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the log-probability of every token but the first."""
        return arrays(self.forward([row(tokens)]))[0]

    def submit(self, path: str, /, number: int | None = None, **fields: Any) -> str:
        """Submit an operation whose body is JSON."""
        body = {"model_id": self.id, "seq_id": number or self.next(), "type": path, **fields}
        return str(self.raw.post(f"/{path}", body)["request_id"])

    def step(self, **adam: float) -> dict[str, Any]:
        """Take an optimizer step and return its answer."""
        found: dict[str, Any] = self.raw.result(self.submit("optim_step", adam_params=adam))
        return found

    def save(self, name: str, **fields: Any) -> str:
        """Save weights and optimizer and return the path."""
        return str(self.raw.result(self.submit("save_weights", path=name, **fields))["path"])

    def save_sampler(self, name: str, **fields: Any) -> str:
        """Save weights for sampling under a name and return the path."""
        return str(
            self.raw.result(self.submit("save_weights_for_sampler", path=name, kind="snapshot", **fields))["path"]
        )

    def save_external(self, name: str) -> str:
        """Save weights as standard files and return the path."""
        return str(self.raw.result(self.submit("save_weights_external", path=name))["path"])

    def freeze(self, number: int, kind: str = "snapshot") -> "RawSampler":
        """Save weights for a sampling session that has no name, and return that session."""
        request = self.submit("save_weights_for_sampler", sampling_session_seq_id=number, kind=kind)
        return RawSampler(self.raw, str(self.raw.result(request)["sampling_session_id"]))

    def train(self, tokens: Sequence[int], steps: int = 1, lr: float = 1e-2) -> None:
        """Take steps on one row."""
        for _ in range(steps):
            self.forward_backward([row(tokens)])
            self.step(learning_rate=lr)


@dataclass
class RawSampler:
    """One sampling session."""

    raw: Raw
    id: str
    numbers: Any = field(default_factory=itertools.count)

    def body(self, prompt: Sequence[int], count: int = 1, number: int | None = None, **fields: Any) -> dict[str, Any]:
        """Return the body of `asample`; sampling parameters go in `params`."""
        return {
            "num_samples": count,
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "sampling_params": {"temperature": 1.0, "top_k": -1, "top_p": 1.0, **fields.pop("params", {})},
            "sampling_session_id": self.id,
            "seq_id": next(self.numbers) if number is None else number,
            "type": "sample",
            **fields,
        }

    def submit(self, prompt: Sequence[int], count: int = 1, **fields: Any) -> dict[str, Any]:
        """Submit and return the promise."""
        return self.raw.post("/asample", self.body(prompt, count, **fields))

    def sample(self, prompt: Sequence[int], count: int = 1, **fields: Any) -> Any:
        """Sample and return the protobuf answer."""
        return self.raw.result(str(self.submit(prompt, count, **fields)["request_id"]), "sample")

    def greedy(self, prompt: Sequence[int], tokens: int = 8) -> list[int]:
        """Return the tokens of one greedy sample that no end-of-sequence token stops."""
        answer = self.sample(prompt, params={"temperature": 0.0, "max_tokens": tokens, "stop": []})
        return tokens_of(answer.sequences[0])

    def scores(self, prompt: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the log-probability of every token of a prompt, the first NaN."""
        answer = self.sample(prompt, params={"max_tokens": 1}, prompt_logprobs=True)
        return np.frombuffer(answer.prompt_logprobs, "<f4")


def tokens_of(sequence: wire.SampledSequence) -> list[int]:
    """Return the tokens of a sampled sequence."""
    return [int(token) for token in np.frombuffer(sequence.tokens, "<i4")]


def logprobs_of(sequence: wire.SampledSequence) -> np.ndarray[Any, Any]:
    """Return the log-probabilities of a sampled sequence."""
    return np.frombuffer(sequence.logprobs, "<f4")


def _good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, (str(answer.request.url), answer.status_code, answer.text[:500])
    found: dict[str, Any] = answer.json()
    return found
