"""Training of adapters: the interface that PEFT's adapters and those of a pool share, and the calls that use it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from twinkle import get_logger, registry
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle_registry import nearest
from twinkle_transformers import adapters, losses
from twinkle_transformers.batches import batch_size, row_inputs, share_arguments
from twinkle_transformers.group import (
    PRECISION,
    OptimizerGroup,
    build_for_ranks,
    build_metric,
    check_adapter,
    check_clipping,
)
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.loss_scaler import LossScaler
from twinkle_transformers.losses import check_loss_arguments
from twinkle_transformers.optimizers import build_optimizer, build_scheduler, exchanged
from twinkle_transformers.stepping import clip_group, schedule, set_accumulation, step_group
from twinkle_transformers.sync.terms import Changes, changes_of


class Adapters(Protocol):
    """The adapters of a model, as training steps, checkpoints and weight transfers use them.

    `name` is the name of an adapter. Where it is None, it means the active adapter, if the model has one.
    """

    def group(self, name: str | None) -> OptimizerGroup:
        """Return the training state of an adapter."""

    def select(self, name: str | None) -> OptimizerGroup:
        """Make forwards of the module use an adapter, and return its training state."""

    def trained(self, name: str | None, *, saving: bool = False) -> OptimizerGroup:
        """Select an adapter that will be trained; with `saving`, written or read."""

    def place(self, group: OptimizerGroup, *, trained: bool = True) -> None:
        """Distribute parameters over ranks, before anything is computed with them or built on them."""

    def set_optimizer(self, name: str | None, optimizer_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set the optimizer of an adapter."""

    def parameters(self, group: OptimizerGroup) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by saved name."""

    def weights(self, group: OptimizerGroup) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a checkpoint by saved name."""

    def load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        """Copy the weights of a saved adapter into an adapter."""

    def resumed(self, group: OptimizerGroup) -> None:
        """Follow up on a training state that was restored."""

    def changes(self, name: str | None) -> tuple[str, Changes]:
        """Return the name of an adapter and its changes to the base model; `""` and none without adapters."""


