"""Executes operations on an engine: reads their payloads, runs them, and serializes their results.

The models of tenants are adapters of the engine: created, saved, loaded, restored and removed (`Models`).
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from twinkle.engine import (
    AdapterRef,
    AdapterSpec,
    Engine,
    Operation,
    OperationError,
    OperationResult,
    SavedAdapter,
    Step,
    StepResult,
)
from twinkle.errors import CheckpointError, NonFiniteError
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import NotInMemory, UserError, damaged_checkpoint, public_error, public_errors
from twinkle_server.engine.exports import WithExport, exported_spec
from twinkle_server.engine.losses.building import SEQUENCES, read_request, read_rows
from twinkle_server.engine.losses.catalog import CUSTOM, OWN, PUBLISHED, Losses, accepted_inputs, ignored_inputs
from twinkle_server.engine.losses.published import read_call
from twinkle_server.engine.native.models import Finish, NativeModels, Noted
from twinkle_server.engine.native.state import read_spec
from twinkle_server.engine.outputs import native_rows, output_of, sums_of, trained_rows, vectors_of
from twinkle_server.engine.queues import Composition
from twinkle_server.engine.recording import Recorded, Recorder, TrainedRow
from twinkle_server.engine.samples import Sampled, Samples, Versions
from twinkle_server.engine.streams import Entry, Streams
from twinkle_server.operations import Create, Embed, Generate, Load, ModelInfo, OptimStep, Sample, Save
from twinkle_server.settings import Limits
from twinkle_server.wire import codec

_log = logging.getLogger(__name__)
_SHAPE = ("rank", "train_attn", "train_mlp", "train_unembed")
_KIND = (*_SHAPE, "targets", "alpha", "dropout", "rank_pattern", "alpha_pattern", "exclude", "rslora")


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
    """The models that are in memory, by id; their native calls are `native`.

    Args:
        engine: holds their adapters.
        info: of the base model.
        losses: the losses that requests may name.
        in_process: distributions beside Twinkle's whose components may run in this process.
        recorder: records figures and rollouts of operations that train.
    """

    def __init__(self, engine: Engine, info: ModelInfo, losses: Losses, in_process: Sequence[str] = ()) -> None:
        self._engine, self._base = engine, info.name
        self._models: dict[str, Model] = {}
        self._count = 0
        self.native = NativeModels(engine, self, losses, info, in_process)

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

    def ref(self, queue_id: str) -> AdapterRef:
        """Return the adapter of a model; see `__getitem__`."""
        return self[queue_id].ref

    def create(self, queue_id: str, create: Create, source: Path | None) -> None:
        """Create a model with fresh weights, or with those of a checkpoint.

        Raises:
            UserError: the id is taken, or the rank or the checkpoint is invalid.
            CapacityError: there is not enough memory.
        """
        if (
            isinstance(create.rank, bool)
            or not isinstance(create.rank, int)
            or create.rank < (0 if create.native else 1)
        ):
            raise UserError(f"rank must be an integer of at least 1, got {create.rank!r}")
        if create.rank == 0 and "full_parameters" not in self._engine.describe().features:
            raise UserError(
                f"this engine ({type(self._engine).__name__}) trains adapters only; it has no feature 'full_parameters'"
            )
        spec = AdapterSpec(
            create.rank, create.seed, create.alpha, create.dropout, create.train_attn, create.train_mlp,
            create.train_unembed, _names(create.targets), _pairs(create.rank_pattern), _pairs(create.alpha_pattern),
            _names(create.exclude) or (), create.rslora, create.init,
        )  # fmt: skip
        with _checkpoint_errors():
            saved = None if source is None else self._engine.read_spec(source) or read_spec(source)
        if saved is not None:  # the row of a checkpoint has neither scale nor layers
            spec = replace(saved, seed=spec.seed, **{name: getattr(spec, name) for name in _SHAPE})
        model = self._add(queue_id, spec)
        with self._removed_on_error(queue_id):
            if create.native:
                self.native.create(queue_id, create.accumulation)
            if source is not None:
                with _checkpoint_errors():
                    if create.native and create.optimizer:
                        self.native.begin_with(queue_id, source)
                    self._fill(model, source, create.optimizer)

    def load(self, queue_id: str, load: Load, source: Path) -> Mapping[str, Any]:
        """Replace a model's weights by those of a checkpoint; a failure changes nothing.

        Returns:
            the counters of a native model.
        """
        model = self[queue_id]
        with _checkpoint_errors():
            if not load.native:
                self._fill(model, source, load.optimizer)
                return {}
            if load.optimizer:
                self._fill(model, source, optimizer=True)
            else:
                self._engine.load(model.ref, source)
            self.native.adopt(queue_id, source)
        return self.native.progress(queue_id)

    def save(self, queue_id: str, save: Save) -> tuple[SavedAdapter, Mapping[str, Any]]:
        """Copy a model for a checkpoint; return the copy and the columns of the checkpoint's row."""
        model = self[queue_id]
        copied: SavedAdapter
        if save.kind == "weights" and save.native:
            copies = []
            if model.spec.rank or not save.optimizer:  # the snapshot of a full model has all files of its export
                copies.append(self._engine.export(model.ref, self._base))
            if save.optimizer:
                copies.append(self._engine.snapshot(model.ref, gradient=False))
            copied = self.native.checkpoint(queue_id, model.spec, save.consumed, *copies)
        elif save.kind == "weights":  # training that starts from it has no pending gradients
            state = self._engine.snapshot(model.ref, gradient=False)
            copied = WithExport(state, self._engine.export(model.ref, self._base))
        elif save.kind in ("sampler_weights", "external_weights"):
            copied = self._engine.export(model.ref, self._base)
        else:
            raise UserError(f"unknown kind of checkpoint {save.kind!r}")
        return copied, {name: getattr(model.spec, name) for name in _SHAPE}

    def present(self, queue_id: str) -> Model:
        """Return a model that the service has attached.

        Raises:
            NotInMemory: its restore failed.
        """
        if queue_id not in self._models:
            raise NotInMemory(queue_id)
        return self._models[queue_id]

    def snapshot(self, queue_id: str) -> SavedAdapter:
        """Copy the complete state of a model, pending gradients included."""
        model = self[queue_id]
        return self.native.snapshot(queue_id, model.spec, self._engine.snapshot(model.ref))

    def restore(self, queue_id: str, folder: Path) -> None:
        """Create a model from a snapshot, replacing the model with this id."""
        with _checkpoint_errors():
            spec = self._engine.read_spec(folder)
            if spec is None:
                raise CheckpointError(f"no snapshot found in {folder}")
            self.remove(queue_id)
            model = self._add(queue_id, spec)
            with self._removed_on_error(queue_id):
                state = self.native.prepare(queue_id, folder)
                self._engine.restore(model.ref, folder)
                if state is not None:
                    self.native.resume(queue_id, state, lambda: self._engine.restore(model.ref, folder))

    @contextmanager
    def embedding(self, embed: Embed, source: Path | None) -> Iterator[AdapterRef]:
        """Yield the adapter of a request for vectors: that of a model, or a temporary one with a checkpoint."""
        if embed.model is not None or source is None:
            yield self.present(embed.model or "").ref
            return
        with _checkpoint_errors():
            snapshot = self._engine.read_spec(source)
            shape = AdapterSpec(**{name: getattr(embed, name) for name in _SHAPE})
            self._count += 1
            ref = self._engine.add(f"model-{self._count}", snapshot or exported_spec(source, shape))
            try:
                if snapshot is None:
                    self._engine.load(ref, source)
                else:
                    self._engine.restore(ref, source)
                yield ref
            finally:
                self._engine.remove(ref)

    def remove(self, queue_id: str) -> None:
        """Remove a model and zero its weights; no-op if no model has this id."""
        if (model := self._models.get(queue_id)) is not None:
            self.native.forget(queue_id)
            del self._models[queue_id]
            self._engine.remove(model.ref)

    def places(self) -> dict[str, list[int]]:
        """Return the bytes of each model on the device, in host memory, and on disk."""
        sizes = {queue_id: self._engine.bytes_of(model.ref) for queue_id, model in self._models.items()}
        return {queue_id: [size.device, size.host, size.disk] for queue_id, size in sizes.items()}

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
        for name in _KIND:
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


