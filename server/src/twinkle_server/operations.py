"""The data model of the service: operations in queues, each with one outcome.

A **queue** belongs to a model or to a sampling session. Operations of a model run in the order of their sequence
numbers, without gaps, whatever the order of arrival; creation is number 0. In the queue of a sampling session, numbers
only identify retries.

Payloads of operations other than passes (`Create`, `Load`, `Save`, ...) are written to the log once and replayed
unchanged. Everything that must be the same in a replay is decided before: the seed, the folder, the checkpoint that a
name refers to.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self

import orjson

from twinkle_server.errors import BadRequest

Kind = Literal[
    "create",  # a new adapter, optionally from a checkpoint ("source" in its payload)
    "forward",
    "forward_backward",
    "optim_step",
    "save",  # a checkpoint of any kind: "kind" in its payload
    "load",  # a checkpoint into an existing model
    "unload",
    "sample",
    "native_pass",  # native calls: their payloads are those of `engine.native.calls`
    "native_step",
    "native",
]
PASSES: frozenset[Kind] = frozenset({"forward", "forward_backward", "native_pass"})
"""Kinds that share passes through the model; every other kind is a barrier of its queue."""
STEPS: frozenset[Kind] = frozenset({"optim_step", "native_step"})
"""Kinds that share optimizer steps."""
NATIVE: frozenset[Kind] = frozenset({"native_pass", "native_step", "native"})
"""Kinds whose results are frames of the native protocol."""
Category = Literal["user", "server", "unknown"]
Status = Literal["pending", "done", "failed", "cancelled"]
EMBEDDING: Final = "embedding"
"""The task of models that make vectors of texts."""
LOST = b"lost"
"""`Submission.original` of a number that was given up: a later request with this number gets that failure."""


def turn_name(kind: str) -> str:
    """Return the name of a turn of the engine in figures; kinds that run together have the same."""
    if kind in PASSES:
        return "pass"
    return "optim_step" if kind in STEPS else kind


@dataclass(frozen=True, slots=True)
class Submission:
    """An operation to be submitted.

    Attributes:
        tenant: its owner.
        queue_id: the model or sampling session.
        kind: of the operation.
        payload: parameters as bytes that never change: a `ForwardBackwardRequest` of `wire` for passes, a frame for
            native calls, JSON for other kinds (see below). Its hash distinguishes a retry from another request with the
            same number.
        number: sequence number in the queue; None takes the next one (legacy unload only).
        tokens: cost in tokens of the model.
        refusal: why it fails without running; its number is used up.
        original: the original request if `payload` contains values that differ between retries (a folder, a seed); its
            hash is then used instead of that of `payload`.
    """

    tenant: str
    queue_id: str
    kind: Kind
    payload: bytes
    number: int | None
    tokens: int = 0
    refusal: str | None = None
    original: bytes | None = None

    @property
    def ordered(self) -> bool:
        """Whether it waits for earlier numbers."""
        return self.kind != "sample"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of a submission, which is durable.

    Attributes:
        request: id of its future.
        fresh: False for a retry.
    """

    request: str
    fresh: bool


@dataclass(slots=True)
class Operation:
    """An operation of the log.

    Attributes:
        id: row id, which increases with time.
        request: id of its future.
        tenant: its owner.
        queue_id: the model or sampling session.
        number: sequence number in the queue.
        kind: of the operation.
        tokens: cost in tokens of the model.
        status: pending, or how it ended.
        attempts: number of deaths of the engine while it ran.
        payload: None if it is not in memory (see `Journal.payload`).
        http_request: id of its HTTP request, for the log; None after a restart.
    """

    id: int
    request: str
    tenant: str
    queue_id: str
    number: int
    kind: Kind
    tokens: int
    status: Status = "pending"
    attempts: int = 0
    payload: bytes | None = None
    http_request: str | None = None

    @property
    def ordered(self) -> bool:
        """Whether it waits for earlier numbers."""
        return self.kind != "sample"


