"""The methods of `TransformersModel` that choose its components: loss, optimizer, template, adapters and the rest."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from twinkle import get_logger, registry
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle.model import TwinkleModel
from twinkle_registry import nearest
from twinkle_transformers import adapters
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.group import DEFAULT_METRICS, OptimizerGroup, build_for_ranks, build_metric, new_group
from twinkle_transformers.loss_scaler import LossScaler
from twinkle_transformers.optimizers import build_optimizer, build_scheduler, exchanged
from twinkle_transformers.options import PRECISION, check_adapter
from twinkle_transformers.parallel import Replicated
from twinkle_transformers.recompute import Recompute
from twinkle_transformers.stepping import set_accumulation


class Components(TwinkleModel):
    """Everything that is set before (or between) steps; each method is for one adapter, by default the active one."""

    default_metrics = DEFAULT_METRICS
    model: Any
    model_path: Path
    device_mesh: Any
    mixed_precision: str
    parallel: Replicated
    optimizer_group: dict[str, OptimizerGroup]
    active_group: str
    _backbone: Backbone
    _unpatched: Backbone | None = None
    _recompute: Recompute
    _scaler_options: Mapping[str, Any] | None

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the loss; keyword arguments go to its constructor."""
        group = self._group(adapter_name)
        group.loss_instance = build_for_ranks(loss_cls, "loss", {"process_group": self.parallel.ranks.group}, kwargs)

    def set_optimizer(self, optimizer_cls: Any = "AdamW", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the optimizer over the adapter's parameters, or over the whole model's.

        Args:
            optimizer_cls: any form of component argument; every optimizer of `torch.optim` has its name there.
            adapter_name: whose; by default the active one.
            **kwargs: `lr` (1e-5), `weight_decay` (0.01, matrices only), `params`, and the constructor's own.
        """
        group = self._trained(adapter_name)
        before = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._place(group)
        self.parallel.settle()
        if "params" in kwargs:  # placing has put shards at the places of the parameters that were given
            now = dict(self.model.named_parameters())
            kwargs["params"] = exchanged(kwargs["params"], {key: now[name] for key, name in before.items()})
        names = list(adapters.named_parameters(self.model, group.adapter_name))
        optimizer = build_optimizer(optimizer_cls, names, **kwargs)
        if self.parallel.in_lockstep and isinstance(optimizer, torch.optim.Adafactor | torch.optim.Rprop):
            raise Unsupported(
                f"set_optimizer({type(optimizer).__name__!r}): torch does not compute its update on shards; "
                "use a mesh without fsdp, or AdamW"
            )
        if not group.pending:  # parameters that the old optimizer left out have gradients of all its steps
            for _, parameter in names:
                parameter.grad = None
        group.optimizer = optimizer
        updated = {id(parameter) for parameter in group.parameters()}
        group.left_out = [parameter for _, parameter in names if id(parameter) not in updated]
        if group.lr_scheduler is not None:
            get_logger().warning(
                "adapter %r: its scheduler followed the old optimizer; set it again", group.adapter_name
            )
            group.lr_scheduler = None

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the scheduler of the adapter's optimizer, which must have been set; kwargs go to the constructor."""
        group = self._group(adapter_name)
        group.lr_scheduler = build_scheduler(scheduler_cls, group.optimizer, **kwargs)

    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the template that encodes trajectories; `model_id` is this model's unless given."""
        found = registry().resolve(template_cls, "template")
        if isinstance(found, type) and "tokenizer" not in kwargs:
            kwargs.setdefault("model_id", str(self.model_path))
        self._group(adapter_name).template = registry().build(found, "template", **kwargs)

    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the processor that collates rows; keyword arguments go to its constructor."""
        self._group(adapter_name).processor = registry().build(processor_cls, "processor", **kwargs)

    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """Add a metric for training, for evaluation, or (None) one for each."""
        group = self._group(adapter_name)
        for status, wanted in ((group.train_status, True), (group.eval_status, False)):
            if is_training is None or is_training is wanted:
                status.metrics.append(build_metric(metric_cls, self.device_mesh, self.parallel.ranks.control, **kwargs))

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch to the Hugging Face module."""
        from twinkle.patch import apply_patch

        causal = self._backbone.model
        before = causal.forward
        apply_patch(self.model, patch_cls, **kwargs)
        if causal.forward != before:  # what lies between body and head is now the patch's affair
            self._backbone, self._unpatched = replace(self._backbone, splits=False), self._backbone
        self._changed()

    def undo_patch(self, patch_cls: Any) -> None:
        """Undo a patch that `apply_patch` applied, also one from before the model's first adapter."""
        from twinkle.patch import is_applied, undo_patch

        causal = self._backbone.model
        before = causal.forward
        undo_patch(causal if is_applied(causal, patch_cls) else self.model, patch_cls)
        if causal.forward != before and self._unpatched is not None:
            self._backbone, self._unpatched = self._unpatched, None
        self._changed()

    def _changed(self) -> None:
        """Measure and try again what depends on the forwards of the model's parts."""
        self._recompute.forget()
        if not self.parallel.in_lockstep:  # a sharded model could not run by itself
            self._backbone.segmenter.forget()

    def set_grad_scaler(self, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the loss scale of fp16; keyword arguments in the words of `torch.amp.GradScaler`."""
        if self.mixed_precision != "fp16":
            raise TrainingStateError(
                f"set_grad_scaler is for mixed_precision='fp16'; this model has {self.mixed_precision!r}"
            )
        group = self._group(adapter_name)
        if group.pending:
            raise TrainingStateError(
                f"set_grad_scaler: adapter {group.adapter_name!r} has gradients of the old scale; make the step "
                "first, or drop them with zero_grad(flush=True)"
            )
        group.loss_scale = LossScaler.from_config(kwargs)

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, is_trainable: bool = True, gradient_accumulation_steps: int = 1
    ) -> None:
        """Add a LoRA adapter, freeze the base model, and make the adapter the active one.

        Args:
            adapter_name: letters, digits, `_` and `-`.
            config_or_dir: `peft.LoraConfig`, a dict of its fields, or the folder of a saved adapter.
            is_trainable: False adds it for `forward_only` and sampling alone.
            gradient_accumulation_steps: backward calls for each update.
        """
        check_adapter(adapter_name, self.optimizer_group)
        if self._is_sharded:
            raise TrainingStateError(
                f"adapter {adapter_name!r}: the model is sharded already; add adapters before set_optimizer and before "
                "the first forward"
            )
        if steps := self.optimizer_group[""].updates:
            raise TrainingStateError(
                f"adapter {adapter_name!r}: the full model was trained for {steps} steps, which the adapter's files "
                "would not hold; save it, and make a model from that folder"
            )
        group = self._new_group(adapter_name)
        set_accumulation(group, gradient_accumulation_steps)
        self.model, config = adapters.add_adapter(self.model, adapter_name, config_or_dir)
        group.adapter_config = config
        self.optimizer_group[adapter_name] = group
        self.active_group = adapter_name
        group.trainable = is_trainable
        if not is_trainable:
            adapters.freeze(self.model, adapter_name)

    # inside

    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        name = self.active_group if adapter_name is None else adapter_name
        if name not in self.optimizer_group:
            hint = nearest(name, self.optimizer_group)
            raise ArgumentError(
                f"there is no adapter {name!r}{f'; did you mean {hint[0]!r}?' if hint else ''}; "
                f"there are {sorted(self.optimizer_group)} ('' is the full model)"
            )
        return self.optimizer_group[name]

    def _select(self, adapter_name: str | None) -> OptimizerGroup:
        group = self._group(adapter_name)
        adapters.select(self.model, group.adapter_name, group.trainable)
        return group

    def _trained(self, adapter_name: str | None, *, saving: bool = False) -> OptimizerGroup:
        """Select what is to be trained (or, with `saving`, written or read), if it can be."""
        group = self._select(adapter_name)
        if not group.adapter_name and len(self.optimizer_group) > 1:
            raise TrainingStateError(
                "the full model is frozen since it has adapters, and its weights stay as they were loaded; name one of "
                f"{sorted(set(self.optimizer_group) - {''})}"
            )
        if not group.trainable and not saving:
            raise TrainingStateError(f"adapter {group.adapter_name!r} was added with is_trainable=False")
        return group

    def _new_group(self, name: str) -> OptimizerGroup:
        group = new_group(name, self.device_mesh, self.parallel.ranks.control)
        if self.mixed_precision == "fp16":
            group.loss_scale = LossScaler.from_config(self._scaler_options)
        return group

    @property
    def _is_sharded(self) -> bool:
        return self.parallel.in_lockstep and any(group.placed for group in self.optimizer_group.values())

    def _place(self, group: OptimizerGroup, *, trained: bool = True) -> None:
        """Put the parameters where the ranks want them, before anything is built on them or computed with them.

        Args:
            group: whose.
            trained: whether they are to be trained, or only looked at so far.
        """
        if self._is_sharded:
            return
        if self.parallel.in_lockstep:  # shards keep the dtype that they have now
            for other in self.optimizer_group.values():
                self._widen(other)
        elif trained:
            self._widen(group)
        if group.placed:
            return
        ranks = self.parallel.ranks
        if not ranks.is_first and not any(other.placed for other in self.optimizer_group.values()):
            # Dropout masks of their own; the first rank's, and so a single process's, are those of the seed.
            torch.manual_seed((torch.initial_seed() + 1_000_003 * ranks.index) % 2**63)
        group.placed = True
        causal, segmenter = self._backbone.model, self._backbone.segmenter
        if self.parallel.in_lockstep:  # once it is sharded no rank can try it alone
            segmenter.assume(ranks.on_first("trying packed rows", segmenter.measured))
        self.parallel.place(causal, list(causal._no_split_modules or ()), PRECISION[self.mixed_precision])

    def _widen(self, group: OptimizerGroup) -> None:
        """Keep in float32 what mixed precision trains."""
        if group.wide:
            return
        group.wide = True
        name = group.adapter_name
        if self.mixed_precision == "no" or not group.trainable or (not name and len(self.optimizer_group) > 1):
            return
        for _, parameter in adapters.named_parameters(self.model, name, frozen=bool(name)):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
