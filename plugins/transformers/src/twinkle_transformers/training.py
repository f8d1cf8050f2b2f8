"""What the models of this package do alike with one adapter: its components, its loss, its step and its metrics."""

from collections.abc import Mapping
from typing import Any

import torch

from twinkle import get_logger, registry
from twinkle.errors import TrainingStateError
from twinkle_transformers import losses
from twinkle_transformers.group import build_for_ranks, build_metric
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.loss_scaler import LossScaler
from twinkle_transformers.losses import check_loss_arguments
from twinkle_transformers.optimizers import build_scheduler
from twinkle_transformers.options import check_clipping
from twinkle_transformers.peft_adapters import Adapters
from twinkle_transformers.rows import batch_size, row_inputs, share_arguments
from twinkle_transformers.stepping import clip_group, schedule, set_accumulation, step_group


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
        """Set the template; `model_id` is the model's folder unless given."""
        resolved = registry().resolve(template_cls, "template")
        if isinstance(resolved, type) and "tokenizer" not in kwargs:
            kwargs.setdefault("model_id", str(self._loaded.path))
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
