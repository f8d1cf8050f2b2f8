"""Training state of one adapter (or of the full model), and the checks of the arguments that set it."""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path, PurePath
from typing import Any

import torch

from twinkle import registry
from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported

DEFAULT_METRICS = ("LossMetric", "Accuracy", "TrainMetric")
"""Metrics of a new adapter."""
PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtype of each mixed precision."""
_STRATEGIES = ("accelerate", "native_fsdp")


@dataclass
class Pass:
    """The forward pass of one micro-batch: its tensors, outputs, rows and, once calculated, its loss."""

    inputs: InputBatch
    outputs: ModelOutput
    rows: list[Any]
    loss: LossOutput | None = None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    usable: bool = True
    """False if its loss is not finite and is left out."""
    counted: bool = False
    """Whether it was added to evaluation metrics."""


@dataclass
class Status:
    """The last passes and the metrics of one mode, training or evaluation."""

    passes: list[Pass] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    unseen: list[Pass] = field(default_factory=list)
    """Passes that are added to metrics with the step that they belong to."""
    idle: bool = False
    """Whether the last forward had no rows on this rank."""
    skipped: int = 0
    """Micro-batches left out because their loss was not finite."""


@dataclass
class OptimizerGroup:
    """Training state of one adapter; the full model has the name `""`.

    Attributes:
        cur_step: number of backward calls (a call with micro-batches counts once).
        updates: number of optimizer steps.
        gradient_accumulation_steps: backward calls for each update.
        pending: number of backward calls since the last update.
        denominator: sum of the denominators of pending gradients.
        loss_sum: sum of the losses of pending gradients.
        divided: whether the pending gradients were summed over ranks and divided by their denominator.
        measured: whether their norm is known.
        stepped: whether they were used for an update.
        dropped: whether the update is skipped, because their norm is not finite.
    """

    adapter_name: str
    adapter_config: Any = None
    trainable: bool = True
    placed: bool = False
    """Whether its parameters were distributed over ranks."""
    wide: bool = False
    """Whether its parameters were converted to the dtype in which they are trained."""
    optimizer: Any = None
    left_out: list[torch.nn.Parameter] = field(default_factory=list)
    """Trainable parameters outside the optimizer; the backward adds gradients to them too."""
    lr_scheduler: Any = None
    loss_scale: Any = None
    """The loss scale of fp16."""
    loss_instance: Any = None
    template: Any = None
    processor: Any = None
    gradient_accumulation_steps: int = 1
    seed: int | None = None
    """Seed of first weights and dropout masks of an adapter of a pool."""
    cur_step: int = 0
    updates: int = 0
    pending: int = 0
    denominator: float = 0.0
    loss_sum: float = 0.0
    divided: bool = False
    measured: bool = False
    stepped: bool = False
    dropped: bool = False
    skipped: int = 0
    """Micro-batches left out of the pending gradients, because their loss was not finite."""
    scheduled: int = 0
    """Number of updates that the scheduler was advanced for."""
    last_grad_norm: float | None = None
    last_loss: float = 0.0
    """Loss of the last update, for schedulers that depend on it."""
    training: bool = True
    """Whether the last forward ran in training mode; `calculate_loss` scores the last forward."""
    train_status: Status = field(default_factory=Status)
    eval_status: Status = field(default_factory=Status)

    @property
    def scaler(self) -> Any:
        """The loss scale of fp16, under its published name; None with another precision."""
        return self.loss_scale

    @property
    def scaler_has_nan(self) -> bool:
        """Whether the update is skipped because the norm of the gradients is not finite; the published name."""
        return self.dropped

    def loss(self) -> Any:
        """Return the loss; cross entropy if none was set."""
        if self.loss_instance is None:
            self.loss_instance = registry().build("CrossEntropyLoss", "loss")
        return self.loss_instance

    def encoder(self, model_path: Path | None) -> Callable[[Any], Any]:
        """Return a function that encodes trajectories: the template, by default that of the folder `model_path`."""

        def encode(trajectory: Any) -> Any:
            if self.template is None and model_path is None:
                raise TrainingStateError(
                    "the model was built from config= without a tokenizer; give tokenizer_id=, or call "
                    "set_template('Template', model_id=...)"
                )
            if self.template is None:
                self.template = registry().build("Template", "template", model_id=str(model_path))
            return self.template.encode(trajectory)

        return encode

    def pads_left(self) -> bool:
        """Return whether the processor pads rows on the left."""
        return getattr(self.processor, "padding_side", "right") == "left"

    def due(self, flush: bool = False) -> bool:
        """Return whether an update is due: after k, 2k, 3k, ... backward calls, or at once with `flush`."""
        return self.pending >= (1 if flush else self.gradient_accumulation_steps)

    def begin_backward(self) -> None:
        """Begin a new accumulation if a step has used the gradients, so that no gradient is used twice.

        Raises:
            TrainingStateError: the gradients were divided by `clip_grad_norm`, and no step has used them.
        """
        if self.stepped:
            self.clear_gradients()
        elif self.divided:
            raise TrainingStateError(
                f"adapter {self.adapter_name!r}: cannot call backward after clip_grad_norm(), which has divided the "
                "gradients; call step() first, or zero_grad() to drop them (clip_grad_and_step() makes all these calls)"
            )

    def drop_passes(self) -> None:
        """Discard gradients, passes and counters of an unfinished step."""
        self.clear_gradients()
        self.train_status.passes, self.train_status.unseen = [], []

    def count_backward(self, passes: list[Pass]) -> None:
        """Count one backward call, and keep its passes for the metrics of the step."""
        self.cur_step += 1
        self.pending += 1
        for item in passes:
            item.step = self.cur_step
            self.loss_sum += item.outputs["loss_sum"]
        self.train_status.unseen += passes
        self.train_status.passes = []

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Discard the pending gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in self.left_out:
            parameter.grad = None
        self.pending, self.denominator, self.loss_sum, self.skipped = 0, 0.0, 0.0, 0
        self.divided = self.measured = self.stepped = self.dropped = False


def new_group(name: str, mesh: Any = None, ranks: Any = None) -> OptimizerGroup:
    """Return the initial training state of an adapter: right padding and the default metrics.

    Args:
        name: of the adapter; "" is the full model.
        mesh: the device mesh of the model.
        ranks: process group over which metrics are gathered.
    """
    group = OptimizerGroup(name, processor=registry().build("InputProcessor", "processor"))
    for status in (group.train_status, group.eval_status):
        status.metrics = [build_metric(metric, mesh, ranks) for metric in DEFAULT_METRICS]
    return group


def build_metric(metric: Any, mesh: Any, ranks: Any, **kwargs: Any) -> Any:
    """Build a metric; one that takes `device_mesh` and `process_group` gets the model's."""
    return build_for_ranks(metric, "metric", {"device_mesh": mesh, "process_group": ranks}, kwargs)


