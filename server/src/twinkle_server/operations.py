"""What the whole service speaks of: operations of queues, in order, each with one outcome.

A **queue** is what has an order: a model (its id), or a sampling session. In a model's queue operations run in the
order of their numbers, without gaps, whatever the order of arrival; creation is number 0. In a sampling session's
queue numbers only tell a repeated request from a new one.

Payloads of the operations that are not passes (`Create`, `Load`, `Save`, ...) are written once, into the log, and
replayed as they are. Everything that must not differ when an operation is done again is decided before it is written:
the seed, the folder, the checkpoint that a name stands for.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import orjson

from twinkle_server.errors import BadRequest

Kind = Literal[
    "create",  # a new adapter, or one from a checkpoint ("source" in its payload)
    "forward",
    "forward_backward",
    "optim_step",
    "save",  # a checkpoint of any kind: "kind" in its payload
    "load",  # a checkpoint into a model that exists
    "unload",
    "sample",
]
PASSES: frozenset[Kind] = frozenset({"forward", "forward_backward"})
"""Kinds that go through the model together; every other kind is a barrier of its queue."""
Category = Literal["user", "server", "unknown"]
Status = Literal["pending", "done", "failed", "cancelled"]
LOST = b"lost"
"""`Submission.asked` of a number that never came: a request that comes later gets the future of that failure."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An operation that somebody asks for.

    Attributes:
        tenant: whose it is.
        queue_id: see above.
        kind: what is to be done.
        payload: how, as bytes that never change: a `wire` `ForwardBackwardRequest` for passes, JSON for the others (see
            `payloads`). Its hash tells a repeated request from another one under the same number.
        number: its place in the queue; None takes the next one (legacy unload only).
        tokens: what it costs, in tokens of the model.
        refusal: why it fails without being tried; its number is used up all the same.
        asked: what was asked for as it came, where `payload` holds what is chosen anew each time (a folder, a seed);
            then its hash, and not that of `payload`, tells a repeated request from another one.
    """

    tenant: str
    queue_id: str
    kind: Kind
    payload: bytes
    number: int | None
    tokens: int = 0
    refusal: str | None = None
    asked: bytes | None = None

    @property
    def ordered(self) -> bool:
        """Whether it waits for the numbers before its own."""
        return self.kind != "sample"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to a submission, after it is durable.

    Attributes:
        request: id of its future.
        fresh: False when the same had come before.
    """

    request: str
    fresh: bool


@dataclass(slots=True)
class Operation:
    """An operation of the log.

    Attributes:
        id: number of its row; grows with time.
        request: id of its future.
        tenant: whose it is.
        queue_id: see `Submission`.
        number: its place there.
        kind: what is to be done.
        tokens: what it costs.
        status: whether it is over.
        attempts: times that the engine died while it was under way.
        payload: None when it is not in memory (`Journal.payload` reads it).
        asked_by: id of the HTTP request that brought it, for the log; None after a restart.
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
    asked_by: str | None = None

    @property
    def ordered(self) -> bool:
        """Whether it waits for the numbers before its own."""
        return self.kind != "sample"


@dataclass(slots=True)
class Outcome:
    """How an operation ended.

    Attributes:
        operation: id of its row.
        result: what its future gives: a `wire` message for passes and samples, JSON for the others; None if it failed.
        error: why it failed, in words for the client.
        category: whose fault that was.
        cancelled: nobody wanted it any more.
        composition: how its passes were composed, for a replay of them; None where that does not matter.
        also: what is written in the same transaction when it is done (the row of a checkpoint, say); it may raise
            `ServiceError`, and then the operation has failed with that message as the user's fault.
    """

    operation: int
    result: bytes | None = None
    error: str | None = None
    category: Category = "server"
    cancelled: bool = False
    composition: str | None = None
    also: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Future:
    """What is known of a future.

    Attributes:
        kind: of its operation, which says what `result` is.
        status: "pending" while it runs.
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
    """All of a model's state after an operation, in a folder.

    Attributes:
        queue_id: the model.
        number: of the last operation that it contains, failed ones counted.
        folder: below the data directory, relative.
        digest: SHA-256 of its manifest.
        size: bytes.
    """

    queue_id: str
    number: int
    folder: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model, as the engine found it.

    Attributes:
        name: what clients call it.
        context: tokens that a row may have.
        vocabulary: number of token ids.
        architecture: of the model class.
        tokenizer: where clients find its tokenizer; "" if it has none.
        losses: names that a request may use.
        paths: for each fast path of training and sampling what was measured: `path`, `exact`, `reason`, `summary`, and
            the numbers behind them.
    """

    name: str
    context: int
    vocabulary: int
    architecture: str = ""
    tokenizer: str = ""
    losses: tuple[str, ...] = field(default=())
    paths: tuple[Mapping[str, Any], ...] = field(default=())


class _Payload:
    def dump(self) -> bytes:
        """Return the bytes for the log.

        Raises:
            BadRequest: a value cannot be written as JSON: an integer beyond 64 bits, say.
        """
        try:
            return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS)  # type: ignore[call-overload]
        except TypeError as error:
            raise BadRequest(f"cannot store a value of the request: {error}") from error

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read bytes of the log."""
        return cls(**orjson.loads(data))