@dataclass(slots=True)
class Outcome:
    """How an operation ended.

    Attributes:
        operation: row id of the operation.
        result: of its future: a message of `wire` for passes and samples, JSON for other kinds; None after a failure.
        error: why it failed, for the client.
        category: who caused the failure.
        cancelled: whether it was cancelled.
        composition: composition of its passes, for a replay; None if a replay does not need it.
        in_transaction: called in the transaction of the result if the operation is done, for example to write the
            row of a checkpoint. If it raises `ServiceError`, the operation fails with its message and the category
            "user".
        figures: JSON text with figures of a training operation, see `engine.recording.Recorded`; written if it is done.
    """

    operation: int
    result: bytes | None = None
    error: str | None = None
    category: Category = "server"
    cancelled: bool = False
    composition: str | None = None
    in_transaction: Callable[[Any], None] | None = None
    figures: str | None = None


@dataclass(frozen=True, slots=True)
class Future:
    """The state of a future.

    Attributes:
        kind: of its operation, which determines the format of `result`.
        status: of its operation.
        result: see `Outcome`.
        error: see `Outcome`.
        category: see `Outcome`.
        queue_id: of its operation.
    """

    kind: Kind
    status: Status
    queue_id: str
    result: bytes | None = None
    error: str | None = None
    category: Category = "server"


@dataclass(slots=True)
class Snapshot:
    """The complete state of a model after an operation, in a folder.

    Attributes:
        queue_id: the model.
        number: of the last operation that it contains, including failed ones.
        folder: relative to the data folder.
        digest: SHA-256 of its manifest.
        size: in bytes.
    """

    queue_id: str
    number: int
    folder: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model, as reported by the engine.

    Attributes:
        name: its name for clients.
        context: maximum number of tokens of a row.
        vocabulary: number of token ids.
        architecture: of the model class.
        tokenizer: where clients find its tokenizer; "" if there is none.
        losses: names of losses that Tinker requests may use.
        own_losses: names of losses that `set_loss` of a native model may use.
        paths: results of the check of each fast path of training and sampling: `path`, `exact`, `reason`, `summary`,
            and the measured numbers.
    """

    name: str
    context: int
    vocabulary: int
    architecture: str = ""
    tokenizer: str = ""
    losses: tuple[str, ...] = field(default=())
    own_losses: tuple[str, ...] = field(default=())
    paths: tuple[Mapping[str, Any], ...] = field(default=())


class _Payload:
    def dump(self) -> bytes:
        """Serialize the payload for the log.

        Raises:
            BadRequest: JSON cannot represent a value, for example an integer beyond 64 bits.
        """
        try:
            return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS)  # type: ignore[call-overload]
        except TypeError as error:
            raise BadRequest(f"cannot store a value of the request: {error}") from error

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse bytes of the log."""
        return cls(**orjson.loads(data))


@dataclass(slots=True)
class Create(_Payload):
    """A new adapter.

    Attributes:
        rank: of all its matrices that `rank_pattern` does not name; 0 trains all parameters of the base model
            (`native` only).
        seed: of the initial weights.
        train_attn: whether to adapt attention layers.
        train_mlp: whether to adapt MLP layers.
        train_unembed: whether to adapt the output head.
        source: folder of the initial checkpoint, relative to the data folder; None for fresh weights.
        optimizer: whether to load the optimizer state, too.
        path: `tinker://` path of that checkpoint.
        alpha: the low-rank term is scaled by `alpha / rank`.
        dropout: probability, applied to the input of the low-rank term.
        targets: layers to adapt instead of those of the switches: names, or a pattern; see `AdapterSpec`.
        native: whether the model starts with the components of a local model.
        accumulation: number of backward calls for each step of a native model.
        rank_pattern: ranks of single layers, pairs of a pattern and a rank in order; see `AdapterSpec`.
        alpha_pattern: `alpha` of single layers, in the same way.
        exclude: layers of `targets` that are not adapted.
        rslora: scale the low-rank term by `alpha / sqrt(rank)`.
        init: kind of the first weights; see `AdapterSpec`.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    source: str | None = None
    optimizer: bool = False
    path: str | None = None
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[str] | str | None = None
    native: bool = False
    accumulation: int = 1
    rank_pattern: list[tuple[str, int]] | None = None
    alpha_pattern: list[tuple[str, float]] | None = None
    exclude: list[str] | str | None = None
    rslora: bool = False
    init: Literal["kaiming", "gaussian", "random"] = "kaiming"


@dataclass(slots=True)
class OptimStep(_Payload):
    """An optimizer step; see `tinker.AdamParams` for the defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(slots=True)