class PeftAdapters:
    """The full model, or the PEFT adapters on it.

    Args:
        loaded: the model.

    Attributes:
        groups: training state by name; the full model has the name `""`.
        active: name that a call without a name means.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.groups: dict[str, OptimizerGroup] = {"": loaded.new_group("")}
        self.active = ""

    def group(self, name: str | None) -> OptimizerGroup:
        """Return the training state of an adapter."""
        name = self.active if name is None else name
        if name not in self.groups:
            hint = nearest(name, self.groups)
            raise ArgumentError(
                f"there is no adapter {name!r}{f'; did you mean {hint[0]!r}?' if hint else ''}; "
                f"there are {sorted(self.groups)} ('' is the full model)"
            )
        return self.groups[name]

    def select(self, name: str | None) -> OptimizerGroup:
        """Make forwards of the module use an adapter, and return its training state."""
        group = self.group(name)
        adapters.select(self._loaded.module, group.adapter_name, group.trainable)
        return group

    def trained(self, name: str | None, *, saving: bool = False) -> OptimizerGroup:
        """Select an adapter that will be trained; with `saving`, written or read.

        Raises:
            TrainingStateError: it cannot be trained: it is frozen.
        """
        group = self.select(name)
        if not group.adapter_name and len(self.groups) > 1:
            raise TrainingStateError(
                "the full model is frozen because it has adapters; give the name of one of "
                f"{sorted(set(self.groups) - {''})}"
            )
        if not group.trainable and not saving:
            raise TrainingStateError(f"adapter {group.adapter_name!r} was added with is_trainable=False")
        return group

    def add(
        self, name: str, config_or_dir: Any, *, is_trainable: bool, accumulation: int, seed: int | None = None
    ) -> None:
        """Add an adapter and make it the active one; see `TransformersModel.add_adapter_to_model`."""
        check_adapter(name, self.groups)
        if self._is_sharded:
            raise TrainingStateError(
                f"cannot add adapter {name!r}: the model is already sharded; add adapters before set_optimizer and "
                "before the first forward"
            )
        if steps := self.groups[""].updates:
            raise TrainingStateError(
                f"cannot add adapter {name!r}: the full model was trained for {steps} steps, which the files of an "
                "adapter cannot hold; save the model, and load a model from that folder"
            )
        group = self._loaded.new_group(name)
        set_accumulation(group, accumulation)
        self._loaded.module, group.adapter_config = adapters.add_adapter(
            self._loaded.module, name, config_or_dir, seed=seed
        )
        self.groups[name] = group
        self.active = name
        group.trainable = is_trainable
        if not is_trainable:
            adapters.freeze(self._loaded.module, name)

    def set_optimizer(self, name: str | None, optimizer_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set the optimizer over the adapter's parameters, or over the full model's."""
        group, loaded = self.trained(name), self._loaded
        before = {id(parameter): key for key, parameter in loaded.module.named_parameters()}
        self.place(group)
        loaded.parallel.settle()
        if "params" in kwargs:  # sharding has replaced the parameters that the caller gave
            now = dict(loaded.module.named_parameters())
            kwargs["params"] = exchanged(kwargs["params"], {key: now[path] for key, path in before.items()})
        parameters = list(adapters.named_parameters(loaded.module, group.adapter_name))
        optimizer = build_optimizer(optimizer_cls, parameters, **kwargs)
        if loaded.parallel.in_lockstep and isinstance(optimizer, torch.optim.Adafactor | torch.optim.Rprop):
            raise Unsupported(
                f"set_optimizer({type(optimizer).__name__!r}): torch does not compute its update on shards; "
                "use a mesh without fsdp, or AdamW"
            )
        if not group.pending:  # parameters outside the old optimizer have gradients from all of its steps
            for _, parameter in parameters:
                parameter.grad = None
        group.optimizer = optimizer
        updated = {id(parameter) for parameter in group.parameters()}
        group.left_out = [parameter for _, parameter in parameters if id(parameter) not in updated]
        if group.lr_scheduler is not None:
            get_logger().warning(
                "adapter %r: its scheduler followed the old optimizer; set it again", group.adapter_name
            )
            group.lr_scheduler = None

    @property
    def _is_sharded(self) -> bool:
        return self._loaded.parallel.in_lockstep and any(group.placed for group in self.groups.values())

    def place(self, group: OptimizerGroup, *, trained: bool = True) -> None:
        """Distribute parameters over ranks, before anything is computed with them or built on them.

        Args:
            group: whose parameters.
            trained: whether they will be trained, or only used in forwards for now.
        """
        if self._is_sharded:
            return
        loaded = self._loaded
        if loaded.parallel.in_lockstep:  # shards keep the dtype that the parameters have now
            for other in self.groups.values():
                self._widen(other)
        elif trained:
            self._widen(group)
        if group.placed:
            return
        ranks = loaded.parallel.ranks
        if not ranks.is_first and not any(other.placed for other in self.groups.values()):
            # Each rank draws its own dropout masks; the first rank draws those of a single process.
            torch.manual_seed((torch.initial_seed() + 1_000_003 * ranks.index) % 2**63)
        group.placed = True
        causal, segmenter = loaded.backbone.model, loaded.backbone.segmenter
        if loaded.parallel.in_lockstep:  # a single rank cannot run the model for a measurement once it is sharded
            segmenter.assume(ranks.on_first("trying packed rows", segmenter.measured))
        loaded.parallel.place(causal, list(causal._no_split_modules or ()), PRECISION[loaded.mixed_precision])

    def _widen(self, group: OptimizerGroup) -> None:
        """Convert parameters that mixed precision trains to float32: small updates would be lost in 16 bits."""
        if group.wide:
            return
        group.wide = True
        name = group.adapter_name
        if self._loaded.mixed_precision == "no" or not group.trainable or (not name and len(self.groups) > 1):
            return
        for _, parameter in adapters.named_parameters(self._loaded.module, name, frozen=bool(name)):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()

    def parameters(self, group: OptimizerGroup) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by saved name."""
        return dict(adapters.named_parameters(self._loaded.module, group.adapter_name))

    def weights(self, group: OptimizerGroup) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a checkpoint: an adapter's weights, or all of the full model."""
        module = self._loaded.module
        weights: Mapping[str, torch.Tensor] = (
            adapters.weights(module, group.adapter_name) if group.adapter_name else module.state_dict()
        )
        return weights

    def load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        """Copy the weights of a saved adapter into an adapter."""
        adapters.load_weights(self._loaded.module, group.adapter_name, folder)

    def resumed(self, group: OptimizerGroup) -> None:
        """Do nothing: parameters and gradients were restored in place."""

    def changes(self, name: str | None) -> tuple[str, Changes]:
        """Return the name of an adapter and its changes to the base model; `""` and none for the full model."""
        name = self.group(name).adapter_name
        return name, changes_of(self._loaded.module, name) if name else Changes()


