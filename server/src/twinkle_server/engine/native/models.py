"""Native calls on the models of an engine: their components, passes, steps, and all other calls."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from twinkle.engine import (
    AdapterRef,
    AdapterSpec,
    Engine,
    Operation,
    OperationError,
    OperationResult,
    Progress,
    SavedAdapter,
    Step,
    StepResult,
)
from twinkle.errors import EngineFault, NonFiniteError, TwinkleError, Unsupported
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError, is_passing, public_error
from twinkle_server.engine.losses.catalog import Losses
from twinkle_server.engine.losses.given import given_loss
from twinkle_server.engine.native import components
from twinkle_server.engine.native.calls import Call, failure, success
from twinkle_server.engine.native.rows import batch_of, check_cells, on_host, read_rows, writable
from twinkle_server.engine.native.state import Named, NativeState, Staged, WithState
from twinkle_server.engine.native.templates import Templates
from twinkle_server.engine.queues import Composition
from twinkle_server.engine.recording import NO_TARGET
from twinkle_server.operations import EMBEDDING, ModelInfo

Finish = Callable[[OperationResult | OperationError], bytes | Exception]
"""Returns the result of a call from that of its operation."""
_MAX_METRICS: Final = 32
_MAX_PENDING: Final = 2**22
"""Maximum number of tokens of backward calls between two steps: metrics keep their outputs."""
_MAX_STATE: Final = 2**26
"""Maximum number of weights of a state that is sent."""
_PATH_OF_MODEL: Final = re.compile(r"^(model\s+).*(?= \([\d,]+ parameters)", re.MULTILINE)
_NAME_OF_ADAPTER: Final = re.compile(r"^(adapter\s+)model-\d+: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Noted:
    """The result of a call that has figures for `recording`.

    Attributes:
        frame: the result.
        figures: of an optimizer step: `lr`, `grad_norm`, and `skipped` where the weights stayed; of a `backward`:
            `loss`, `tokens` and `rows`.
    """

    frame: bytes
    figures: Mapping[str, float]


class Refs(Protocol):
    """Finds the adapters of models."""

    def ref(self, queue_id: str) -> AdapterRef:
        """Return the adapter of a model.

        Raises:
            UserError: the model does not exist.
        """


class NativeModels:
    """Executes native calls. The state of a model is created with its first native call.

    Args:
        engine: has the adapters.
        refs: finds the adapter of a model.
        losses: the losses that requests may name.
        info: of the base model.
        in_process: distributions beside Twinkle's whose components may run in this process.
    """

    def __init__(
        self, engine: Engine, refs: Refs, losses: Losses, info: ModelInfo, in_process: Sequence[str] = ()
    ) -> None:
        self._engine, self._refs, self._losses, self._info = engine, refs, losses, info
        self._in_process = in_process
        self._states: dict[str, NativeState] = {}
        folder = engine.describe().tokenizer
        self._templates = Templates(None if folder is None else str(folder), in_process)
        self._graph: str | None = None  # the model whose `forward` has a graph in memory; only one has
        self._norms: dict[str, float] = {}  # of gradients that were clipped and wait for `step`, by model
        self._losses_of: dict[str, float] = {}  # last calculated loss of each model, until its `backward`

    # Passes

    def operation(
        self, queue_id: str, payload: bytes, number: int, composition: Composition | None
    ) -> tuple[Operation, Finish]:
        """Return the operation of a `forward_backward` or `forward_only`, and what makes its result.

        Args:
            queue_id: the model.
            payload: the call.
            number: of the operation among the backward calls of its model; it selects dropout masks.
            composition: of an earlier run.
        """
        call, state, ref = Call.parse(payload), self._state(queue_id), self._refs.ref(queue_id)
        arguments = writable(dict(call.arguments))
        rows = self._rows(state, arguments.pop("inputs", None), arguments.get("task"))
        training = call.method == "forward_backward"
        options, inputs = _options_of(arguments), arguments.pop("loss_inputs", {})
        check_cells(options, rows, self._info.vocabulary)
        tokens = sum(len(row["input_ids"]) for row in rows)
        loss: Any = None
        given, apart = arguments.pop("given_loss", None), bool(arguments.pop("rows_apart", False))
        spec = None if state.loss is None or not training or given else self._losses.find(state.loss[0])
        if training:
            _check_pending(state, tokens)
            if given is None:
                loss = self._remote_loss(state, queue_id, number)
            else:
                loss, inputs = given_loss({"denominator": 1.0, **given}, rows, inputs)
        kind: Literal["forward", "forward_backward"] = "forward_backward" if training else "forward"
        features: Any = rows
        operation = Operation(
            None if arguments.pop("disable_lora", False) else ref, kind, features, loss, inputs, options, number,
            None if composition is None else composition.passes, metrics_of=ref,
        )  # fmt: skip

        def finish(outcome: OperationResult | OperationError) -> bytes | Exception:
            if isinstance(outcome, OperationError):
                return public_error(outcome.error)
            self._note_pass(queue_id, state, payload, training, tokens, outcome)
            state.embeds |= training and options.get("task") == EMBEDDING
            batch = _batch(outcome, left=_pads_left(state), apart=apart)
            if spec is not None and (code := self._losses.code_of(spec, loss)) is not None:
                batch["loss_code"] = code
            return success(batch)

        return operation, finish

    def _note_pass(
        self, queue_id: str, state: NativeState, payload: bytes, training: bool, tokens: int, outcome: OperationResult
    ) -> None:
        state.training = training
        if training:
            self._drop_graph(queue_id)
            state.forward = None
            state.pending_tokens += tokens
        else:
            shared = Composition(outcome.composition).dump() if outcome.composition else None
            state.forward_only = Staged(payload, shared)

    # Steps

    def step(
        self, queue_id: str, payload: bytes
    ) -> tuple[Step, Callable[[StepResult | OperationError], bytes | Noted | Exception]] | bytes | Noted:
        """Return the step of a `clip_grad_and_step` and what makes its result, or its result if there is no step."""
        call, state, ref = Call.parse(payload), self._state(queue_id), self._refs.ref(queue_id)
        arguments = dict(call.arguments)
        progress = self._engine.progress(ref)
        accumulation = arguments.get("gradient_accumulation_steps")
        plain = arguments.get("norm_type", 2) == 2 and not arguments.get("flush")
        if not plain or accumulation not in (None, progress.gradient_accumulation_steps) or not progress.pending:
            return self.call(queue_id, payload)
        if progress.pending < progress.gradient_accumulation_steps:
            return success(0.0)

        def finish(outcome: StepResult | OperationError) -> bytes | Noted | Exception:
            state.pending_tokens = 0
            if isinstance(outcome, OperationError):
                skipped = isinstance(outcome.error, NonFiniteError)
                frame = _failed(outcome.error)
                return Noted(frame, _step_figures(progress, skipped=True)) if skipped else frame
            norm = float(outcome.grad_norm)
            return Noted(success(norm), _step_figures(progress, norm, skipped=not outcome.updated))

        return Step(ref, float(arguments.get("max_grad_norm", 1.0))), finish

    # Other calls

    def call(self, queue_id: str, payload: bytes) -> bytes | Noted:
        """Execute a call that runs alone, and return its result.

        Raises:
            EngineFault: the process must end.
            Exception: memory or the disk failed; the call had no effect.
        """
        call = Call.parse(payload)
        state, ref = self._state(queue_id), self._refs.ref(queue_id)
        context = _Context(queue_id, ref, state, payload)
        before = self._engine.progress(ref)
        try:
            method = _METHODS.get(call.method)
            if method is None:
                raise UserError(f"a model has no method {call.method[:80]!r}")
            frame = success(method(self, context, writable(dict(call.arguments))))
            if call.method in _STEPPING and self._engine.progress(ref).updates != before.updates:
                return Noted(frame, _step_figures(before, self._norms.pop(queue_id, None)))
            return frame if context.figures is None else Noted(frame, context.figures)
        except EngineFault:
            raise
        except Exception as error:
            if is_passing(error):
                raise
            frame = _failed(error)
            if isinstance(error, NonFiniteError):  # gradients and their passes are dropped
                state.pending_tokens = 0
                if call.method in _STEPPING:
                    self._norms.pop(queue_id, None)
                    return Noted(frame, _step_figures(before, skipped=True))
            return frame

    def set_component(self, kind: str, context: "_Context", arguments: dict[str, Any]) -> None:
        """Set the optimizer, scheduler or processor of a model."""
        name, options = arguments["name"], arguments.get("options", {})
        spec = components.find(kind, name, self._in_process)
        checked = components.check_options(kind, name, options, self._in_process)
        setter = {"optimizer": "set_optimizer", "scheduler": "set_lr_scheduler", "processor": "set_processor"}[kind]
        self._of_model(setter, context.ref, f"{spec.dist}/{spec.name}", **checked)
        setattr(context.state, kind, (name, options))
        if kind == "optimizer":
            context.state.scheduler = None

    def set_loss(self, context: "_Context", arguments: dict[str, Any]) -> None:
        """Set the loss of a model."""
        named = (arguments["name"], dict(arguments.get("options", {})))
        for option, value in named[1].items():
            components.check_options("loss", named[0], {option: value})
        self._put_loss(context.queue_id, context.ref, named)
        context.state.loss = named

    def set_template(self, context: "_Context", arguments: dict[str, Any]) -> None:
        """Set the template of a model."""
        named = (arguments["name"], dict(arguments.get("options", {})))
        self._templates.get(named)
        context.state.template = named

    def add_metric(self, context: "_Context", arguments: dict[str, Any]) -> None:
        """Add a metric to a model."""
        if len(context.state.metrics) >= _MAX_METRICS:
            raise UserError(f"a model has at most {_MAX_METRICS} added metrics")
        added = (arguments["name"], dict(arguments.get("options", {})), arguments.get("is_training"))
        self._put_metric(context.ref, *added)
        context.state.metrics.append(added)

    def apply_patch(self, context: "_Context", arguments: dict[str, Any]) -> None:
        """Apply a patch to the passes of one model; one that changes the base model is refused."""
        name, options = arguments["name"], dict(arguments.get("options", {}))
        self._put_patch(context.ref, name, options)
        context.state.patches = [entry for entry in context.state.patches if entry[0] != name] + [(name, options)]

    def forward(self, context: "_Context", arguments: dict[str, Any]) -> Any:
        """Run rows in training mode, and keep their graph."""
        outputs = self._forward(context.queue_id, context.ref, context.state, arguments)
        context.state.forward, context.state.training = Staged(context.payload), True
        return {name: on_host(value) for name, value in outputs.items() if name != "predictions" and _is_tensor(value)}

    def _forward(self, queue_id: str, ref: AdapterRef, state: NativeState, arguments: dict[str, Any]) -> Any:
        rows = self._rows(state, arguments.pop("inputs", None), arguments.get("task"))
        options = _options_of(arguments)
        check_cells(options, rows, self._info.vocabulary)
        tokens = sum(len(row["input_ids"]) for row in rows)
        _check_pending(state, tokens)
        if tokens > self._engine.pass_tokens:
            raise UserError(
                f"forward keeps the activations of at most {self._engine.pass_tokens} tokens, got {tokens}; send fewer "
                "rows, or call forward_backward, which splits them"
            )
        self._drop_graph(queue_id)
        outputs = self._of_model("forward", ref, inputs=rows, **options)
        if self._graph is not None and self._graph != queue_id:
            self._forget_graph()
        self._graph = queue_id
        return outputs

    def calculate_loss(self, context: "_Context", arguments: dict[str, Any]) -> float:
        """Calculate the loss of the last forward."""
        state = context.state
        if state.training and state.forward is not None:
            self._recover_graph(context.queue_id, context.ref, state)
        staged = state.forward if state.training else state.forward_only
        self._put_remote_loss(context.queue_id, context.ref, state)
        loss = float(self._of_model("calculate_loss", context.ref, **arguments.get("loss_inputs", {})))
        if staged is not None:
            staged.losses.append(context.payload)
            del staged.losses[:-1]
        if state.training:
            self._losses_of[context.queue_id] = loss
        return loss

    def backward(self, context: "_Context", arguments: dict[str, Any]) -> None:
        """Add the gradients of the last calculated loss."""
        state = context.state
        if state.forward is not None:
            self._recover_graph(context.queue_id, context.ref, state, losses=True)
            rows = self._rows_of(state, state.forward.payload)
            state.pending_tokens += sum(len(row["input_ids"]) for row in rows)
        self._of_model("backward", context.ref)
        if state.forward is not None:
            context.figures = _backward_figures(rows, self._losses_of.pop(context.queue_id, None))
            state.embeds |= Call.parse(state.forward.payload).arguments.get("task") == EMBEDDING
        state.forward, self._graph = None, None

    def of_model(self, name: str, context: "_Context", arguments: dict[str, Any]) -> Any:
        """Call a method of the model that needs nothing of the service."""
        before = self._engine.progress(context.ref).updates
        value = self._of_model(name, context.ref, **arguments)
        if self._engine.progress(context.ref).updates != before:
            context.state.pending_tokens = 0
        if name != "clip_grad_norm":
            return None
        self._norms[context.queue_id] = float(value)
        return float(value)

    def clip_grad_and_step(self, context: "_Context", arguments: dict[str, Any]) -> float:
        """Step one model alone, and return the norm of its gradient."""
        names = [context.ref.name]
        model: Any = self._engine.as_model()
        [norm] = model.clip_grad_and_step(**arguments, adapter_name=names)
        if not self._engine.progress(context.ref).pending:
            context.state.pending_tokens = 0
        self._norms[context.queue_id] = float(norm)
        return float(norm)

    def calculate_metric(self, context: "_Context", arguments: dict[str, Any]) -> dict[str, float]:
        """Return the numbers of all metrics since the last call."""
        values = self._of_model("calculate_metric", context.ref, is_training=bool(arguments.get("is_training", True)))
        return {name: value if isinstance(value, int) else float(value) for name, value in values.items()}

    def get_state_dict(self, context: "_Context", arguments: dict[str, Any]) -> Any:
        """Return the weights of a model by PEFT's names."""
        weights = self._of_model("get_state_dict", context.ref)
        count = sum(int(tensor.numel()) for tensor in weights.values())
        if count > _MAX_STATE:
            raise UserError(
                f"get_state_dict sends at most {_MAX_STATE} numbers, and this adapter has {count}; save it with "
                "is_sampler=True and download the checkpoint"
            )
        return weights

    def get_train_configs(self, context: "_Context", arguments: dict[str, Any]) -> str:
        """Return a readable summary, without the service's own names and paths."""
        text = str(self._of_model("get_train_configs", context.ref))
        return _NAME_OF_ADAPTER.sub(r"\1", _PATH_OF_MODEL.sub(rf"\g<1>{self._info.name}", text))

    def get_progress(self, context: "_Context", arguments: dict[str, Any]) -> dict[str, int]:
        """Return the counters of a model, as a local `resume_from_checkpoint` does."""
        return self.progress(context.queue_id)

    # State

    def create(self, queue_id: str, accumulation: int) -> None:
        """Give a new model what a local one has from the start."""
        state, ref = self._state(queue_id), self._refs.ref(queue_id)
        state.optimizer = ("AdamW", {})
        self._of_model("set_optimizer", ref, "AdamW")
        self._of_model("lr_step", ref, gradient_accumulation_steps=accumulation)

    def progress(self, queue_id: str) -> dict[str, int]:
        """Return the counters of a model."""
        progress = self._engine.progress(self._refs.ref(queue_id))
        return {
            "cur_step": progress.cur_step,
            "consumed_train_samples": self._state(queue_id).consumed,
            "gradient_accumulation_steps": progress.gradient_accumulation_steps,
        }

    def embeds(self, queue_id: str) -> bool:
        """Return whether a model was trained for embeddings, by native calls."""
        state = self._states.get(queue_id)
        return state is not None and state.embeds

    def refuse_other_steps(self, queue_id: str) -> None:
        """Refuse the step of another protocol on a model whose scheduler and metrics it would pass by.

        Raises:
            UserError: the model has a scheduler.
        """
        state = self._states.get(queue_id)
        if state is not None and state.scheduler is not None:
            raise UserError("this model has a scheduler; step it with clip_grad_and_step of the native client")

    def snapshot(self, queue_id: str, spec: AdapterSpec, copy: SavedAdapter) -> SavedAdapter:
        """Return the copy of a model for a snapshot, with its state if it has one."""
        state = self._states.get(queue_id)
        return copy if state is None else WithState((copy,), _copy(state), spec, calls=True)

    def checkpoint(self, queue_id: str, spec: AdapterSpec, consumed: int, *copies: SavedAdapter) -> SavedAdapter:
        """Return the copies of a model for a checkpoint, with its state."""
        saved = _copy(self._state(queue_id))
        saved.consumed = consumed  # in the checkpoint only: a save does not change the model, and is not replayed
        return WithState(copies, saved, spec, calls=False)

    def prepare(self, queue_id: str, folder: Path) -> NativeState | None:
        """Set the components of a model as in a snapshot, before the engine restores its own part."""
        state = NativeState.read(folder)
        if state is None:
            return None
        ref = self._refs.ref(queue_id)
        for kind, setter in (
            ("optimizer", "set_optimizer"),
            ("scheduler", "set_lr_scheduler"),
            ("processor", "set_processor"),
        ):
            if (named := getattr(state, kind)) is not None:
                spec = components.find(kind, named[0], self._in_process)
                options = components.check_options(kind, named[0], named[1], self._in_process)
                self._of_model(setter, ref, f"{spec.dist}/{spec.name}", **options)
        if state.loss is not None:
            self._put_loss(queue_id, ref, state.loss)
        for name, options, training in state.metrics:
            self._put_metric(ref, name, options, training)
        for name, options in state.patches:
            self._put_patch(ref, name, options)
        return state

    def begin_with(self, queue_id: str, folder: Path) -> None:
        """Set the components of a new model as in a checkpoint."""
        if (state := self.prepare(queue_id, folder)) is not None:
            self._states[queue_id] = state

    def resume(self, queue_id: str, state: NativeState, restore: Callable[[], None]) -> None:
        """Make the calls of a snapshot again, after the engine has restored its own part.

        Args:
            queue_id: the model.
            state: of the snapshot.
            restore: restores the engine's part again: a loss that is calculated again counts for metrics again.
        """
        self._states[queue_id] = state
        ref = self._refs.ref(queue_id)
        if (staged := state.forward_only) is not None and not state.training:  # else no later call scores it
            composition = None if staged.composition is None else Composition.parse(staged.composition)
            operation, finish = self.operation(queue_id, staged.payload, 0, composition)
            [outcome] = self._engine.run([operation])
            if isinstance(result := finish(outcome), Exception):
                raise result
            for payload in staged.losses:
                self._score(queue_id, ref, state, payload)
            restore()
            state.forward_only = staged
        if state.forward is not None and state.training:
            self._recover_graph(queue_id, ref, state, losses=True)

    def adopt(self, queue_id: str, folder: Path) -> None:
        """Take over the counters of a checkpoint that was loaded into a model."""
        saved = NativeState.read(folder)
        self._state(queue_id).consumed = 0 if saved is None else saved.consumed

    def forget(self, queue_id: str) -> None:
        """Forget a removed model."""
        for kept in (self._states, self._norms, self._losses_of):
            kept.pop(queue_id, None)
        if self._graph == queue_id:
            self._graph = None

    # Parts

    def _state(self, queue_id: str) -> NativeState:
        if queue_id not in self._states:
            if "model" not in self._engine.describe().features:
                raise Unsupported(
                    f"native calls need the feature 'model', which {type(self._engine).__name__} does not have"
                )
            self._refs.ref(queue_id)
            self._states[queue_id] = NativeState()
        return self._states[queue_id]

    def _of_model(self, method: str, ref: AdapterRef, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine.as_model(), method)(*args, adapter_name=ref.name, **kwargs)

    def _rows(self, state: NativeState, inputs: Any, task: Any) -> list[dict[str, Any]]:
        def encode(row: Any) -> Any:
            return self._templates.get(state.template).encode(row)

        return read_rows(inputs, encode, self._info.context, self._info.vocabulary, row_labels=task == EMBEDDING)

    def _rows_of(self, state: NativeState, payload: bytes) -> list[dict[str, Any]]:
        arguments = Call.parse(payload).arguments
        return self._rows(state, arguments.get("inputs"), arguments.get("task"))

    def _put_metric(self, ref: AdapterRef, name: str, options: Mapping[str, Any], training: bool | None) -> None:
        spec = components.find("metric", name, self._in_process)
        checked = components.check_options("metric", name, options)
        self._of_model("add_metric", ref, f"{spec.dist}/{spec.name}", training, **checked)

    def _put_patch(self, ref: AdapterRef, name: str, options: Mapping[str, Any]) -> None:
        spec = components.find("patch", name, self._in_process)
        checked = components.check_options("patch", name, options)
        self._of_model("apply_patch", ref, f"{spec.dist}/{spec.name}", **checked)

    def _put_loss(self, queue_id: str, ref: AdapterRef, named: Named) -> None:
        spec = self._losses.find(named[0])
        self._of_model("set_loss", ref, self._losses.build_own(spec, named[1], queue_id=queue_id, number=0))

    def _put_remote_loss(self, queue_id: str, ref: AdapterRef, state: NativeState) -> None:
        """Set a loss that a worker process computes anew: it serves one operation."""
        if self._remote_spec(state) is not None and state.loss is not None:
            self._put_loss(queue_id, ref, state.loss)

    def _remote_loss(self, state: NativeState, queue_id: str, number: int) -> Any:
        """Return the loss of one operation, if a worker process computes it."""
        spec = self._remote_spec(state)
        if spec is None or state.loss is None:
            return None
        return self._losses.build_own(spec, state.loss[1], queue_id=queue_id, number=number)

    def _remote_spec(self, state: NativeState) -> ComponentSpec | None:
        if state.loss is None:
            return None
        spec = self._losses.find(state.loss[0])
        return spec if self._losses.workers is not None and self._losses.is_remote(spec) else None

    def _recover_graph(self, queue_id: str, ref: AdapterRef, state: NativeState, *, losses: bool = False) -> None:
        """Run the last forward again if its graph was dropped; the weights, and so its numbers, are the same."""
        if self._graph == queue_id or state.forward is None:
            return
        self._forward(queue_id, ref, state, writable(dict(Call.parse(state.forward.payload).arguments)))
        for payload in state.forward.losses if losses else ():
            self._score(queue_id, ref, state, payload)

    def _score(self, queue_id: str, ref: AdapterRef, state: NativeState, payload: bytes) -> None:
        """Make a call of `calculate_loss` again."""
        inputs = writable(dict(Call.parse(payload).arguments)).get("loss_inputs", {})
        self._put_remote_loss(queue_id, ref, state)
        self._of_model("calculate_loss", ref, **inputs)

    def _forget_graph(self) -> None:
        """Drop the graph in memory; its model can make it again."""
        if self._graph is not None:
            with suppress(UserError):
                self._of_model("drop_forward", self._refs.ref(self._graph))
        self._graph = None

    def _drop_graph(self, queue_id: str) -> None:
        """Drop the graph of one model."""
        if self._graph == queue_id:
            self._forget_graph()