class Save(_Payload):
    """A checkpoint to be saved.

    Attributes:
        folder: relative to the data folder; new for every request.
        kind: "weights" (with optimizer), "sampler_weights" or "external_weights".
        name: last part of its path; None if only a sampling session uses it.
        overwrite: whether to replace a checkpoint of the same name.
        ttl: lifetime in seconds; None is unlimited.
        metadata: of the user.
        sampler: id of the sampling session to create.
        inflight: whether this session follows all later inflight saves of the model.
        recipients: age recipients for whom every file is encrypted; None disables encryption.
        native: whether a checkpoint for training also holds the components, and the weights in PEFT's format.
        optimizer: whether a native checkpoint for training holds the optimizer.
        consumed: number of samples that a native client has consumed.
    """

    folder: str
    kind: str
    name: str | None = None
    overwrite: bool = False
    ttl: int | None = None
    metadata: dict[str, str] | None = None
    sampler: str | None = None
    inflight: bool = False
    recipients: list[str] | None = None
    native: bool = False
    optimizer: bool = True
    consumed: int = 0


@dataclass(slots=True)
class Load(_Payload):
    """A checkpoint to be loaded into a model.

    Attributes:
        source: its folder, relative to the data folder.
        path: its `tinker://` path.
        optimizer: whether to load the optimizer state; otherwise it is reset, except that of a native model.
        native: whether the model keeps its optimizer where only weights are loaded, and the result has its counters.
    """

    source: str
    path: str
    optimizer: bool = False
    native: bool = False


@dataclass(slots=True)
class Sample(_Payload):
    """A sampling request for one prompt.

    Attributes:
        tokens: of the prompt.
        count: number of sequences.
        source: folder of the adapter's checkpoint, relative to the data folder; None for the base model.
        inflight: id of the model whose newest inflight weights are used; `source` is then set when it is sent.
        max_tokens: None is limited only by the context.
        seed: sequence i uses seed + i.
        stop: strings or token ids; None stops only at the end-of-sequence token, [] never stops.
        temperature: 0 is greedy.
        top_k: -1 disables it.
        top_p: 1 disables it.
        prompt_logprobs: whether to score the prompt.
        prompt_logprobs_last_n: number of last prompt tokens to score; None scores all.
        topk_prompt_logprobs: number of alternatives per prompt token.
        topk_sample_logprobs: number of alternatives per sampled token.
        targets: `{"data", "shape", "sparse_crow_indices"?, "sparse_col_indices"?}` of `target_prompt_logprobs`.
        alternatives: number of draws per prompt position (`prompt_alt_tokens_k`).
        more: further fields of `twinkle.data_format.SamplingParams`, which replace what follows from the others.
    """

    tokens: list[int]
    count: int = 1
    source: str | None = None
    inflight: str | None = None
    max_tokens: int | None = None
    seed: int = 0
    stop: list[Any] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    targets: dict[str, Any] | None = field(default=None)
    alternatives: int = 0
    more: dict[str, Any] | None = None


@dataclass(slots=True)
class Generate(_Payload):
    """A request whose tokens are streamed. It is not written to the log, and ends with the engine.

    Attributes:
        tokens: of the prompt.
        params: fields of `twinkle.data_format.SamplingParams`.
        source: folder of a checkpoint, relative to the data folder.
        model: id of the model whose present weights are used; without both, the base model is sampled.
    """

    tokens: list[int]
    params: dict[str, Any]
    source: str | None = None
    model: str | None = None

    @property
    def count(self) -> int:
        """Number of sequences."""
        return int(self.params.get("num_samples", 1))

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of sampled tokens of a sequence."""
        most: int | None = self.params.get("max_tokens")
        return most

    @property
    def size(self) -> int:
        """Number of tokens to read."""
        return len(self.tokens)


@dataclass(slots=True)
class Embed(_Payload):
    """A request for the vectors of texts. Like `Generate`, it is not written to the log.

    Attributes:
        rows: tokens of the texts.
        source: folder of a checkpoint, relative to the data folder.
        model: id of the model whose present weights are used; one of both is given.
        rank: of the checkpoint.
        train_attn: whether the checkpoint adapts attention layers.
        train_mlp: whether it adapts MLP layers.
        train_unembed: whether it adapts the output head.
    """

    rows: list[list[int]]
    source: str | None = None
    model: str | None = None
    rank: int = 1
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def size(self) -> int:
        """Number of tokens to read."""
        return sum(map(len, self.rows))


@dataclass(slots=True)
class Unload(_Payload):
    """The unload of a model: its weights, gradients and moments are zeroed and freed."""