class AdapterTraining:
    """Implements the methods of `TwinkleModel` that do not run the model.

    Args:
        loaded: the model.
        adapters: its adapters; every method takes the name of one, or None for the active one.
    """

    def __init__(self, loaded: LoadedModel, adapters: Adapters) -> None:
        self._loaded, self._adapters = loaded, adapters

    # Components

    def set_loss(self, name: str | None, loss_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set the loss; one with a parameter `process_group` gets that of the data ranks."""
        offered = {"process_group": self._loaded.parallel.ranks.group}
        group = self._adapters.group(name)
        group.loss_instance = build_for_ranks(loss_cls, "loss", offered, kwargs)

    def set_lr_scheduler(self, name: str | None, scheduler_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set the scheduler of the adapter's optimizer."""
        group = self._adapters.group(name)
        group.lr_scheduler = build_scheduler(scheduler_cls, group.optimizer, **kwargs)

    def set_template(self, name: str | None, template_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set the template; `model_id` is the folder of the model's tokenizer unless given."""
        resolved = registry().resolve(template_cls, "template")
        folder = self._loaded.tokenizer_path
        if isinstance(resolved, type) and "tokenizer" not in kwargs and folder is not None:
            kwargs.setdefault("model_id", str(folder))
        self._adapters.group(name).template = registry().build(resolved, "template", **kwargs)

    def set_processor(self, name: str | None, processor_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set the processor."""
        self._adapters.group(name).processor = registry().build(processor_cls, "processor", **kwargs)

    def add_metric(self, name: str | None, metric_cls: Any, is_training: bool | None, kwargs: dict[str, Any]) -> None:
        """Add a metric for training, for evaluation, or (None) one for each."""
        group, loaded = self._adapters.group(name), self._loaded
        for status, for_training in ((group.train_status, True), (group.eval_status, False)):
            if is_training is None or is_training is for_training:
                metric = build_metric(metric_cls, loaded.device_mesh, loaded.parallel.ranks.control, **kwargs)
                status.metrics.append(metric)

    def set_grad_scaler(self, name: str | None, kwargs: dict[str, Any]) -> None:
        """Set the loss scale of fp16.

        Raises:
            TrainingStateError: the model has another precision, or gradients of the old scale are pending.
        """
        if self._loaded.mixed_precision != "fp16":
            raise TrainingStateError(
                f"set_grad_scaler is for mixed_precision='fp16'; this model has {self._loaded.mixed_precision!r}"
            )
        group = self._adapters.group(name)
        if group.pending:
            raise TrainingStateError(
                f"set_grad_scaler: adapter {group.adapter_name!r} has gradients of the old scale; make the step "
                "first, or drop them with zero_grad(flush=True)"
            )
        group.loss_scale = LossScaler.from_config(kwargs)

    def prepare(self, name: str | None, *, training: bool) -> None:
        """Create what passes rely on: optimizer, loss, placed parameters. Ranks do it together, also without rows."""
        group = self._adapters.group(name)
        if training and group.optimizer is None:
            get_logger().info("adapter %r: no optimizer was set; AdamW at 1e-5 is used", group.adapter_name)
            self._adapters.set_optimizer(group.adapter_name, "AdamW", {})
        group.loss()
        self._adapters.place(group, trained=training)

    # Loss

    def calculate_loss(self, name: str | None, loss_kwargs: dict[str, Any]) -> float:
        """Score the last forward and return its loss; see `TransformersModel.calculate_loss`."""
        group, parallel = self._adapters.select(name), self._loaded.parallel
        status = group.train_status if group.training else group.eval_status
        if not status.passes and status.idle:
            return 0.0
        if not status.passes:
            raise TrainingStateError("calculate_loss: there is no forward to score; call forward or forward_only first")
        loss = group.loss()
        check_loss_arguments(loss, loss_kwargs)
        sizes = [batch_size(item.inputs) for item in status.passes]
        shares = share_arguments(loss_kwargs, row_inputs(loss), sizes, left=group.pads_left())
        with torch.set_grad_enabled(group.training):
            for item, share in zip(status.passes, shares, strict=True):
                losses.score(
                    group.loss_instance, item, split=len(status.passes) > 1, several_ranks=not parallel.ranks.alone,
                    loss_kwargs=share,
                )  # fmt: skip
                if group.training:
                    losses.check_finite(group, item, self._loaded.on_nonfinite, parallel.all_usable)
        if not group.training:
            status.unseen += losses.settled(item for item in status.passes if not item.counted)
            for item in status.passes:
                item.counted = True  # a second score of the same forward is not a second evaluation
            losses.feed_metrics(group, status)
        return float(losses.join([item.outputs for item in status.passes])["loss"])

    # Step

    def clip_grad_norm(
        self, name: str | None, max_norm: float, norm_type: float, accumulation: int | None, flush: bool
    ) -> float:
        """Divide and clip the gradients if an update is due; see `TransformersModel.clip_grad_norm`."""
        check_clipping(max_norm, norm_type)
        group = self._adapters.trained(name)
        set_accumulation(group, accumulation)
        if not group.due(flush):
            return 0.0
        return clip_group(group, self._loaded.parallel, max_norm, norm_type, self._loaded.on_nonfinite)

    def step(
        self, name: str | None, optim_params: Mapping[str, Any] | None, accumulation: int | None, flush: bool
    ) -> None:
        """Update the parameters if an update is due; see `TransformersModel.step`."""
        group = self._adapters.trained(name)
        set_accumulation(group, accumulation)
        step_group(group, self._loaded.parallel, optim_params, flush, self._loaded.on_nonfinite)

    def zero_grad(self, name: str | None, set_to_none: bool, accumulation: int | None, flush: bool) -> None:
        """Drop the gradients of a finished accumulation; of an unfinished one too with `flush`."""
        group = self._adapters.group(name)
        set_accumulation(group, accumulation)
        if group.stepped or group.due(flush):
            group.clear_gradients(set_to_none)

    def lr_step(self, name: str | None, metrics: float | None, accumulation: int | None) -> None:
        """Advance the scheduler if an update was made since the last call; see `TransformersModel.lr_step`."""
        group = self._adapters.group(name)
        set_accumulation(group, accumulation)
        schedule(group, metrics)

    # Metrics

    def calculate_metric(self, name: str | None, is_training: bool) -> dict[str, float]:
        """Return the values of all metrics since the last call, and reset them."""
        group = self._adapters.group(name)
        status = group.train_status if is_training else group.eval_status
        losses.feed_metrics(group, status)
        ranks = self._loaded.parallel.ranks
        skipped = ranks.agree(f"calculate_metric({is_training})", status.skipped).sum()
        values: dict[str, float] = {}
        for metric in status.metrics:
            values |= metric.calculate()
        if skipped:
            values["nonfinite_skipped"] = int(skipped)
        status.skipped, status.passes = 0, []
        return values

    def peft_config(self, name: str | None) -> dict[str, Any] | None:
        """Return the adapter's PEFT configuration as a dict; None for the full model."""
        config = self._adapters.group(name).adapter_config
        return None if config is None else config.to_dict()
