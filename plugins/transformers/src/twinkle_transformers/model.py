"""`TransformersModel`: a Hugging Face model with its adapters, trained by a loop that the user writes."""

import functools
from collections.abc import Mapping
from typing import Any, Literal

import torch

from twinkle import remote_class, remote_function
from twinkle.data_format import ModelOutput
from twinkle.errors import TrainingStateError
from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle.model.base import Inputs
from twinkle.platform import Platform
from twinkle_torch.numerics import Evidence
from twinkle_transformers import adapters, loop
from twinkle_transformers.checkpoints import Checkpoints
from twinkle_transformers.describe import describe
from twinkle_transformers.group import OptimizerGroup, Pass
from twinkle_transformers.loading import load_model
from twinkle_transformers.options import (
    check_call,
    check_clipping,
    check_model_id,
    check_model_options,
    top_of_call,
)
from twinkle_transformers.parallel import load_on_ranks, parallel_of
from twinkle_transformers.passes import Passes
from twinkle_transformers.recompute import Recompute
from twinkle_transformers.rows import as_rows, batch_size, row_inputs, rows_together, share_arguments, split_rows
from twinkle_transformers.scoring import check_loss_arguments, check_rows_for
from twinkle_transformers.segments import recompute_contexts
from twinkle_transformers.sharding import whole
from twinkle_transformers.sharing import check_sharing
from twinkle_transformers.stepping import clip_group, schedule, set_accumulation, step_group
from twinkle_transformers.sync.sending import SendsWeights