def _names(layers: Sequence[str] | None) -> tuple[str, ...] | str | None:
    """Return layers of the log as `AdapterSpec` has them: names, or a pattern."""
    return layers if layers is None or isinstance(layers, str) else tuple(layers)


def _pairs(pattern: Sequence[Sequence[Any]] | None) -> tuple[tuple[str, Any], ...]:
    """Return a pattern of the log as `AdapterSpec` has it."""
    return tuple((key, value) for key, value in pattern or ())


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
        payload: a serialized `ForwardBackwardRequest`; its `forward_only` decides whether gradients are added. Of a
            native pass, the call.
        number: number of the operation, a seed of dropout.
        composition: composition of an earlier run of the operation; see `twinkle.engine.Operation`.
        native: whether it is a native call.
        record: whether to record its figures and rollouts; a replay was recorded before.
    """

    queue_id: str
    payload: bytes
    number: int
    composition: Composition | None = None
    native: bool = False
    record: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """A pass as an operation of the engine.

    Attributes:
        operation: the operation.
        finish: makes the result of the pass.
        trained: returns the rows for the recorder.
    """

    operation: Operation
    finish: Finish
    trained: Callable[[OperationResult], Sequence[TrainedRow]]


Ended = Callable[[int, bytes | Exception, "Cost"], None]
"""Called with the index of a pass, its result, and the cost of the call so far."""


Stepped = bytes | Noted | Mapping[str, float] | Exception
"""The result of a step: a native call's, the metrics of another, or the error."""


