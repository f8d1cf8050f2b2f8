"""Executes operations on an engine: reads their payloads, runs them, and serializes their results.

The models of tenants are adapters of the engine: created, saved, loaded, restored and removed (`Models`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twinkle.engine import (
    AdapterRef,
    AdapterSpec,
    Engine,
    Operation,
    OperationError,
    OperationResult,
    SavedAdapter,
    Step,
)
from twinkle.errors import CheckpointError, NonFiniteError
from twinkle_server.engine.errors import UserError, damaged_checkpoint, public_error, public_errors
from twinkle_server.engine.losses.building import SEQUENCES, Rows, read_request, read_rows
from twinkle_server.engine.losses.catalog import CUSTOM, Losses, accepted_inputs, ignored_inputs
from twinkle_server.engine.queues import Composition
from twinkle_server.engine.samples import Sampled, Samples, Versions
from twinkle_server.engine.streams import Entry, Streams
from twinkle_server.operations import Create, Embed, Generate, Load, ModelInfo, OptimStep, Sample, Save
from twinkle_server.settings import Limits
from twinkle_server.wire import codec

_SHAPE = ("rank", "train_attn", "train_mlp", "train_unembed")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a tenant.

    Attributes:
        ref: its adapter.
        spec: how the adapter was created.
    """

    ref: AdapterRef
    spec: AdapterSpec