class _Context:
    """A call's model.

    Attributes:
        queue_id: the model.
        ref: its adapter.
        state: its state.
        payload: of the call.
        figures: see `Noted`; set by a method that has some.
    """

    __slots__ = ("figures", "payload", "queue_id", "ref", "state")

    def __init__(self, queue_id: str, ref: AdapterRef, state: NativeState, payload: bytes) -> None:
        self.queue_id, self.ref, self.state, self.payload = queue_id, ref, state, payload
        self.figures: Mapping[str, float] | None = None


_Method = Callable[[NativeModels, _Context, dict[str, Any]], Any]


def _setter(kind: str) -> _Method:
    return lambda models, context, arguments: models.set_component(kind, context, arguments)


def _plain(name: str) -> _Method:
    return lambda models, context, arguments: models.of_model(name, context, arguments)


_METHODS: Final[Mapping[str, _Method]] = {
    "add_metric": NativeModels.add_metric,
    "apply_patch": NativeModels.apply_patch,
    "backward": NativeModels.backward,
    "calculate_loss": NativeModels.calculate_loss,
    "calculate_metric": NativeModels.calculate_metric,
    "clip_grad_and_step": NativeModels.clip_grad_and_step,
    "clip_grad_norm": _plain("clip_grad_norm"),
    "forward": NativeModels.forward,
    "get_progress": NativeModels.get_progress,
    "get_state_dict": NativeModels.get_state_dict,
    "get_train_configs": NativeModels.get_train_configs,
    "lr_step": _plain("lr_step"),
    "set_loss": NativeModels.set_loss,
    "set_lr_scheduler": _setter("scheduler"),
    "set_optimizer": _setter("optimizer"),
    "set_processor": _setter("processor"),
    "set_template": NativeModels.set_template,
    "step": _plain("step"),
    "zero_grad": _plain("zero_grad"),
}