@dataclass(slots=True)
class Create(_Payload):
    """A new adapter; scale is 32 / rank.

    Attributes:
        rank: of all its matrices.
        seed: of its first weights.
        train_attn: adapt attention.
        train_mlp: adapt the MLPs.
        train_unembed: adapt the head.
        source: folder of the checkpoint that it starts from, relative to the data directory; None is fresh weights.
        optimizer: take the optimizer's state from there too.
        path: `tinker://` path of that checkpoint.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    source: str | None = None
    optimizer: bool = False
    path: str | None = None


@dataclass(slots=True)
class OptimStep(_Payload):
    """An update; see `tinker.AdamParams` for the defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(slots=True)
class Save(_Payload):
    """A checkpoint.

    Attributes:
        folder: where it goes, relative to the data directory; new for every request.
        kind: "weights" (with optimizer), "sampler_weights" or "external_weights".
        name: in its path; None for one that only a sampling session uses.
        overwrite: replace one of the same name.
        ttl: seconds that it lives; None is for ever.
        metadata: of the user.
        sampler: id of the sampling session that this makes.
        inflight: that session, and those like it of the model, move to every later one.
        recipients: of age, to whom every file is encrypted; None is not encrypted.
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


@dataclass(slots=True)
class Load(_Payload):
    """A checkpoint into a model.

    Attributes:
        source: its folder, relative to the data directory.
        path: its `tinker://` path.
        optimizer: take the optimizer's state too; otherwise it begins anew.
    """

    source: str
    path: str
    optimizer: bool = False


@dataclass(slots=True)
class Sample(_Payload):
    """Sequences for one prompt.

    Attributes:
        tokens: of the prompt.
        count: sequences.
        source: folder of the adapter's checkpoint, relative to the data directory; None is the base model.
        inflight: id of the model whose newest inflight weights are used instead; `source` is set when it is dispatched.
        max_tokens: None is up to the context.
        seed: of the draw; sequence i draws from seed + i.
        stop: strings or token ids; None stops at the end-of-sequence token only, [] never stops.
        temperature: 0 is greedy.
        top_k: -1 is all.
        top_p: 1 is all.
        prompt_logprobs: score the prompt.
        prompt_logprobs_last_n: only its last n tokens; None is all.
        topk_prompt_logprobs: alternatives for each prompt token.
        topk_sample_logprobs: alternatives for each sampled token.
        targets: `{"data", "shape", "sparse_crow_indices"?, "sparse_col_indices"?}` of `target_prompt_logprobs`.
        alternatives: draws for each prompt position (`prompt_alt_tokens_k`).
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


@dataclass(slots=True)
class Unload(_Payload):
    """The end of a model: its weights, gradients and moments are zeroed and gone."""