class Models:
    """The models that are in memory, by id.

    Args:
        engine: holds their adapters.
        base: name of the base model in PEFT files.
    """

    def __init__(self, engine: Engine, base: str) -> None:
        self._engine, self._base = engine, base
        self._models: dict[str, Model] = {}
        self._count = 0

    def __contains__(self, queue_id: str) -> bool:
        return queue_id in self._models

    def __getitem__(self, queue_id: str) -> Model:
        """Return a model.

        Raises:
            UserError: no model has this id.
        """
        if queue_id not in self._models:
            raise UserError(f"model {queue_id!r} does not exist; it was never created or it was unloaded")
        return self._models[queue_id]

    def create(self, queue_id: str, create: Create, source: Path | None) -> None:
        """Create a model with fresh weights, or with those of a checkpoint.

        Raises:
            UserError: the id is taken, or the rank or the checkpoint is invalid.
            CapacityError: there is not enough memory.
        """
        if isinstance(create.rank, bool) or not isinstance(create.rank, int) or create.rank < 1:
            raise UserError(f"rank must be an integer of at least 1, got {create.rank!r}")
        spec = AdapterSpec(
            create.rank, create.seed, train_attn=create.train_attn, train_mlp=create.train_mlp,
            train_unembed=create.train_unembed,
        )  # fmt: skip
        model = self._add(queue_id, spec)
        if source is not None:
            with self._removed_on_error(queue_id), _checkpoint_errors():
                self._fill(model, source, create.optimizer)

    def load(self, queue_id: str, load: Load, source: Path) -> None:
        """Replace a model's weights by those of a checkpoint; a failure changes nothing."""
        with _checkpoint_errors():
            self._fill(self[queue_id], source, load.optimizer)

    def save(self, queue_id: str, save: Save) -> tuple[SavedAdapter, Mapping[str, Any]]:
        """Copy a model for a checkpoint; return the copy and the columns of the checkpoint's row."""
        model = self[queue_id]
        if save.kind == "weights":  # training that starts from it has no pending gradients
            copied = self._engine.snapshot(model.ref, gradient=False)
        elif save.kind in ("sampler_weights", "external_weights"):
            copied = self._engine.export(model.ref, self._base)
        else:
            raise UserError(f"unknown kind of checkpoint {save.kind!r}")
        return copied, {name: getattr(model.spec, name) for name in _SHAPE}

    def snapshot(self, queue_id: str) -> SavedAdapter:
        """Copy the complete state of a model, pending gradients included."""
        return self._engine.snapshot(self[queue_id].ref)

    def restore(self, queue_id: str, folder: Path) -> None:
        """Create a model from a snapshot, replacing the model with this id."""
        with _checkpoint_errors():
            spec = self._engine.read_spec(folder)
            if spec is None:
                raise CheckpointError(f"no snapshot found in {folder}")
            self.remove(queue_id)
            model = self._add(queue_id, spec)
            with self._removed_on_error(queue_id):
                self._engine.restore(model.ref, folder)

    @contextmanager
    def embedding(self, embed: Embed, source: Path | None) -> Iterator[AdapterRef]:
        """Yield the adapter of a request for vectors: that of a model, or a temporary one with a checkpoint."""
        if embed.model is not None or source is None:
            yield self[embed.model or ""].ref
            return
        with _checkpoint_errors():
            shape = {name: getattr(embed, name) for name in _SHAPE}
            spec = self._engine.read_spec(source)
            self._count += 1
            ref = self._engine.add(f"model-{self._count}", spec or AdapterSpec(**shape))
            try:
                if spec is None:
                    self._engine.load(ref, source)
                else:
                    self._engine.restore(ref, source)
                yield ref
            finally:
                self._engine.remove(ref)

    def remove(self, queue_id: str) -> None:
        """Remove a model and zero its weights; no-op if no model has this id."""
        if (model := self._models.pop(queue_id, None)) is not None:
            self._engine.remove(model.ref)

    def _add(self, queue_id: str, spec: AdapterSpec) -> Model:
        if queue_id in self._models:
            raise UserError(f"model {queue_id!r} already exists")
        self._count += 1
        model = self._models[queue_id] = Model(self._engine.add(f"model-{self._count}", spec), spec)
        with self._removed_on_error(queue_id):
            self._reset_optimizer(model)
        return model

    def _fill(self, model: Model, source: Path, optimizer: bool) -> None:
        spec = self._engine.read_spec(source)
        if spec is None:
            if optimizer:
                raise UserError("this checkpoint contains only weights; load it without the optimizer state")
            self._engine.load(model.ref, source)
            self._reset_optimizer(model)
            return
        for name in _SHAPE:
            own, saved = getattr(model.spec, name), getattr(spec, name)
            if own != saved:
                raise UserError(f"{name} of the checkpoint must equal that of the model ({own}), got {saved}")
        self._engine.restore(model.ref, source)
        if not optimizer:
            self._reset_optimizer(model)

    def _reset_optimizer(self, model: Model) -> None:
        first = OptimStep()
        self._engine.set_optimizer(
            model.ref, "AdamW", lr=first.learning_rate, betas=(first.beta1, first.beta2), eps=first.eps,
            weight_decay=first.weight_decay,
        )  # fmt: skip

    @contextmanager
    def _removed_on_error(self, queue_id: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.remove(queue_id)
            raise


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise damaged_checkpoint(error) from error


@dataclass(slots=True)
class Pass:
    """A forward or forward_backward of one model.

    Attributes:
        queue_id: id of the model.
        payload: a serialized `ForwardBackwardRequest`; its `forward_only` decides whether gradients are added.
        number: number of the operation, a seed of dropout.
        composition: composition of an earlier run of the operation; see `twinkle.engine.Operation`.
    """

    queue_id: str
    payload: bytes
    number: int
    composition: Composition | None = None


@dataclass(slots=True)
class Cost:
    """What a call of `run` cost.

    Attributes:
        tokens: tokens of the operations.
        padded: padding tokens that were computed.
        flops: floating-point operations.
        compositions: composition of the operations whose numbers depend on it, by their index in the call.
    """

    tokens: int = 0
    padded: int = 0
    flops: float = 0.0
    compositions: Mapping[int, Composition] = field(default_factory=dict)


class Executor:
    """Executes operations on an engine. All methods are called from one thread.

    An error of one operation affects only that operation. A method that raises has changed nothing and may be called
    again with fewer operations; after an `EngineFault` the process must end.

    Args:
        engine: trains and samples.
        name: name of the base model for clients.
        losses: the losses that requests may name; the default is those of Twinkle and of the engine.
        custom_losses: whether clients may send loss graphs.
        custom_seconds: time limit of such a loss for one operation.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        losses: Losses | None = None,
        *,
        custom_losses: bool = False,
        custom_seconds: float = Limits().graph_seconds,
    ) -> None:
        self.engine = engine
        about = engine.describe()
        self._losses = Losses() if losses is None else losses
        self._native_losses = about.losses
        self._info = ModelInfo(
            name=name,
            context=about.context,
            vocabulary=about.vocabulary,
            architecture=about.architecture,
            tokenizer="" if about.tokenizer is None else str(about.tokenizer),
            losses=self._losses.names(about.losses),
            paths=about.paths,
        )
        self._custom_losses, self._custom_seconds = custom_losses, custom_seconds
        self._models = Models(engine, name)
        versions = Versions(engine)
        self._samples = Samples(engine, self._info, versions)
        self._entries: list[Entry] = []
        self._streams = Streams(engine, versions, lambda queue_id: engine.version(self._models[queue_id].ref))

    def describe(self) -> ModelInfo:
        """Return the description of the base model."""
        return self._info

    @property
    def interruptible(self) -> bool:
        """Whether `run` calls the function given to `interrupt`."""
        return "interrupt" in self.engine.describe().features

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens of a forward pass of the engine."""
        return self.engine.pass_tokens

    # Training

    def run(self, passes: Sequence[Pass]) -> tuple[list[bytes | Exception], Cost]:
        """Run passes of several models together; return the serialized `ForwardBackwardOutput` or the error of each."""
        results: list[bytes | Exception] = [UserError("not done")] * len(passes)
        operations: list[tuple[int, Operation, Rows]] = []
        for index, item in enumerate(passes):
            try:
                operations.append((index, *self._read(item)))
            except Exception as error:  # the constructor of a plugin's loss may raise anything
                results[index] = public_error(error)
        cost = Cost()
        compositions: dict[int, Composition] = {}
        outcomes = self.engine.run([operation for _, operation, _ in operations]) if operations else []
        for (index, _, rows), outcome in zip(operations, outcomes, strict=True):
            results[index] = _output(outcome, rows)
            if isinstance(outcome, OperationResult):
                cost.tokens += outcome.usage.tokens
                cost.padded += outcome.usage.padded
                cost.flops += outcome.usage.flops
                if outcome.composition:
                    compositions[index] = Composition(outcome.composition)
        cost.compositions = compositions
        return results, cost

    def interrupt(self, between: Callable[[], None]) -> None:
        """Set the function to call between forward passes; it may sample."""
        self.engine.interrupt(between)

    def _read(self, item: Pass) -> tuple[Operation, Rows]:
        model = self._models[item.queue_id]
        request = read_request(item.payload)
        context, vocabulary = self._info.context, self._info.vocabulary
        try:
            config = codec.loss_config(request)
        except ValueError as error:
            raise UserError(str(error)) from error
        options: Mapping[str, Any] = {}
        loss: Any
        if self._custom_losses and request.loss_fn == CUSTOM:
            from twinkle_server.engine.losses import custom  # imports torch

            rows = read_rows(request, context, vocabulary, ())
            loss = custom.build(config, rows, self._custom_seconds)
        elif request.loss_fn in self._native_losses:
            rows = read_rows(request, context, vocabulary, ())
            loss, options = request.loss_fn, config
        else:
            spec = self._losses.find(request.loss_fn)
            rows = read_rows(
                request, context, vocabulary, accepted_inputs(spec), ignored_inputs(spec), SEQUENCES in spec.inputs
            )
            loss = self._losses.build(spec, config, rows, queue_id=item.queue_id, number=item.number)
        kind: Literal["forward", "forward_backward"] = "forward" if request.forward_only else "forward_backward"
        features: Any = rows.features
        operation = Operation(
            model.ref, kind, features, loss, rows.inputs, number=item.number, loss_options=options,
            composition=None if item.composition is None else item.composition.passes,
        )  # fmt: skip
        return operation, rows

    def step(self, steps: Sequence[tuple[str, OptimStep]]) -> list[Mapping[str, float] | Exception]:
        """Update several models together; return the metrics or the error of each.

        A gradient that is not finite is dropped, the weights stay, and the metric `skipped` is 1.
        """
        results: list[Mapping[str, float] | Exception] = [UserError("not done")] * len(steps)
        ready: list[tuple[int, Step]] = []
        for index, (queue_id, step) in enumerate(steps):
            try:
                ready.append((index, _step_of(self._models[queue_id].ref, step)))
            except UserError as error:
                results[index] = error
        outcomes = self.engine.step([step for _, step in ready]) if ready else []
        for (index, _), outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, OperationError) and isinstance(outcome.error, NonFiniteError):
                results[index] = {"skipped": 1.0}  # not a failure: it has an effect, and failures are not replayed
            elif isinstance(outcome, OperationError):
                results[index] = public_error(outcome.error)
            else:
                results[index] = {"grad_norm": float(outcome.grad_norm)}
        return results

    # Models

    def create(self, queue_id: str, create: Create, source: Path | None) -> None:
        """Create a model, from a checkpoint's folder if `source` is given."""
        with public_errors():
            self._models.create(queue_id, create, source)

    def save(self, queue_id: str, save: Save) -> tuple[SavedAdapter, Mapping[str, Any]]:
        """Copy a model for a checkpoint; return the copy and the columns of the checkpoint's row (`rank`, ...)."""
        with public_errors():
            return self._models.save(queue_id, save)

    def load(self, queue_id: str, load: Load, source: Path) -> None:
        """Replace a model's weights by those of a checkpoint."""
        with public_errors():
            self._models.load(queue_id, load, source)

    def remove(self, queue_id: str) -> None:
        """Remove a model and zero its weights; no-op if no model has this id."""
        if self._losses.workers is not None:
            self._losses.workers.forget(queue_id)
        with public_errors():
            self._models.remove(queue_id)

    def snapshot(self, queue_id: str) -> SavedAdapter:
        """Copy the complete state of a model, pending gradients included."""
        with public_errors():
            return self._models.snapshot(queue_id)

    def restore(self, queue_id: str, folder: Path) -> None:
        """Create a model from a snapshot, replacing the model with this id."""
        with public_errors():
            self._models.restore(queue_id, folder)

    def drop_plugins(self) -> None:
        """End the worker processes of revoked plugins."""
        self._losses.end_dropped()

    # Sampling

    def sample(self, key: int, sample: Sample, source: Path | None) -> None:
        """Submit a sampling request; raises its error if it is invalid."""
        with public_errors():
            self._samples.submit(key, sample, source)

    def generate(self, key: int, generate: Generate, source: Path | None) -> None:
        """Submit a streamed request; raises its error if it is invalid."""
        with public_errors():
            self._streams.submit(key, generate, source)

    def embed(self, embed: Embed, source: Path | None) -> bytes:
        """Return the vectors of texts, as float32 `[N, H]` in one piece."""
        rows: Any = [{"input_ids": tokens} for tokens in embed.rows]
        with public_errors(), self._models.embedding(embed, source) as ref:
            (outcome,) = self.engine.run([Operation(ref, "forward", rows, options={"task": "embedding"})])
            if isinstance(outcome, OperationError):
                raise outcome.error
            vectors: list[Any] = [_on_host(output["embeddings"]) for output in outcome.outputs]
            return np.asarray([np.asarray(vector) for vector in vectors], np.float32).tobytes()

    def decode(self) -> list[Sampled]:
        """Run one decode step; return the requests that have ended, and the streamed requests that failed."""
        if not self.sampling:
            return []
        with public_errors():
            self.engine.decode()
            self._entries, failed = self._streams.collect()
            return self._samples.collect() + failed

    def streamed(self) -> list[Entry]:
        """Return what streamed requests have sampled in the last decode step."""
        entries, self._entries = self._entries, []
        return entries

    @property
    def sampling(self) -> int:
        """Number of sampling requests that have not ended."""
        return len(self._samples) + len(self._streams)

    def cancel(self, key: int) -> None:
        """Cancel a sampling request; no-op if it has ended."""
        self._samples.cancel(key)
        self._streams.cancel(key)


