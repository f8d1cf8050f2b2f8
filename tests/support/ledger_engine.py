"""An engine that computes nothing: it records which rows were applied to which adapter, and fails when told to.

It is written from the contract `twinkle.engine.Engine` alone, without torch. A row, or a prompt, is named by its first
token. Native calls find a model in it that records what each of them did. Serve it with
`twinkle serve tests/support/ledger_model --backend tests/support/ledger_engine.py:LedgerEngine`.
"""

import hashlib
import json
import os
import signal
import time
import zlib
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
    Progress,
    SampledTokens,
    Step,
    StepResult,
    Usage,
)
from twinkle.errors import ArgumentError, CapacityError, CheckpointError, EngineFault, TrainingStateError

ENGINE = f"{Path(__file__).resolve()}:LedgerEngine"
"""What `--backend` takes."""
MODEL = Path(__file__).resolve().with_name("ledger_model")
"""A folder that passes for a model."""
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
STATE, EXPORTED = "ledger.json", "exported.json"
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
        cur_step: number of backward calls.
        calls: number of backward calls since the last step.
        accumulation: number of backward calls for each step of a native model.
        seen: ids of the rows that metrics of training have seen since they were asked.
        evaluated: those that metrics of evaluation have seen.
        spec: fields of the adapter's `AdapterSpec`.
    """

    rank: int
    applied: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    steps: int = 0
    cur_step: int = 0
    calls: int = 0
    accumulation: int = 1
    seen: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def due(self) -> bool:
        """Whether enough backward calls wait for a step."""
        return self.calls >= self.accumulation

    def train(self, ids: list[int], *, seen: bool) -> None:
        """Add the gradients of rows; metrics see them if they are to."""
        self.pending += ids
        self.cur_step, self.calls = self.cur_step + 1, self.calls + 1
        self.seen += ids if seen else []

    def step(self) -> int:
        """Apply what is pending, and return the number of its rows."""
        count = len(self.pending)
        self.applied += self.pending
        self.pending, self.calls, self.steps = [], 0, self.steps + 1
        return count

    @property
    def nbytes(self) -> int:
        """Memory of the applied rows."""
        return 8 * len(self.applied)

    def copy(self) -> Self:
        """Return a copy that later operations do not change."""
        return replace(
            self, applied=[*self.applied], pending=[*self.pending], seen=[*self.seen], evaluated=[*self.evaluated]
        )

    def without_gradient(self) -> Self:
        """Return a copy without what waits for a step, and what metrics have not told of it."""
        return replace(self.copy(), pending=[], calls=0, seen=[])

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / STATE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """Read a folder."""
        try:
            state = folder / STATE
            return cls(**json.loads((state if state.is_file() else folder / EXPORTED).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder.name} holds no ledger") from error


@dataclass(frozen=True, slots=True)
class Exported:
    """A ledger that was exported for sampling."""

    ledger: Ledger

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / EXPORTED).write_text(json.dumps(asdict(self.ledger)))


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
        die_within: likewise, but within a call of `run`, after the operations before theirs were reported.
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
    die_within: Collection[int] = ()
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
        self._die_once(token, self.die_once)
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

    def strike_within(self, token: int) -> None:
        """Do what a row of this first token does when its operation is computed."""
        self._die_once(token, self.die_within)

    def _die_once(self, token: int, deadly: Collection[int]) -> None:
        mark = Path(self.marks, f"ledger-died-of-{token}")
        if token in deadly and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Numbers(np.ndarray[Any, Any]):
    """An array that counts its elements as a tensor does."""

    def numel(self) -> int:
        """Return the number of elements."""
        return self.size


@dataclass(slots=True)
class Parts:
    """What an adapter has beside its ledger; a snapshot holds none of it.

    Attributes:
        components: names and options, by kind; metrics by their place.
        graph: ids of the rows of the last `forward`.
        scored: whether its loss was calculated.
        evaluated: ids of the rows of the last forward without a graph.
        training: whether the last forward was in training mode.
    """

    components: dict[str, Any] = field(default_factory=dict)
    graph: list[int] | None = None
    scored: bool = False
    evaluated: list[int] | None = None
    training: bool = True


class LedgerModel:
    """The methods of a model, for the adapters of an engine.

    Args:
        engine: has the ledgers.
    """

    def __init__(self, engine: "LedgerEngine") -> None:
        self._engine = engine
        self._parts: dict[str, Parts] = {}

    def parts(self, name: str) -> Parts:
        """Return what an adapter has beside its ledger."""
        return self._parts.setdefault(name, Parts())

    def forget(self, name: str) -> None:
        """Forget a removed adapter."""
        self._parts.pop(name, None)

    # Components

    def _set(self, kind: str, value: Any, options: Mapping[str, Any], adapter_name: str) -> None:
        self.parts(adapter_name).components[kind] = [str(value).rpartition("/")[2], dict(options)]

    def set_optimizer(self, name: Any, *, adapter_name: str, **options: Any) -> None:
        """Set the optimizer, which forgets its steps."""
        self._engine.set_optimizer(self._engine.ref(adapter_name), name)
        self.parts(adapter_name).components.pop("scheduler", None)
        self._set("optimizer", name, options, adapter_name)

    def learning_rates(self, name: str) -> tuple[float, ...]:
        """Return the learning rate of an adapter whose optimizer was given one."""
        _, options = self.parts(name).components.get("optimizer", ("", {}))
        return (float(options["lr"]),) if "lr" in options else ()

    def set_lr_scheduler(self, name: Any, *, adapter_name: str, **options: Any) -> None:
        """Set the scheduler."""
        self._set("scheduler", name, options, adapter_name)

    def set_processor(self, name: Any, *, adapter_name: str, **options: Any) -> None:
        """Set the processor."""
        self._set("processor", name, options, adapter_name)

    def set_loss(self, loss: Any, *, adapter_name: str) -> None:
        """Set the loss, by its class."""
        self._set("loss", type(loss).__name__, {}, adapter_name)

    def add_metric(self, name: Any, training: bool | None = None, *, adapter_name: str, **options: Any) -> None:
        """Add a metric."""
        metrics = self.parts(adapter_name).components.setdefault("metrics", [])
        metrics.append([str(name).rpartition("/")[2], training, options])

    # Passes

    def forward(self, *, inputs: Sequence[Mapping[str, Any]], adapter_name: str, **options: Any) -> dict[str, Any]:
        """Keep rows for `backward`."""
        parts = self.parts(adapter_name)
        parts.graph, parts.scored, parts.training = self._engine.read_rows(inputs), False, True
        return {"logps": np.stack([np.float32([number >> 32]) for number in parts.graph])}

    def drop_forward(self, *, adapter_name: str) -> None:
        """Drop what `forward` kept."""
        self.parts(adapter_name).graph = None

    def evaluate(self, adapter_name: str, ids: list[int]) -> None:
        """Note the rows of a forward without a graph."""
        parts = self.parts(adapter_name)
        parts.evaluated, parts.training = ids, False

    def calculate_loss(self, *, adapter_name: str, **inputs: Any) -> float:
        """Return the sum of the first tokens of the last forward."""
        parts = self.parts(adapter_name)
        rows = parts.graph if parts.training else parts.evaluated
        if rows is None:
            raise TrainingStateError("calculate_loss: call forward first")
        if parts.training:
            parts.scored = True
        else:
            self._ledger(adapter_name).evaluated += rows
        return float(sum(number >> 32 for number in rows))

    def backward(self, *, adapter_name: str) -> None:
        """Add the gradients of the last calculated loss."""
        parts = self.parts(adapter_name)
        if parts.graph is None or not parts.scored:
            raise TrainingStateError("backward: call forward and calculate_loss first")
        self._ledger(adapter_name).train(parts.graph, seen=True)
        parts.graph, parts.scored = None, False

    # Steps

    def lr_step(self, *, adapter_name: str, gradient_accumulation_steps: int | None = None, **more: Any) -> None:
        """Set the number of backward calls for each step."""
        if gradient_accumulation_steps is not None:
            self._ledger(adapter_name).accumulation = gradient_accumulation_steps

    def clip_grad_norm(self, *, adapter_name: str, **more: Any) -> float:
        """Return the number of rows that wait for a step."""
        return float(len(self._ledger(adapter_name).pending))

    def step(self, *, adapter_name: str, flush: bool = False, **more: Any) -> None:
        """Apply what is pending, if a step is due."""
        ledger = self._ledger(adapter_name)
        if ledger.due or (flush and ledger.calls):
            ledger.step()

    def zero_grad(self, *, adapter_name: str, flush: bool = False, **more: Any) -> None:
        """Drop what is pending, if a step is due."""
        ledger = self._ledger(adapter_name)
        if ledger.due or flush:
            ledger.pending, ledger.calls = [], 0

    def clip_grad_and_step(self, *, adapter_name: Sequence[str], flush: bool = False, **more: Any) -> list[float]:
        """Apply what is pending, if a step is due; return the number of rows of each."""
        ledgers = [self._ledger(name) for name in adapter_name]
        if not all(ledger.calls for ledger in ledgers):
            raise TrainingStateError("step: no gradients; call forward_backward first")
        return [float(ledger.step()) if ledger.due or flush else 0.0 for ledger in ledgers]

    # Metrics and state

    def calculate_metric(self, *, adapter_name: str, is_training: bool) -> dict[str, float]:
        """Return all that is recorded of an adapter, and forget the rows that metrics have seen."""
        ledger, parts = self._ledger(adapter_name), self.parts(adapter_name)
        seen, ledger.seen = ledger.seen, [] if is_training else ledger.seen
        evaluated, ledger.evaluated = ledger.evaluated, ledger.evaluated if is_training else []
        rows = {"applied": ledger.applied, "pending": ledger.pending, "seen": seen, "evaluated": evaluated}
        found = {key: value for name, ids in rows.items() for key, value in ledger_metrics(name, ids).items()}
        digest = zlib.crc32(json.dumps(parts.components, sort_keys=True, default=str).encode())
        counters = {"steps": ledger.steps, "cur_step": ledger.cur_step, "calls": ledger.calls, "components": digest}
        return found | {name: float(value) for name, value in counters.items()}

    def get_state_dict(self, *, adapter_name: str) -> dict[str, Any]:
        """Return the rows that were applied and those that wait."""
        ledger = self._ledger(adapter_name)
        rows = {"applied": ledger.applied, "pending": ledger.pending}
        return {name: np.asarray(ids, np.int64).view(Numbers) for name, ids in rows.items()}

    def get_train_configs(self, *, adapter_name: str) -> str:
        """Return the names of all components."""
        return json.dumps(self.parts(adapter_name).components, sort_keys=True, default=str)

    def _ledger(self, name: str) -> Ledger:
        try:
            return self._engine.ledger(name)
        except LookupError as error:
            raise ArgumentError(f"there is no adapter {name!r}") from error


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
        tokenizer: folder with the tokenizer of its model, which chat needs.
        **faults: fields of `Faults`.
    """

    def __init__(
        self, model_id: str, pass_tokens: int | None = None, tokenizer: str | None = None, **faults: Any
    ) -> None:
        known = [entry.name for entry in fields(Faults)]
        if unknown := sorted(set(faults) - set(known)):
            raise ArgumentError(f"the ledger knows no option {', '.join(unknown)}; it knows {', '.join(known)}")
        self.faults = Faults(**faults)
        self._pass_tokens = pass_tokens or 512
        self._ledgers: dict[AdapterRef, Ledger] = {}
        self._usage: dict[AdapterRef, Usage] = {}
        self._requests: list[Request] = []
        self._added = self._calls = 0
        self._model = LedgerModel(self)
        self._tokenizer = None if tokenizer is None else Path(tokenizer)
        self._between: Callable[[], None] = lambda: None
        self._ended: Callable[[int, OperationResult | OperationError], None] = lambda index, result: None

    def describe(self) -> EngineInfo:
        """See `Engine`."""
        return EngineInfo(
            "Ledger", self.faults.context, self.faults.vocabulary, self._tokenizer, losses=frozenset(LOSSES),
            features=frozenset({"early_results", "interrupt", "model", "prompt_scores", "train_unembed"}),
        )  # fmt: skip

    def add(self, name: str, spec: AdapterSpec) -> AdapterRef:
        """See `Engine`."""
        if any(ref.name == name for ref in self._ledgers):
            raise ArgumentError(f"there is already an adapter {name!r}")
        ref = AdapterRef(name, self._added)
        self._added += 1
        self._ledgers[ref], self._usage[ref] = Ledger(spec.rank, spec=asdict(spec)), Usage()
        return ref

    def remove(self, adapter: AdapterRef) -> None:
        """See `Engine`."""
        del self._ledgers[adapter], self._usage[adapter]
        self._model.forget(adapter.name)

    def as_model(self) -> Any:
        """See `Engine`."""
        return self._model

    def progress(self, adapter: AdapterRef) -> Progress:
        """See `Engine`."""
        ledger = self._ledgers[adapter]
        rates = self._model.learning_rates(adapter.name)
        return Progress(ledger.cur_step, ledger.steps, ledger.calls, ledger.accumulation, rates)

    def ref(self, name: str) -> AdapterRef:
        """Return an adapter by its name."""
        return next(ref for ref in self._ledgers if ref.name == name)

    def ledger(self, name: str) -> Ledger:
        """Return the ledger of an adapter.

        Raises:
            LookupError: there is no such adapter.
        """
        found = [ledger for ref, ledger in self._ledgers.items() if ref.name == name]
        return found[0]

    def set_optimizer(self, adapter: AdapterRef, name: str = "AdamW", **options: Any) -> None:
        """Forget how many steps there were, as a fresh optimizer does."""
        ledger = self._ledgers[adapter]
        ledger.steps, ledger.pending, ledger.calls = 0, [], 0

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
            for row in operation.rows:
                self.faults.strike_within(int(row["input_ids"][0]))
            self.faults.spend(sum(len(row["input_ids"]) for row in operation.rows), self._between)
            results.append(self._run(place, operation, number))
            self._ended(place, results[-1])
        return results

    def _run(self, place: int, operation: Operation, number: int) -> OperationResult | OperationError:
        adapter = operation.adapter or operation.metrics_of  # the base model has no ledger
        assert isinstance(adapter, AdapterRef)
        ledger = self._ledgers[adapter]
        ids, outputs = self.read_rows(operation.rows), []
        for row in operation.rows:
            tokens, targets = row["input_ids"], row["labels"]
            if int(tokens[0]) in self.faults.error:
                error = RuntimeError(f"the ledger was told that {int(tokens[0])} is an error")
                return OperationError(error, adapter.name, place)
            outputs.append({"logps": -1.0 - (np.asarray(targets) % 7).astype(np.float32) / 7})
        usage = Usage(sum(len(row["input_ids"]) for row in operation.rows))
        self._usage[adapter] += usage
        metrics: dict[str, float] = {}
        if operation.metrics_of is not None and operation.kind == "forward":
            self._model.evaluate(adapter.name, ids)
        elif operation.kind == "forward":
            metrics = ledger_metrics("applied", ledger.applied) | ledger_metrics("pending", ledger.pending)
        else:
            ledger.train(ids, seen=operation.metrics_of is not None)
            if operation.metrics_of is not None:
                self._model.parts(adapter.name).training = True
        loss = -float(sum(output["logps"].sum() for output in outputs))
        made: Any = outputs
        return OperationResult(made, loss, 1.0, metrics, usage, [{"pass": number}])

    def read_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of rows."""
        return [row_id(row["input_ids"], row["labels"]) for row in rows]

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
        return StepResult(float(self._ledgers[step.adapter].step()))

    def snapshot(self, adapter: AdapterRef, *, gradient: bool = True) -> Ledger:
        """See `Engine`."""
        ledger = self._ledgers[adapter]
        return ledger.copy() if gradient else ledger.without_gradient()

    def read_spec(self, folder: Path) -> AdapterSpec | None:
        """See `Engine`."""
        if not (folder / STATE).is_file() or (folder / "exported").exists() or _is_old_export(folder):
            return None
        saved = Ledger.read(folder)
        targets = saved.spec.pop("targets", None)
        return AdapterSpec(**{"rank": saved.rank, **saved.spec}, targets=None if targets is None else tuple(targets))

    def restore(self, adapter: AdapterRef, folder: Path) -> None:
        """See `Engine`."""
        saved, own = Ledger.read(folder), self._ledgers[adapter]
        if saved.rank != own.rank:
            raise CheckpointError(f"the snapshot has rank {saved.rank}, the adapter {own.rank}")
        self._ledgers[adapter] = saved

    def export(self, adapter: AdapterRef, base: str) -> Exported:
        """See `Engine`."""
        return Exported(replace(self._ledgers[adapter].without_gradient(), evaluated=[]))

    def load(self, adapter: AdapterRef, folder: Path) -> None:
        """See `Engine`."""
        saved, own = Ledger.read(folder), self._ledgers[adapter]
        if saved.rank != own.rank:
            raise CheckpointError(f"the checkpoint has rank {saved.rank}, the adapter {own.rank}")
        own.applied, own.pending, own.calls = saved.applied, [], 0

    def version(self, adapter: AdapterRef) -> Ledger:
        """See `Engine`."""
        return self._ledgers[adapter].copy()

    def read_version(self, folder: Path) -> Ledger:
        """See `Engine`."""
        return Ledger.read(folder)

    def submit(
        self, tokens: Sequence[int], params: SamplingParams | Mapping[str, Any], version: Any = None, *,
        cache_salt: str | None = None,
    ) -> Request:  # fmt: skip
        """Answer with the version: its steps, the number of rows applied, and their first tokens, in order.

        Nothing is kept of a prompt, so that salts have no effect.
        """
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
