"""An engine that computes nothing: it records which rows were applied to which adapter, and fails when told to.

It is written from the contract `twinkle.engine.Engine` alone, without torch. A row, or a prompt, is named by its first
token. Serve it with `twinkle serve tests/support/ledger_model --backend tests/support/ledger_engine.py:LedgerEngine`.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.engine import (
    AdapterBytes,
    AdapterRef,
    AdapterSpec,
    Engine,
    EngineInfo,
    Operation,
    OperationError,
    OperationResult,
    SampledTokens,
    Step,
    StepResult,
    Usage,
)
from twinkle.errors import ArgumentError, CapacityError, CheckpointError, EngineFault

ENGINE = f"{Path(__file__).resolve()}:LedgerEngine"
"""What `--backend` takes."""
MODEL = Path(__file__).resolve().with_name("ledger_model")
"""A folder that passes for a model."""
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
STATE = "ledger.json"
_PART = 1024


def row_id(tokens: Sequence[int], targets: Sequence[int]) -> int:
    """Return the ledger's name of a row: its first token, and 32 bits of a hash of tokens and targets."""
    content = np.asarray(tokens, "<i8").tobytes() + np.asarray(targets, "<i8").tobytes()
    return int(tokens[0]) << 32 | int.from_bytes(hashlib.sha256(content).digest()[:4], "big")


def ledger_metrics(name: str, ids: Sequence[int]) -> dict[str, float]:
    """Return row ids as metrics, which are floats of 64 bits: each in two halves."""
    halves = {f"{name}.{place}.token": float(number >> 32) for place, number in enumerate(ids)}
    halves |= {f"{name}.{place}.hash": float(number & 0xFFFFFFFF) for place, number in enumerate(ids)}
    return halves | {f"{name}.count": float(len(ids))}


def read_ledger_metrics(name: str, metrics: Mapping[str, float]) -> list[int]:
    """Return the row ids that `ledger_metrics` wrote, from the metrics as the wire has them."""
    half = {part: f"{name}.{{}}.{part}:sum" for part in ("token", "hash")}
    count = int(metrics[f"{name}.count:sum"])
    return [int(metrics[half["token"].format(at)]) << 32 | int(metrics[half["hash"].format(at)]) for at in range(count)]