def _step_of(ref: Any, step: OptimStep) -> Step:
    checks = {
        "learning_rate": (step.learning_rate, 0.0, math.inf),
        "beta1": (step.beta1, 0.0, 1.0),
        "beta2": (step.beta2, 0.0, 1.0),
        "eps": (step.eps, 0.0, math.inf),
        "weight_decay": (step.weight_decay, 0.0, math.inf),
        "grad_clip_norm": (step.grad_clip_norm, 0.0, math.inf),
    }
    for name, (value, least, below) in checks.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value < below:
            limit = "a finite number of at least 0" if below == math.inf else "a number in [0, 1)"
            raise UserError(f"adam_params.{name} must be {limit}, got {value!r}")
    options = {
        "lr": step.learning_rate, "betas": (step.beta1, step.beta2), "eps": step.eps,
        "weight_decay": step.weight_decay,
    }  # fmt: skip
    return Step(ref, step.grad_clip_norm, options, divide=False, zero_if_none=True)


def _output(outcome: OperationResult | OperationError, rows: Rows) -> bytes | Exception:
    if isinstance(outcome, OperationError):
        return public_error(outcome.error)
    outputs = []
    for output, shape in zip(outcome.outputs, rows.shapes, strict=True):
        if "logps" not in output:
            return UserError("this loss does not return token logprobs; use another loss")
        outputs.append({"logprobs": np.asarray(_on_host(output["logps"]), np.float32).reshape(shape)})
    metrics = dict(_metric(name, float(value), len(rows.shapes)) for name, value in outcome.metrics.items())
    metrics["loss:sum"] = float(outcome.loss_sum or 0.0)
    return codec.forward_backward_output(outputs, metrics)


def _on_host(logps: Any) -> Any:
    """Return log-probabilities for numpy; a torch tensor may be on a device, or in bfloat16."""
    return logps.float().cpu() if hasattr(logps, "cpu") else logps


def _metric(name: str, total: float, rows: int) -> tuple[str, float]:
    """Return the name and value of a metric for clients, from its sum over the rows; custom losses keep their names."""
    if name.startswith("custom/"):
        return name, total / rows if name.endswith(":mean") else total
    return f"{name.replace(':', '_')}:sum", total  # clients split names at the colon
