"""Training state of one adapter (or of the full model): optimizer, loss, template, counters, pending gradients."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from twinkle import registry
from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import TrainingStateError

DEFAULT_METRICS = ("LossMetric", "Accuracy", "TrainMetric")
"""Metrics of a new adapter."""


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

    def loss(self) -> Any:
        """Return the loss; cross entropy if none was set."""
        if self.loss_instance is None:
            self.loss_instance = registry().build("CrossEntropyLoss", "loss")
        return self.loss_instance

    def encoder(self, model_path: Path) -> Callable[[Any], Any]:
        """Return a function that encodes trajectories: the template, by default that of the model in `model_path`."""

        def encode(trajectory: Any) -> Any:
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
        """Check that gradients may be added.

        Raises:
            TrainingStateError: the gradients of the last update, which were divided already, were not cleared.
        """
        if self.divided:
            done = "step() and zero_grad()" if not self.stepped else "zero_grad()"
            raise TrainingStateError(
                f"adapter {self.adapter_name!r}: cannot call backward after clip_grad_norm() or step() before the old "
                f"gradients are cleared; call {done} first (clip_grad_and_step() makes all these calls)"
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
