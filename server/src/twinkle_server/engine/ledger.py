"""A backend for tests that computes nothing: it writes down which datums were applied to which model.

`Settings.extra` holds its `Chaos`.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from twinkle_server.engine.backend import BackendOptions, Cost, Fatal, Pass, Sampled, UserError
from twinkle_server.engine.chaos import Chaos
from twinkle_server.engine.composition import Composition
from twinkle_server.engine.files import Damaged, open_file
from twinkle_server.operations import ModelInfo
from twinkle_server.payloads import Create, Load, OptimStep, Sample, Save
from twinkle_server.wire import codec
from twinkle_server.wire import tinker_pb2 as pb

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
_STATE = "ledger.json"
_PASS_TOKENS = 512


@dataclass(slots=True)
class Ledger:
    """The state of a model.

    Attributes:
        rank: of its adapter.
        applied: datums whose gradients were in a step, in order.
        pending: datums whose gradients are in none yet.
        steps: optimizer steps.
    """

    rank: int
    applied: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    steps: int = 0

    def copy(self) -> Self:
        """Return one that goes its own way."""
        return replace(self, applied=[*self.applied], pending=[*self.pending])

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / _STATE).write_bytes(orjson.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """Read a folder."""
        try:
            with open_file(folder, _STATE) as file:
                return cls(**orjson.loads(file.read()))
        except (OSError, ValueError, TypeError) as error:
            raise Damaged(f"{folder.name} holds no ledger") from error


@dataclass(slots=True)
class _Request:
    sample: Sample
    tokens: list[int]
    stop: codec.StopReason
    done: int = 0


class LedgerBackend:
    """See the module.

    Args:
        options: `extra` is a `Chaos`.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._chaos = Chaos.of(options.extra)
        self._losses = (*LOSSES, *(options.losses or ()))
        self._models: dict[str, Ledger] = {}
        self._requests: dict[int, _Request] = {}
        self._passes = 0
        self._between: Callable[[], None] = lambda: None

    def describe(self) -> ModelInfo:
        """See `Backend`."""
        chaos = self._chaos
        return ModelInfo(self._options.name, chaos.context, chaos.vocabulary, "Ledger", "", self._losses)

    @property
    def pass_tokens(self) -> int:
        """See `Backend`."""
        return _PASS_TOKENS

    def create(self, lane: str, create: Create, source: Path | None) -> None:
        """See `Backend`."""
        if lane in self._models:
            raise RuntimeError("a model of that id is there already")
        self._models[lane] = _loaded(create.rank, source, create.optimizer) if source else Ledger(create.rank)

    def run(self, passes: Sequence[Pass]) -> tuple[list[bytes | Exception], Cost]:
        """See `Backend`."""
        requests = [codec.parse_request(item.payload) for item in passes]
        first = [token for request in requests for datum in request.data for token in _tokens(datum)[:1]]
        for token in first:
            self._chaos.strike(token, self._options.data)
        tokens = sum(codec.datum_length(datum) for request in requests for datum in request.data)
        self._passes += 1
        every = self._chaos.memory_every
        if tokens > self._chaos.tokens_in_memory or (every and self._passes % every == 0):
            raise MemoryError(f"the ledger was told that {tokens} tokens are too many")
        self._chaos.spend(tokens, self._between)
        results = [_tried(self._run_one, item, request) for item, request in zip(passes, requests, strict=True)]
        composition = Composition([{"pass": time.time_ns()}])
        return results, Cost(tokens, 0, 0.0, dict.fromkeys(range(len(passes)), composition))

    def interrupt(self, between: Callable[[], None]) -> None:
        """See `Interruptible`."""
        self._between = between

    def step(self, steps: Sequence[tuple[str, OptimStep]]) -> list[Mapping[str, float] | Exception]:
        """See `Backend`."""
        time.sleep(self._chaos.seconds_per_step)
        return [_tried(self._step_one, lane) for lane, _ in steps]

    def save(self, lane: str, save: Save) -> tuple[Ledger, Mapping[str, Any]]:
        """See `Backend`."""
        saved = replace(self._model(lane).copy(), pending=[])
        return saved, {"rank": saved.rank, "has_optimizer": save.kind == "weights"}

    def load(self, lane: str, load: Load, source: Path) -> None:
        """See `Backend`."""
        self._models[lane] = _loaded(self._model(lane).rank, source, load.optimizer)

    def remove(self, lane: str) -> None:
        """See `Backend`."""
        self._models.pop(lane, None)

    def snapshot(self, lane: str) -> Ledger:
        """See `Backend`."""
        return self._model(lane).copy()

    def restore(self, lane: str, folder: Path) -> None:
        """See `Backend`."""
        self._models[lane] = Ledger.read(folder)

    def sample(self, key: int, sample: Sample, source: Path | None) -> None:
        """Answer with the version: its steps, the number of datums applied, and their first tokens, in order."""
        self._check_tokens(np.asarray(sample.tokens, np.int64))
        ledger = Ledger.read(source) if source else Ledger(0)
        whole = [ledger.steps, len(ledger.applied), *(number >> 32 for number in ledger.applied)]
        tokens = whole[: sample.max_tokens]
        self._requests[key] = _Request(sample, tokens, "stop" if len(tokens) == len(whole) else "length")

    def decode(self) -> list[Sampled]:
        """See `Backend`."""
        for request in self._requests.values():
            self._chaos.strike(request.sample.tokens[0], self._options.data)
            request.done += 1
        time.sleep(self._chaos.seconds_per_decode)
        over = [key for key, request in self._requests.items() if request.done >= len(request.tokens)]
        return [_sampled(key, self._requests.pop(key)) for key in over]

    @property
    def sampling(self) -> int:
        """See `Backend`."""
        return len(self._requests)

    def cancel(self, key: int) -> None:
        """See `Backend`."""
        self._requests.pop(key, None)

    def _model(self, lane: str) -> Ledger:
        if lane not in self._models:
            raise UserError("this model is not there: it was never made, or it was unloaded")
        return self._models[lane]

    def _run_one(self, item: Pass, request: pb.ForwardBackwardRequest) -> bytes:
        ledger = self._model(item.lane)
        if request.loss_fn not in self._losses:
            raise UserError(f"there is no loss {request.loss_fn!r}; there are {', '.join(self._losses)}")
        if not request.data:
            raise UserError("data is empty; a pass needs at least one datum")
        outputs = [self._output(datum) for datum in request.data]
        if request.forward_only:
            for name, numbers in (("applied", ledger.applied), ("pending", ledger.pending)):
                for place, output in enumerate(outputs):
                    output[name] = np.asarray(numbers if place == 0 else [], np.int64)
        else:
            ledger.pending += [datum_id(datum) for datum in request.data]
        loss = -float(sum(output["logprobs"].sum() for output in outputs))
        return codec.forward_backward_output(outputs, {"loss:sum": loss})

    def _output(self, datum: pb.Datum) -> dict[str, np.ndarray[Any, Any]]:
        try:
            tokens, inputs = codec.datum_tokens(datum), codec.datum_inputs(datum)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._check_tokens(tokens)
        if tokens[0] in self._chaos.error:
            raise RuntimeError(f"the ledger was told that {tokens[0]} is an error")
        targets = inputs.get("target_tokens", tokens)
        if len(targets) != len(tokens):
            raise UserError(f"target_tokens has {len(targets)} rows, and model_input has {len(tokens)} tokens")
        return {"logprobs": -1.0 - (targets % 7).astype(np.float32) / 7}

    def _check_tokens(self, tokens: np.ndarray[Any, Any]) -> None:
        chaos = self._chaos
        if not 0 < len(tokens) <= chaos.context:
            raise UserError(f"a row has {len(tokens)} tokens; it may have 1 to {chaos.context}")
        if tokens.min() < 0 or tokens.max() >= chaos.vocabulary:
            raise UserError(f"tokens are from 0 to {chaos.vocabulary - 1}; there is {tokens.min()} and {tokens.max()}")

    def _step_one(self, lane: str) -> Mapping[str, float]:
        ledger = self._model(lane)
        count = len(ledger.pending)
        ledger.applied += ledger.pending
        ledger.pending = []
        ledger.steps += 1
        return {"grad_norm:mean": float(count)}


