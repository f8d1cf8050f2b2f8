"""JSON payloads of the operations that are not passes. They are written once, into the log, and replayed as they are.

Everything that must not differ when an operation is done again is decided before it is written: the seed, the folder,
the checkpoint that a name stands for.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

import orjson

from twinkle_server.errors import BadRequest


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