@dataclass(slots=True)
class Cost:
    """What a call of `run` cost.

    Attributes:
        tokens: tokens of the operations.
        padded: padding tokens that were computed.
        flops: floating-point operations.
        compositions: composition of the operations whose numbers depend on it, by their index in the call.
        recorded: what is recorded of the operations that train, by their index in the call.
    """

    tokens: int = 0
    padded: int = 0
    flops: float = 0.0
    compositions: dict[int, Composition] = field(default_factory=dict)
    recorded: dict[int, Recorded] = field(default_factory=dict)


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
        in_process: distributions beside Twinkle's whose components may run in this process.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        losses: Losses | None = None,
        *,
        custom_losses: bool = False,
        custom_seconds: float = Limits().graph_seconds,
        in_process: Sequence[str] = (),
        recorder: Recorder = Recorder(),  # noqa: B008
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
            own_losses=self._losses.own_names(),
            paths=about.paths,
        )
        self._custom_losses, self._custom_seconds = custom_losses, custom_seconds
        self._recorder = recorder
        self._ended: Callable[[int, OperationResult | OperationError], None] | None = None
        engine.report(self._report)
        self._models = Models(engine, self._info, self._losses, in_process)
        versions = Versions(engine)
        self._samples = Samples(engine, self._info, versions)
        self._entries: list[Entry] = []
        self._streams = Streams(engine, versions, lambda queue_id: engine.version(self._models.present(queue_id).ref))

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

    def run(self, passes: Sequence[Pass], ended: Ended | None = None) -> tuple[list[bytes | Exception], Cost]:
        """Run passes of several models together.

        Args:
            passes: the passes.
            ended: called for each pass as soon as it has ended, also if this method raises later; those of one model in
                any order.

        Returns:
            for each the serialized `ForwardBackwardOutput`, the frame of a native call, or the error.
        """
        results: list[bytes | Exception | None] = [None] * len(passes)
        cost = Cost()
        readings: list[tuple[int, Reading]] = []
        trained: Counter[str] = Counter()

        def put(index: int, result: bytes | Exception) -> None:
            results[index] = result
            if ended is not None:
                ended(index, result, cost)

        def take(place: int, outcome: OperationResult | OperationError) -> None:
            index, reading = readings[place]
            if results[index] is None:
                result = reading.finish(outcome)
                if isinstance(outcome, OperationResult):
                    self._add(cost, index, passes[index], reading, outcome, result)
                put(index, result)

        for index, item in enumerate(passes):
            try:
                readings.append((index, self._read(item, trained)))
            except Exception as error:  # the constructor of a plugin's loss may raise anything
                put(index, public_error(error))
        self._ended = take
        try:
            outcomes = self.engine.run([reading.operation for _, reading in readings]) if readings else []
        finally:
            self._ended = None
        for place, outcome in enumerate(outcomes):
            take(place, outcome)
        return [UserError("not done") if result is None else result for result in results], cost

    def _report(self, place: int, outcome: OperationResult | OperationError) -> None:
        """Take the result of an operation of the current call of the engine."""
        if self._ended is not None:
            self._ended(place, outcome)

    def _add(
        self, cost: Cost, index: int, item: Pass, reading: Reading, outcome: OperationResult, result: bytes | Exception
    ) -> None:
        """Add what an operation cost, and record it if it trains."""
        operation = reading.operation
        if operation.kind == "forward_backward" and item.record and not isinstance(result, Exception):
            self._record(cost, index, reading, outcome)
        cost.tokens += outcome.usage.tokens
        cost.padded += outcome.usage.padded
        cost.flops += outcome.usage.flops
        number = operation.number if item.native else None
        if outcome.composition or number is not None:
            cost.compositions[index] = Composition(outcome.composition, number)

    def _record(self, cost: Cost, index: int, reading: Reading, outcome: OperationResult) -> None:
        """Record an operation; it has had its effect, so an error here must not fail it."""
        try:
            cost.recorded[index] = self._recorder.record(reading.trained(outcome), *sums_of(outcome))
        except (ArithmeticError, LookupError, TypeError, ValueError):
            _log.exception("the figures of an operation were not recorded")

    def interrupt(self, between: Callable[[], None]) -> None:
        """Set the function to call between forward passes; it may sample."""
        self.engine.interrupt(between)

    def _read(self, item: Pass, trained: Counter[str]) -> Reading:
        """Return the operation of a pass, and what makes its result.

        Args:
            item: the pass.
            trained: number of native passes of each model so far in this run.
        """
        model = self._models[item.queue_id]
        if item.native:
            number = None if item.composition is None else item.composition.number
            if number is None:
                number = self.engine.progress(model.ref).cur_step + trained[item.queue_id]
            native, ended = self._models.native.operation(item.queue_id, item.payload, number, item.composition)
            trained[item.queue_id] += native.kind == "forward_backward"
            return Reading(native, ended, lambda outcome: native_rows(native, outcome))
        if not model.spec.rank:
            raise UserError("a full-parameter model is trained through the native client; this call is of another")
        request = read_request(item.payload)
        context, vocabulary = self._info.context, self._info.vocabulary
        try:
            asked = read_call(request, codec.loss_config(request), strict=self._losses.strict)
        except ValueError as error:
            raise UserError(str(error)) from error
        options: Mapping[str, Any] = {}
        loss: Any
        plugin: ComponentSpec | None = None
        code: Mapping[str, str] | None = None
        if self._custom_losses and request.loss_fn == CUSTOM:
            from twinkle_server.engine.losses import custom  # imports torch

            rows = read_rows(request, context, vocabulary, ())
            loss = custom.build(asked.options, rows, self._custom_seconds)
            code = loss.code
        elif asked.loss in self._native_losses:
            rows = read_rows(request, context, vocabulary, ())
            loss, options = asked.loss, asked.options
        else:
            spec = self._losses.find_for_tokens(asked.loss)
            ignored = (*ignored_inputs(spec), *asked.ignored)
            rows = read_rows(request, context, vocabulary, accepted_inputs(spec), ignored, SEQUENCES in spec.inputs)
            loss = self._losses.build(spec, asked.options, rows, queue_id=item.queue_id, number=item.number)
            plugin = None if spec.name in (*PUBLISHED, *OWN) else spec
        kind: Literal["forward", "forward_backward"] = "forward" if request.forward_only else "forward_backward"
        features: Any = rows.features
        operation = Operation(
            model.ref if asked.adapted else None, kind, features, loss, rows.inputs, number=item.number,
            loss_options=options,
            composition=None if item.composition is None else item.composition.passes,
        )  # fmt: skip

        def finish(outcome: OperationResult | OperationError) -> bytes | Exception:
            return output_of(outcome, rows, code if plugin is None else self._losses.code_of(plugin, loss))

        return Reading(operation, finish, lambda outcome: trained_rows(rows, outcome))

    def step(self, steps: Sequence[tuple[str, OptimStep | bytes]]) -> list[Stepped]:
        """Update several models together.

        Args:
            steps: id of each model, and its step; that of a native call is its payload.

        Returns:
            the metrics of each, the frame of a native call, or the error. A gradient that is not finite is dropped, the
            weights stay, and the metric `skipped` is 1.
        """
        results: list[Stepped] = [UserError("not done")] * len(steps)
        ready: list[tuple[int, Step, Callable[[Any], Stepped]]] = []
        for index, (queue_id, step) in enumerate(steps):
            try:
                read = self._read_step(queue_id, step)
            except UserError as error:
                results[index] = error
            else:
                if isinstance(read, bytes | Noted):
                    results[index] = read
                else:
                    ready.append((index, *read))
        outcomes = self.engine.step([step for _, step, _ in ready]) if ready else []
        for (index, _, finish), outcome in zip(ready, outcomes, strict=True):
            results[index] = finish(outcome)
        return results

    def _read_step(
        self, queue_id: str, step: OptimStep | bytes
    ) -> tuple[Step, Callable[[Any], Stepped]] | bytes | Noted:
        """Return a step and what makes its result, or the result of a native call that steps nothing."""
        if isinstance(step, bytes):
            with public_errors():
                return self._models.native.step(queue_id, step)
        self._models.native.refuse_other_steps(queue_id)
        return _step_of(self._models[queue_id].ref, step), _step_metrics

    def call(self, queue_id: str, payload: bytes) -> bytes | Noted:
        """Execute a native call that runs alone; return its result."""
        with public_errors():
            return self._models.native.call(queue_id, payload)

    # Models

    def create(self, queue_id: str, create: Create, source: Path | None) -> None:
        """Create a model, from a checkpoint's folder if `source` is given."""
        with public_errors():
            self._models.create(queue_id, create, source)

    def save(self, queue_id: str, save: Save) -> tuple[SavedAdapter, Mapping[str, Any]]:
        """Copy a model for a checkpoint; return the copy and the columns of the checkpoint's row (`rank`, ...)."""
        with public_errors():
            return self._models.save(queue_id, save)

    def load(self, queue_id: str, load: Load, source: Path) -> Mapping[str, Any]:
        """Replace a model's weights by those of a checkpoint; return the counters of a native model."""
        with public_errors():
            return self._models.load(queue_id, load, source)

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

    def embeds(self, queue_id: str) -> bool:
        """Return whether a model was trained for embeddings, by native calls."""
        return self._models.native.embeds(queue_id)

    def places(self) -> dict[str, list[int]]:
        """Return where each model's adapter is: its bytes on the device, in host memory, and on disk."""
        return self._models.places()

    def drop_plugins(self) -> None:
        """End the worker processes of revoked plugins."""
        self._losses.end_dropped()

    # Sampling

    def sample(self, key: int, sample: Sample, source: Path | None, cache_salt: str | None = None) -> None:
        """Submit a sampling request; raises its error if it is invalid."""
        with public_errors():
            self._samples.submit(key, sample, source, cache_salt)

    def generate(self, key: int, generate: Generate, source: Path | None, cache_salt: str | None = None) -> None:
        """Submit a streamed request; raises its error if it is invalid."""
        with public_errors():
            self._streams.submit(key, generate, source, cache_salt)

    def embed(self, embed: Embed, source: Path | None) -> bytes:
        """Return the vectors of texts, as float32 `[N, H]` in one piece."""
        rows: Any = [{"input_ids": tokens} for tokens in embed.rows]
        with public_errors(), self._models.embedding(embed, source) as ref:
            (outcome,) = self.engine.run([Operation(ref, "forward", rows, options={"task": "embedding"})])
            if isinstance(outcome, OperationError):
                raise outcome.error
            return vectors_of(outcome)

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


def _step_metrics(outcome: StepResult | OperationError) -> Mapping[str, float] | Exception:
    if isinstance(outcome, OperationError) and isinstance(outcome.error, NonFiniteError):
        return {"skipped": 1.0}  # not a failure: it has an effect, and failures are not replayed
    if isinstance(outcome, OperationError):
        return public_error(outcome.error)
    return {"grad_norm": float(outcome.grad_norm)}


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