def datum_id(datum: pb.Datum) -> int:
    """Return what the ledger calls a datum: its first token, and behind it 32 bits of its SHA-256."""
    digest = hashlib.sha256(datum.SerializeToString(deterministic=True)).digest()
    return int(codec.datum_tokens(datum)[0]) << 32 | int.from_bytes(digest[:4])


def _loaded(rank: int, source: Path, optimizer: bool) -> Ledger:
    saved = Ledger.read(source)
    if saved.rank != rank:
        raise UserError(f"the checkpoint has rank {saved.rank}, and the model has rank {rank}")
    return saved if optimizer else replace(saved, steps=0)


def _tokens(datum: pb.Datum) -> list[int]:
    try:
        return [int(token) for token in codec.datum_tokens(datum)[:1]]
    except ValueError:
        return []  # its own pass says what is wrong with it


def _tried(work: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except Fatal:
        raise
    except Exception as error:
        return error


def _sampled(key: int, request: _Request) -> Sampled:
    sample = request.sample
    text = codec.SampledText(
        np.asarray(request.tokens, np.int32), np.full(len(request.tokens), -1.0, np.float32), request.stop
    )
    prompt = np.full(len(sample.tokens), -1.0, np.float32)
    prompt[0] = np.nan
    said = codec.SampledPrompt(prompt if sample.prompt_logprobs else None)
    return Sampled(key, codec.sample_response([text] * sample.count, said), tokens=len(request.tokens) * sample.count)