_STEPPING: Final = frozenset({"clip_grad_and_step", "clip_grad_norm", "step"})
"""Methods that may end an optimizer step."""


def _step_figures(before: Progress, norm: float | None = None, *, skipped: bool = False) -> dict[str, float]:
    """Return the figures of an optimizer step.

    Args:
        before: progress of the model before it; a scheduler changes the learning rate after a step.
        norm: of its gradient, if it was measured.
        skipped: whether the gradient was dropped instead of applied.
    """
    figures = {"lr": float(before.learning_rates[0])} if before.learning_rates else {}
    if norm is not None:
        figures["grad_norm"] = norm
    return figures | ({"skipped": 1.0} if skipped else {})


def _backward_figures(rows: Sequence[Mapping[str, Any]], loss: float | None) -> dict[str, float]:
    """Return the figures of a `backward`: the loss was calculated per trained token, and figures are sums."""
    labels = [row["labels"] for row in rows if row.get("labels") is not None]
    tokens = sum(int((np.asarray(array) != NO_TARGET).sum()) for array in labels)
    figures: dict[str, float] = {"tokens": tokens, "rows": len(rows)}
    if loss is not None and tokens and math.isfinite(loss):
        figures["loss"] = loss * tokens
    return figures


def _options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a forward out of the arguments of a call."""
    names = ("temperature", "return_logits", "task", "topk_logprobs")
    return {name: value for name in names if (value := arguments.pop(name, None)) is not None}


def _check_pending(state: NativeState, tokens: int) -> None:
    if state.pending_tokens + tokens > _MAX_PENDING:
        raise UserError(
            f"at most {_MAX_PENDING} tokens may wait for a step, got {state.pending_tokens + tokens}; call "
            "clip_grad_and_step after fewer backward calls"
        )


def _batch(outcome: OperationResult, *, left: bool, apart: bool = False) -> dict[str, Any]:
    batch = batch_of(outcome.outputs, left=left, apart=apart)
    if outcome.loss_sum is not None:
        batch["loss"] = outcome.loss_sum / outcome.denominator if outcome.denominator else 0.0
        batch["num_tokens"] = outcome.denominator
    return batch


def _pads_left(state: NativeState) -> bool:
    return state.processor is not None and state.processor[1].get("padding_side") == "left"


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _failed(error: Exception) -> bytes:
    """Return the result of a call that raised an error which is the client's."""
    public = public_error(error)
    if not isinstance(public, UserError):
        if not isinstance(error, TypeError | ValueError | LookupError | ArithmeticError | TwinkleError):
            raise error
        public = UserError(str(error))  # a component refuses its arguments
    return failure(error, str(public))


def _copy(state: NativeState) -> NativeState:
    """Return a copy that later calls do not change."""
    import copy

    return copy.deepcopy(state)