@remote_class()
class TransformersModel(Passes, Checkpoints, SendsWeights):
    """A causal language model from a Hugging Face folder (or GGUF file), on one device or on the ranks of a mesh.

    Without an adapter the whole model is trained; `add_adapter_to_model` freezes it and trains LoRA. The loop methods
    have the meaning that `TwinkleModel` documents. Defaults until set: `CrossEntropyLoss`, AdamW at 1e-5, the model's
    own chat template, right padding, `LossMetric`, `Accuracy` and `TrainMetric`.

    On several ranks every rank makes the same calls with its own rows. A mesh with `fsdp` shards every parameter
    (FSDP2; `dp` beside it makes replicas), one without keeps the whole model on each rank (DDP). The update is that of
    one process with all rows, whatever the split.

    Args:
        model_cls: class (or its name in transformers) to load with; by default by the model's configuration.
        model_id: local folder, GGUF file, or `scheme://` reference.
        config: transformers configuration to use instead of the folder's.
        device_mesh: by default the one given to `twinkle.initialize`.
        mixed_precision: "bf16" runs matrix products in bfloat16 with float32 trainable weights; "fp16" likewise in
            float16, with a loss scale; "no" computes in `dtype`.
        strategy: both published names mean this backend's own; the mesh says how parameters lie.
        ddp_config: for meshes without fsdp: `bucket_cap_mb` (64) of the flat buffers that gradients travel in. What
            torch's wrapper needs to be told (`find_unused_parameters`, ...) is always so here.
        fsdp_config: for meshes with fsdp: `reshard_after_forward` (True), `cpu_offload` (False), `reduce_dtype`
            ("float32"), `transformer_cls_names_to_wrap` (the model's `_no_split_modules`).
        grad_scaler_config: for fp16, in the words of `torch.amp.GradScaler`.
        memory_efficient_init: with fsdp, load on the first rank alone and send each layer to the others.
        gradient_checkpointing: recompute activations in the backward: less memory, a third more time. "auto" does so
            when the activations of a pass would not fit.
        on_nonfinite: "raise" stops at a loss or gradient norm that is not finite and keeps the batch in the error;
            "skip" leaves the micro-batch (or the step) out and counts it in `nonfinite_skipped`.
        share_prefixes: compute a prompt that several rows of a micro-batch begin with once; with dropout they have its
            draws in common. True is an error on a model that cannot (one with a state along the row), at the first
            batch with a shared prompt; "auto" computes rows whole there.
        dtype: of the loaded weights; by default the checkpoint's own with mixed precision, else float32. Whatever is
            trained is kept in float32 under mixed precision.
        **kwargs: passed to `from_pretrained` (`attn_implementation`, `revision`, ...).

    Attributes:
        model: the Hugging Face module, wrapped by `peft.PeftModel` once it has an adapter.
        optimizer_group: state of each adapter by name; the full model's name is `""`.
        model_path: the local folder it was loaded from.
        base: its `id`, the `fingerprint` of that folder when it was loaded, and the hub's `commit` where it has one.

    Raises:
        ModelLoadError: the folder is missing, incomplete or corrupt.
        Unsupported: the mesh divides the model by other dimensions than dp and fsdp.
    """

    def __init__(
        self,
        model_cls: Any = None,
        model_id: str | None = None,
        config: Any = None,
        device_mesh: Any = None,
        mixed_precision: Literal["no", "fp8", "fp16", "bf16"] = "bf16",
        strategy: Literal["accelerate", "native_fsdp"] = "accelerate",
        ddp_config: dict[str, Any] | None = None,
        fsdp_config: dict[str, Any] | None = None,
        grad_scaler_config: dict[str, Any] | None = None,
        memory_efficient_init: bool = False,
        *,
        gradient_checkpointing: bool | Literal["auto"] = "auto",
        on_nonfinite: Literal["raise", "skip"] = "raise",
        share_prefixes: bool | Literal["auto"] = False,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        check_model_options(mixed_precision, strategy, on_nonfinite, grad_scaler_config)
        check_model_id(model_id, model_cls, kwargs)
        self.model_id = str(model_id)
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.on_nonfinite = on_nonfinite
        self.device = torch.device(Platform.get_local_device())
        self.parallel = parallel_of(device_mesh, ddp_config, fsdp_config)
        dtype = dtype or ("float32" if mixed_precision == "no" else "auto")
        # What will be sharded is loaded into host memory and moved layer by layer.
        place = None if self.parallel.in_lockstep else self.device
        load = functools.partial(
            load_model, self.model_id, dtype=dtype, model_cls=model_cls, config=config, device=place, **kwargs
        )
        self.model, self.model_path, self._backbone = load_on_ranks(load, self.parallel, memory_efficient_init)
        self._backbone.segmenter.precision = self.autocast
        self.base = {
            "id": self.model_id,
            "fingerprint": fingerprint(self.model_path),
            "commit": commit_of(self.model_path),
        }
        self._recompute = Recompute(
            self._backbone.model, gradient_checkpointing, self.device, recompute_contexts,
            forward=self._probe, agree=self.parallel.any_rank if self.parallel.in_lockstep else None,
        )  # fmt: skip
        self._scaler_options = grad_scaler_config
        self._longest, self._shares = 0, check_sharing(share_prefixes)
        self.optimizer_group: dict[str, OptimizerGroup] = {"": self._new_group("")}
        self.active_group = ""

    def evidence(self) -> list[Evidence]:
        """Return what was measured about each fast path of this model, after measuring what was not measured yet.

        A model whose weights are sharded over ranks measured before they were sharded, and does not measure again.
        """
        return list(self._backbone.segmenter.measured().values())

    # forward and backward

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward(
        self,
        *,
        inputs: Inputs,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
    ) -> ModelOutput:
        """Run the whole batch in training mode and keep its graph.

        Args:
            inputs: rows, trajectories, or a collated batch.
            adapter_name: the adapter to train; by default the active one.
            temperature: divides the logits.
            return_logits: also return `[B, T, V]` logits.
            task: "causal_lm" (or "fused_lm_ce", which is how it is computed anyway), or "embedding": one vector of
                length 1 for each row, from its last token.

        Returns:
            `logps` `[B, T]`, and `logits` if asked for; or `embeddings` `[B, H]`; with graph.
        """
        check_call(task, temperature)
        group = self._trained(adapter_name)
        rows = as_rows(inputs, group.encoder(self.model_path))
        self._ready(group, training=True)
        batch = self._uncut(group, rows, return_logits, task)
        self._idle_passes("forward", 1)
        group.training = True
        item = self._pass(group, group.train_status, rows, batch, temperature, return_logits, task)
        group.train_status.passes = [item]
        return group.train_status.passes[0].outputs

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward_only(
        self,
        *,
        inputs: Inputs,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        disable_lora: bool = False,
        topk_logprobs: int | None = None,
    ) -> ModelOutput:
        """Run in evaluation mode without a graph, in micro-batches of `micro_batch_size` rows.

        `disable_lora=True` (or `adapter_name=""`) answers with the base model alone. `topk_logprobs=k` also gives the
        k most probable tokens at each trained position, as `topk_logprobs` and `topk_indices` `[B, T, k]`, without
        making whole logits. The other arguments are those of `forward`.
        """
        check_call(task, temperature)
        top = top_of_call(topk_logprobs)
        group = self._select(adapter_name)
        parts = split_rows(self._rows(group, inputs), micro_batch_size, rows_together(group.loss_instance))
        status = group.eval_status
        self._ready(group, training=False)
        group.training = False
        base = disable_lora or not group.adapter_name
        with torch.no_grad(), adapters.without_adapters(self.model, base):
            parts, batches = self._plan(group, status, parts, return_logits, task, top)
            idle = self._idle_passes("forward_only", len(parts))
            status.passes = [
                self._pass(group, status, part, batch, temperature, return_logits, task, top)
                for part, batch in zip(parts, batches, strict=True)
            ]
            for _ in range(idle):
                self._idle_pass(group, status, task)
        status.idle = not parts
        return loop.join([item.outputs for item in status.passes], left=group.pads_left()) if parts else {}

    @remote_function(collect="mean")
    def calculate_loss(self, *, adapter_name: str | None = None, **loss_kwargs: Any) -> float:
        """Return the loss of the last `forward` or `forward_only`, divided by its own denominator.

        Keyword arguments go to the loss; those with one entry a row are cut with the rows.

        Raises:
            NonFiniteError: as `forward_backward`.
        """
        group = self._select(adapter_name)
        status = group.train_status if group.training else group.eval_status
        if not status.passes and status.idle:
            return 0.0
        if not status.passes:
            raise TrainingStateError("calculate_loss: there is no forward to score; call forward or forward_only first")
        loss = group.loss()
        check_loss_arguments(loss, loss_kwargs)
        sizes = [batch_size(item.inputs) for item in status.passes]
        shares = share_arguments(loss_kwargs, row_inputs(loss), sizes, left=group.pads_left())
        spread = not self.parallel.ranks.alone
        with torch.set_grad_enabled(group.training):
            for item, share in zip(status.passes, shares, strict=True):
                loop.score(group.loss_instance, item, split=len(status.passes) > 1, spread=spread, loss_kwargs=share)
                if group.training:
                    loop.check_finite(group, item, self.on_nonfinite, self._counts)
        if not group.training:
            status.unseen += loop.settled(item for item in status.passes if not item.counted)
            for item in status.passes:
                item.counted = True  # scoring the same forward again is no second evaluation
            loop.feed_metrics(group, status)
        return float(loop.join([item.outputs for item in status.passes])["loss"])

    @remote_function()
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Add the gradients of the last calculated loss."""
        group = self._trained(adapter_name)
        status = group.train_status
        if not status.passes:
            raise TrainingStateError("backward: there is no forward; call forward and calculate_loss first")
        group.begin_backward()
        self.model.train()  # recomputation runs in it, and a forward_only may have come between
        usable = [item for item in status.passes if item.usable]
        self._idle_passes("backward", len(usable))
        for item in usable:
            loop.backward(group, item)
        group.count_backward(loop.settled(usable))

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward_backward(
        self,
        *,
        inputs: Inputs,
        adapter_name: str | None = None,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Forward, loss and backward of a batch; memory is bounded by `micro_batch_size` rows.

        Args:
            inputs: rows, trajectories, or a collated batch.
            adapter_name: the adapter to train; by default the active one.
            micro_batch_size: rows in the model at one time; the update does not depend on it.
            temperature: divides the logits.
            return_logits: also return `[B, T, V]` logits.
            task: as in `forward`.
            **loss_kwargs: arguments of the loss; `advantages`, `old_logps` and the like are cut with the rows.

        Returns:
            `loss` (a number, divided by this call's denominator), `num_tokens`, `logps` `[B, T]`; without graph.

        Raises:
            NonFiniteError: the loss is NaN or infinite and `on_nonfinite="raise"`; weights and optimizer are as before,
                the gradients of the unfinished step are gone (as after any error once a gradient was added).
        """
        check_call(task, temperature)
        group = self._trained(adapter_name)
        group.begin_backward()
        loss = group.loss()
        check_loss_arguments(loss, loss_kwargs)
        parts = split_rows(self._rows(group, inputs), micro_batch_size, rows_together(loss))
        self._ready(group, training=True)
        # All batches first: a bad row must not cost a gradient.
        parts, batches = self._plan(group, group.train_status, parts, return_logits, task)
        left, sizes = group.pads_left(), [batch_size(batch) for batch in batches]
        check_rows_for(loss, sizes)
        shares = share_arguments(loss_kwargs, row_inputs(loss), sizes, left=left)
        group.training, group.train_status.passes = True, []
        done: list[Pass] = []
        touched, spread = False, not self.parallel.ranks.alone
        idle = self._idle_passes("forward_backward", len(parts))
        try:
            for part, batch, share in zip(parts, batches, shares, strict=True):
                item = self._pass(group, group.train_status, part, batch, temperature, return_logits, task)
                loop.score(group.loss_instance, item, split=len(parts) > 1, spread=spread, loss_kwargs=share)
                loop.check_finite(group, item, self.on_nonfinite, self._counts)
                if item.usable:
                    touched = True
                    loop.backward(group, item)
                    done.append(item)
                loop.detach(item, logits=return_logits)
            for _ in range(idle):
                self._idle_pass(group, group.train_status, task)
        except BaseException:
            if touched:
                group.drop_passes()  # a part of a batch's gradient is the gradient of nothing
            raise
        group.count_backward(loop.settled(done))
        outputs = [item.outputs for item in done]
        if not done:
            return {"loss": float("nan") if parts else 0.0, "num_tokens": 0.0}
        return loop.join(outputs, left=left)

    # the step

    @remote_function(collect="first")
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> float:
        """Divide the gradients by their denominator and clip their norm; returns the norm before clipping.

        Returns 0 while an accumulation is unfinished (unless `flush`). `max_grad_norm` <= 0 measures only.

        Raises:
            ArgumentError: `max_grad_norm` is no number, or `norm_type` none above 0.
            NonFiniteError: the norm is not finite and `on_nonfinite="raise"`; nothing was updated.
        """
        check_clipping(max_grad_norm, norm_type)
        group = self._trained(adapter_name)
        set_accumulation(group, gradient_accumulation_steps)
        if not group.due(flush):
            return 0.0
        return clip_group(group, self.parallel, max_grad_norm, norm_type, self.on_nonfinite)

    @remote_function()
    def step(
        self,
        *,
        optim_params: Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> None:
        """Update the parameters, if an accumulation is complete (or `flush`).

        Args:
            optim_params: `lr`, `weight_decay`, `betas`, `eps` to overwrite from now on.
            adapter_name: whose parameters; by default the active one.
            gradient_accumulation_steps: change the number of backward calls a step.
            flush: update from an unfinished accumulation.

        Raises:
            TrainingStateError: nothing was accumulated, or the last update's gradients are still there.
        """
        group = self._trained(adapter_name)
        set_accumulation(group, gradient_accumulation_steps)
        step_group(group, self.parallel, optim_params, flush, self.on_nonfinite)

    @remote_function()
    def zero_grad(
        self,
        *,
        set_to_none: bool = True,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> None:
        """Forget the gradients of a finished accumulation (of an unfinished one too with `flush`)."""
        group = self._group(adapter_name)
        set_accumulation(group, gradient_accumulation_steps)
        if group.stepped or group.due(flush):
            group.clear_gradients(set_to_none)

    @remote_function()
    def lr_step(
        self,
        *,
        metrics: float | None = None,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> None:
        """Advance the scheduler if an update was made since the last call.

        `metrics` is the number that a scheduler such as `ReduceLROnPlateau` watches; by default the step's loss.
        `flush` is that of `step`, which has made the update or has not.
        """
        group = self._group(adapter_name)
        set_accumulation(group, gradient_accumulation_steps)
        schedule(group, metrics)

    # numbers

    @remote_function(collect="first")
    def calculate_metric(self, is_training: bool, *, adapter_name: str | None = None) -> dict[str, float]:
        """Return the numbers of all metrics since the last call; each is a plain number of the steps it covers."""
        group = self._group(adapter_name)
        status = group.train_status if is_training else group.eval_status
        loop.feed_metrics(group, status)
        skipped = self.parallel.ranks.agree(f"calculate_metric({is_training})", status.skipped).sum()
        values: dict[str, float] = {}
        for metric in status.metrics:
            values |= metric.calculate()
        if skipped:
            values["nonfinite_skipped"] = int(skipped)
        status.skipped, status.passes = 0, []
        return values

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable summary of what is trained and how."""
        group = self._select(adapter_name)
        return describe(self.model, group, precision=self.mixed_precision, source=self.model_id)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return the trained weights by saved name (PEFT's names for an adapter), whole; collective if sharded."""
        group = self._select(adapter_name)
        self._idle_passes("get_state_dict", 0)
        self.parallel.settle()
        return {name: whole(tensor) for name, tensor in adapters.weights(self.model, group.adapter_name).items()}

    def get_peft_config_dict(self, adapter_name: str | None = None) -> dict[str, Any] | None:
        """Return the adapter's PEFT configuration as a dict, or None for the full model."""
        config = self._group(adapter_name).adapter_config
        return None if config is None else config.to_dict()