@dataclass(slots=True)
class Ledger:
    """The state of an adapter.

    Attributes:
        rank: rank of the adapter.
        applied: ids of the rows whose gradients were in a step, in order.
        pending: ids of the rows whose gradients were in none yet.
        steps: number of optimizer steps.
    """

    rank: int
    applied: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def nbytes(self) -> int:
        """Memory of the applied rows."""
        return 8 * len(self.applied)

    def copy(self) -> Self:
        """Return a copy that later operations do not change."""
        return replace(self, applied=[*self.applied], pending=[*self.pending])

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / STATE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """Read a folder."""
        try:
            return cls(**json.loads((folder / STATE).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder.name} holds no ledger") from error


@dataclass(frozen=True, slots=True)
class Exported:
    """A ledger that was exported for sampling."""

    ledger: Ledger

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        self.ledger.write(folder)
        (folder / "exported").touch()


@dataclass(frozen=True, slots=True)
class Faults:
    """How the ledger misbehaves; the lists hold first tokens.

    Attributes:
        vocabulary: number of token ids.
        context: maximum number of tokens of a row.
        seconds_per_token: duration of a pass.
        seconds_per_step: duration of an optimizer step.
        seconds_per_decode: duration of a decode step.
        die: these kill the process.
        die_once: these do, once for each folder of marks.
        marks: folder that remembers which have killed.
        hang: these never end.
        fatal: these raise `EngineFault`.
        error: these fail their operation.
        whole: these fail the whole call, with an error that is none of the contract.
        memory: these leave no memory for a whole call.
        tokens_in_memory: more tokens than these leave none.
        memory_every: every n-th call of `run` has none; 0 is never.
    """

    vocabulary: int = 2**31 - 1
    context: int = 2**20
    seconds_per_token: float = 0.0
    seconds_per_step: float = 0.0
    seconds_per_decode: float = 0.0
    die: Collection[int] = ()
    die_once: Collection[int] = ()
    marks: str = ""
    hang: Collection[int] = ()
    fatal: Collection[int] = ()
    error: Collection[int] = ()
    whole: Collection[int] = ()
    memory: Collection[int] = ()
    tokens_in_memory: int = 2**62
    memory_every: int = 0

    def spend(self, tokens: int, between: Callable[[], None]) -> None:
        """Take the time of a pass, in parts, and call `between` between them."""
        while tokens > 0 and self.seconds_per_token > 0:
            part = min(tokens, _PART)
            time.sleep(part * self.seconds_per_token)
            tokens -= part
            if tokens:
                between()

    def strike(self, token: int) -> None:
        """Do what a row of this first token does to a process."""
        if token in self.die_once:
            mark = Path(self.marks, f"ledger-died-of-{token}")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if token in self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        while token in self.hang:
            time.sleep(60.0)
        if token in self.fatal:
            raise EngineFault(f"the ledger was told that {token} is fatal")
        if token in self.whole:
            raise RuntimeError(f"the ledger was told that {token} breaks a pass")
        if token in self.memory:
            raise MemoryError(f"the ledger was told that there is no memory for {token}")


class Request:
    """A prompt that is being sampled: one token a step, all of them known from the start."""

    def __init__(self, engine: "LedgerEngine", prompt: Sequence[int], params: SamplingParams, whole: list[int]) -> None:
        self.engine, self.prompt, self.params = engine, list(prompt), params
        self.tokens = whole[: params.max_tokens]
        self.reason: Literal["stop", "length"] = "stop" if len(self.tokens) == len(whole) else "length"
        self.drawn = 0
        self.cancelled = False

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return self.cancelled or self.drawn >= len(self.tokens)

    def progress(self, sample: int = 0, start: int = 0) -> SampledTokens:
        """Return what has been drawn so far."""
        if not 0 <= sample < self.params.num_samples:
            raise ArgumentError(f"there is no sample {sample}")
        tokens = self.tokens[start : self.drawn]
        return SampledTokens(tokens, [-1.0] * len(tokens), self._reason() if self.done else None)

    def result(self) -> SampleResponse:
        """Return the samples."""
        while not self.done:
            self.engine.decode()
        drawn = self.tokens[: self.drawn]
        logprobs = [[(token, -1.0)] for token in drawn] if self.params.logprobs else None
        sequence = SampledSequence(self._reason(), drawn, logprobs)
        response = SampleResponse([sequence] * self.params.num_samples, self.prompt)
        asked, places = self.params, len(self.prompt) - 1
        if asked.topk_logprobs:
            sequence.topk_logprobs = [[(0, -1.0)] * asked.topk_logprobs for _ in drawn]
        if asked.prompt_logprobs:
            response.prompt_logprobs = [None, *[-1.0] * places]
            response.topk_prompt_logprobs = [None, *[[(0, -1.0)] * asked.prompt_logprobs for _ in range(places)]]
        if asked.prompt_targets is not None:
            scores = [[None if token < 0 else -1.0 for token in row] for row in asked.prompt_targets]
            response.prompt_target_logprobs = scores
        if asked.prompt_draws:
            response.prompt_draws = [[(0, -1.0)] * asked.prompt_draws for _ in range(places)]
        return response

    def _reason(self) -> Literal["stop", "length", "abort"]:
        return "abort" if self.drawn < len(self.tokens) else self.reason

    def cancel(self) -> None:
        """End the request."""
        self.cancelled = True


class LedgerEngine(Engine):
    """See the module.

    Args:
        model_id: not used.
        pass_tokens: maximum number of tokens of a pass.
        **faults: fields of `Faults`.
    """

    def __init__(self, model_id: str, pass_tokens: int | None = None, **faults: Any) -> None:
        known = [entry.name for entry in fields(Faults)]
        if unknown := sorted(set(faults) - set(known)):
            raise ArgumentError(f"the ledger knows no option {', '.join(unknown)}; it knows {', '.join(known)}")
        self.faults = Faults(**faults)
        self._pass_tokens = pass_tokens or 512
        self._ledgers: dict[AdapterRef, Ledger] = {}
        self._usage: dict[AdapterRef, Usage] = {}
        self._requests: list[Request] = []
        self._added = self._calls = 0
        self._between: Callable[[], None] = lambda: None
        self._ended: Callable[[int, OperationResult | OperationError], None] = lambda index, result: None

    def describe(self) -> EngineInfo:
        """See `Engine`."""
        return EngineInfo(
            "Ledger", self.faults.context, self.faults.vocabulary, losses=frozenset(LOSSES),
            features=frozenset({"early_results", "interrupt", "prompt_scores", "train_unembed"}),
        )  # fmt: skip

    def add(self, name: str, spec: AdapterSpec) -> AdapterRef:
        """See `Engine`."""
        if any(ref.name == name for ref in self._ledgers):
            raise ArgumentError(f"there is already an adapter {name!r}")
        ref = AdapterRef(name, self._added)
        self._added += 1
        self._ledgers[ref], self._usage[ref] = Ledger(spec.rank), Usage()
        return ref

    def remove(self, adapter: AdapterRef) -> None:
        """See `Engine`."""
        del self._ledgers[adapter], self._usage[adapter]

    def set_optimizer(self, adapter: AdapterRef, name: str = "AdamW", **options: Any) -> None:
        """Forget how many steps there were, as a fresh optimizer does."""
        ledger = self._ledgers[adapter]
        ledger.steps, ledger.pending = 0, []

    def usage(self, adapter: AdapterRef) -> Usage:
        """See `Engine`."""
        return self._usage[adapter]

    def bytes_of(self, adapter: AdapterRef) -> AdapterBytes:
        """See `Engine`."""
        return AdapterBytes(self._ledgers[adapter].nbytes)

    @property
    def pass_tokens(self) -> int:
        """See `Engine`."""
        return self._pass_tokens

    def run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """See `Engine`."""
        rows = [row for operation in operations for row in operation.rows]
        for row in rows:
            self.faults.strike(int(row["input_ids"][0]))
        tokens = sum(len(row["input_ids"]) for row in rows)
        self._calls += 1
        every = self.faults.memory_every
        if tokens > self.faults.tokens_in_memory or (every and self._calls % every == 0):
            raise CapacityError(f"the ledger was told that {tokens} tokens are too many") from MemoryError()
        number = time.time_ns()
        results = []
        for place, operation in enumerate(operations):
            if place and self.faults.seconds_per_token > 0:
                self._between()
            self.faults.spend(sum(len(row["input_ids"]) for row in operation.rows), self._between)
            results.append(self._run(place, operation, number))
            self._ended(place, results[-1])
        return results

    def _run(self, place: int, operation: Operation, number: int) -> OperationResult | OperationError:
        assert isinstance(operation.adapter, AdapterRef)
        ledger = self._ledgers[operation.adapter]
        ids, outputs = [], []
        for row in operation.rows:
            tokens, targets = row["input_ids"], row["labels"]
            if int(tokens[0]) in self.faults.error:
                error = RuntimeError(f"the ledger was told that {int(tokens[0])} is an error")
                return OperationError(error, operation.adapter.name, place)
            ids.append(row_id(tokens, targets))
            outputs.append({"logps": -1.0 - (np.asarray(targets) % 7).astype(np.float32) / 7})
        usage = Usage(sum(len(row["input_ids"]) for row in operation.rows))
        self._usage[operation.adapter] += usage
        metrics: dict[str, float] = {}
        if operation.kind == "forward":
            metrics = ledger_metrics("applied", ledger.applied) | ledger_metrics("pending", ledger.pending)
        else:
            ledger.pending += ids
        loss = -float(sum(output["logps"].sum() for output in outputs))
        made: Any = outputs
        return OperationResult(made, loss, 1.0, metrics, usage, [{"pass": number}])

    def report(self, ended: Callable[[int, OperationResult | OperationError], None]) -> None:
        """See `Engine`."""
        self._ended = ended

    def interrupt(self, between: Callable[[], None]) -> None:
        """See `Engine`."""
        self._between = between

    def step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        """See `Engine`."""
        time.sleep(self.faults.seconds_per_step)
        return [self._step(step) for step in steps]

    def _step(self, step: Step) -> StepResult:
        assert isinstance(step.adapter, AdapterRef)
        ledger = self._ledgers[step.adapter]
        count = len(ledger.pending)
        ledger.applied += ledger.pending
        ledger.pending, ledger.steps = [], ledger.steps + 1
        return StepResult(float(count))

    def snapshot(self, adapter: AdapterRef, *, gradient: bool = True) -> Ledger:
        """See `Engine`."""
        copied = self._ledgers[adapter].copy()
        return copied if gradient else replace(copied, pending=[])

    def read_spec(self, folder: Path) -> AdapterSpec | None:
        """See `Engine`."""
        if not (folder / STATE).is_file() or (folder / "exported").exists() or _is_old_export(folder):
            return None
        return AdapterSpec(Ledger.read(folder).rank)

    def restore(self, adapter: AdapterRef, folder: Path) -> None:
        """See `Engine`."""
        saved, own = Ledger.read(folder), self._ledgers[adapter]
        if saved.rank != own.rank:
            raise CheckpointError(f"the snapshot has rank {saved.rank}, the adapter {own.rank}")
        self._ledgers[adapter] = saved

    def export(self, adapter: AdapterRef, base: str) -> Exported:
        """See `Engine`."""
        return Exported(replace(self._ledgers[adapter].copy(), pending=[]))

    def load(self, adapter: AdapterRef, folder: Path) -> None:
        """See `Engine`."""
        saved, own = Ledger.read(folder), self._ledgers[adapter]
        if saved.rank != own.rank:
            raise CheckpointError(f"the checkpoint has rank {saved.rank}, the adapter {own.rank}")
        own.applied, own.pending = saved.applied, []

    def version(self, adapter: AdapterRef) -> Ledger:
        """See `Engine`."""
        return self._ledgers[adapter].copy()

    def read_version(self, folder: Path) -> Ledger:
        """See `Engine`."""
        return Ledger.read(folder)

    def submit(self, tokens: Sequence[int], params: SamplingParams | Mapping[str, Any], version: Any = None) -> Request:
        """Answer with the version: its steps, the number of rows applied, and their first tokens, in order."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams.from_dict(params)
        ledger: Ledger = Ledger(0) if version is None else version
        whole = [ledger.steps, len(ledger.applied), *(number >> 32 for number in ledger.applied)]
        request = Request(self, tokens, params, whole)
        self._requests.append(request)
        return request

    def decode(self) -> bool:
        """See `Engine`."""
        self._requests = [request for request in self._requests if not request.done]
        if not self._requests:
            return False
        for request in self._requests:
            self.faults.strike(request.prompt[0])
            request.drawn += 1
        time.sleep(self.faults.seconds_per_decode)
        return True


def _is_old_export(folder: Path) -> bool:
    """Return whether a checkpoint without a mark was exported for sampling; stored data of older versions has none."""
    manifest = folder / "manifest.json"
    facts = json.loads(manifest.read_bytes())["facts"] if manifest.is_file() else {}
    return facts.get("kind", "") in ("sampler_weights", "external_weights")