def build_for_ranks(component: Any, kind: str, offered: Mapping[str, Any], kwargs: dict[str, Any]) -> Any:
    """Build a component; a class gets those of the `offered` arguments that it accepts and `kwargs` lacks."""
    resolved = registry().resolve(component, kind)
    if isinstance(resolved, type):
        taken = inspect.signature(resolved).parameters
        kwargs = {name: value for name, value in offered.items() if name in taken} | kwargs
    return registry().build(resolved, kind, **kwargs)


def check_model_options(precision: str, strategy: str, policy: str, scaler: Mapping[str, Any] | None) -> None:
    """Refuse options that do not exist or that would be ignored.

    Args:
        precision: `mixed_precision` of the model.
        strategy: published name of a strategy for several devices.
        policy: `on_nonfinite` of the model.
        scaler: options of the loss scale of fp16.
    """
    if precision not in PRECISION:
        raise Unsupported(
            f"TransformersModel: mixed_precision={precision!r}; choose from {sorted({'auto', *PRECISION})}"
        )
    if strategy not in _STRATEGIES:
        raise ArgumentError(f"TransformersModel: strategy={strategy!r}; choose 'accelerate' or 'native_fsdp'")
    if policy not in ("raise", "skip"):
        raise ArgumentError(f"TransformersModel: on_nonfinite={policy!r}; choose 'raise' or 'skip'")
    if scaler and precision != "fp16":
        raise ArgumentError(f"TransformersModel: grad_scaler_config is for mixed_precision='fp16', not {precision!r}")


def check_model_id(model_id: Any, model_cls: Any, config: Any, others: Mapping[str, Any]) -> None:
    """Refuse a model with neither id nor configuration, and suggest the argument that probably contains the id."""
    if model_id is not None or config is not None:
        return
    meant = (
        model_cls if isinstance(model_cls, str | PurePath) else others.get("model", others.get("model_name_or_path"))
    )
    instead = f": model_id={str(meant)!r}" if isinstance(meant, str | PurePath) else ""
    raise ArgumentError(
        f"TransformersModel: model_id is missing; give a folder, a GGUF file or a reference by that name{instead}"
    )


def check_call(task: str, temperature: float) -> None:
    """Refuse unknown tasks, and temperatures of 0 or less."""
    if not temperature > 0:
        raise ArgumentError(f"temperature must be above 0 in a forward, got {temperature}")
    if task not in ("causal_lm", "fused_lm_ce", "embedding"):
        raise Unsupported(f"task={task!r}; choose 'causal_lm', 'fused_lm_ce' or 'embedding'")


def top_of_call(topk: Any) -> int:
    """Return `topk_logprobs` of a call, 0 for None."""
    if topk is None:
        return 0
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ArgumentError(f"topk_logprobs must be an integer of at least 1, or None, got {topk!r}")
    return topk


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Refuse an invalid maximum norm or norm type."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or math.isnan(max_norm):
        raise ArgumentError(f"max_grad_norm must be a number (0 to measure without clipping), got {max_norm!r}")
    if isinstance(norm_type, bool) or not isinstance(norm_type, Real) or not float(norm_type) > 0:
        raise ArgumentError(
            f"norm_type must be a number above 0 (float('inf') for the largest entry), got {norm_type!r}"
        )


def check_name(name: str, interval: int) -> None:
    """Refuse checkpoint names outside their folder, and intervals below 1."""
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute():
        raise ArgumentError(f"save: name must be a path below output_dir, got {name!r}; give the parent as output_dir")
    if interval < 1:
        raise ArgumentError(f"save: interval must be at least 1, got {interval}")


def plain_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state of a loop as a checkpoint will restore it; `{}` for None."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(state or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"save: loop_state must contain only JSON values ({error})") from error
    return kept


def check_adapter(name: str, taken: Mapping[str, Any]) -> None:
    """Refuse adapter names that exist, or that could be parts of a module's path."""
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ArgumentError(
            f"adapter name must consist of letters, digits, '_' and '-', and not start with a digit, got {name!r}"
        )
    if name in taken:
        raise ArgumentError(f"adapter {name!r} already exists; choose another name")
