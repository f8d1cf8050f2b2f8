"""`TransformersModel`: a Hugging Face model with its adapters, trained by a loop that the user writes."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch

from twinkle import remote_class, remote_function
from twinkle.checkpoint_engine import CheckpointEngineMixin
from twinkle.data_format import ModelOutput
from twinkle.model import TwinkleModel
from twinkle.model.base import Inputs
from twinkle.model.transformers.moe.router_replay import RouterReplayAction
from twinkle_torch.numerics import Evidence
from twinkle_transformers import adapters
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.checkpoints import ModelCheckpoints
from twinkle_transformers.describe import describe
from twinkle_transformers.group import DEFAULT_METRICS, OptimizerGroup
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.parallel import whole
from twinkle_transformers.passes import Passes
from twinkle_transformers.sync.sending import outgoing_weights
from twinkle_transformers.training import AdapterTraining, PeftAdapters


@remote_class()
class TransformersModel(TwinkleModel, CheckpointEngineMixin):
    """A causal language model from a Hugging Face folder (or GGUF file), on one device or on the ranks of a mesh.

    Without an adapter the whole model is trained; `add_adapter_to_model` freezes it and trains LoRA. The loop methods
    have the meaning that `TwinkleModel` documents. Defaults until set: `CrossEntropyLoss`, AdamW at 1e-5, the model's
    own chat template, right padding, `LossMetric`, `Accuracy` and `TrainMetric`.

    On several ranks every rank makes the same calls with its own rows. A mesh with `fsdp` shards every parameter
    (FSDP2; `dp` beside it makes replicas), one without keeps the whole model on each rank (DDP). The update is that of
    one process with all rows, whatever the split.

    Args:
        model_cls: class (or its name in transformers) to load with; by default by the model's configuration.
        model_id: local folder, GGUF file, or `scheme://` reference; None makes random weights of `config`.
        config: transformers configuration to use instead of the folder's.
        device_mesh: by default the one given to `twinkle.initialize`.
        mixed_precision: "bf16" runs matrix products in bfloat16 with float32 trainable weights; "fp16" likewise in
            float16, with a loss scale; "no" computes in `dtype`; "auto" is "bf16" if the device computes bfloat16
            natively or `dtype` is not float32, else "no".
        strategy: both published names mean this backend's own; the mesh decides how parameters are distributed.
        ddp_config: for meshes without fsdp: `bucket_cap_mb` (64) of the flat buffers in which gradients are summed.
            Options of torch's wrapper that are not needed here (`find_unused_parameters`, ...) are accepted.
        fsdp_config: for meshes with fsdp: `reshard_after_forward` (True), `cpu_offload` (False), `reduce_dtype`
            ("float32"), `transformer_cls_names_to_wrap` (the model's `_no_split_modules`).
        grad_scaler_config: for fp16, arguments of `torch.amp.GradScaler`.
        memory_efficient_init: with fsdp, load only on the first rank and send each layer to the others.
        gradient_checkpointing: recompute activations in the backward: less memory, a third more time. "auto" does so
            when the activations of a pass would not fit.
        on_nonfinite: "raise" raises an error with the batch if a loss or gradient norm is not finite; "skip" leaves the
            micro-batch (or the step) out and counts it in `nonfinite_skipped`.
        share_prefixes: compute a prompt that several rows of a micro-batch begin with once; the rows then share its
            dropout mask. True is an error on a model that does not support it (one with a state along the row), at the
            first batch with a shared prompt; "auto" computes whole rows there.
        dtype: dtype of the loaded weights; by default the checkpoint's with mixed precision, else float32. Trained
            weights are kept in float32 under mixed precision.
        tokenizer_id: folder or reference of the tokenizer and its chat template; by default those of the model.
        enable_router_replay: for mixture-of-experts models: allow `router_replay_action` in forwards.
        **kwargs: passed to `from_pretrained` (`attn_implementation`, `revision`, ...).

    Attributes:
        model: the Hugging Face module, wrapped by `peft.PeftModel` once it has an adapter.
        optimizer_group: state of each adapter by name; the full model's name is `""`.
        model_path: the local folder it was loaded from; None for random weights.
        tokenizer_path: the local folder of its tokenizer; None if it is unknown.
        base: its `id`, the `fingerprint` of that folder when it was loaded, and the hub's `commit` where it has one.

    Raises:
        ModelLoadError: the folder is missing, incomplete or corrupt.
        Unsupported: the mesh divides the model by other dimensions than dp and fsdp; or `enable_router_replay`, and
            the model has no routers whose choice can be replayed.
    """

    default_metrics = DEFAULT_METRICS

    def __init__(
        self,
        model_cls: Any = None,
        model_id: str | None = None,
        config: Any = None,
        device_mesh: Any = None,
        mixed_precision: Literal["auto", "no", "fp8", "fp16", "bf16"] = "auto",
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
        tokenizer_id: str | None = None,
        enable_router_replay: bool = False,
        **kwargs: Any,
    ) -> None:
        loaded = LoadedModel(
            model_cls, model_id, config, device_mesh, mixed_precision, strategy=strategy, ddp_config=ddp_config,
            fsdp_config=fsdp_config, grad_scaler_config=grad_scaler_config,
            memory_efficient_init=memory_efficient_init, gradient_checkpointing=gradient_checkpointing,
            on_nonfinite=on_nonfinite, dtype=dtype, tokenizer_id=tokenizer_id,
            enable_router_replay=enable_router_replay, **kwargs,
        )  # fmt: skip
        self._loaded = loaded
        self.model_id, self.model_path, self.base = loaded.model_id, loaded.path, loaded.base
        self.tokenizer_path = loaded.tokenizer_path
        self.device, self.device_mesh, self.parallel = loaded.device, loaded.device_mesh, loaded.parallel
        self.mixed_precision, self.on_nonfinite = loaded.mixed_precision, loaded.on_nonfinite
        self._adapters = PeftAdapters(loaded)
        self._training = AdapterTraining(loaded, self._adapters)
        self._passes = Passes(loaded, self._adapters, self._training, share_prefixes)
        self._checkpoints = ModelCheckpoints(loaded, self._adapters)

    @property
    def model(self) -> Any:
        """The Hugging Face module, wrapped by `peft.PeftModel` once it has an adapter."""
        return self._loaded.module

    @property
    def backbone(self) -> Backbone:
        """The module as body and head."""
        return self._loaded.backbone

    @property
    def optimizer_group(self) -> dict[str, OptimizerGroup]:
        """Training state of each adapter by name; the full model has the name `""`."""
        return self._adapters.groups

    @property
    def active_group(self) -> str:
        """Name of the adapter that calls without `adapter_name=` use."""
        return self._adapters.active

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which forwards of this model run: mixed precision, if it is on."""
        return self._loaded.autocast()

    def evidence(self) -> list[Evidence]:
        """Return what was measured about each fast path of this model, after measuring what was not measured yet.

        A model whose weights are sharded over ranks was measured before it was sharded, and is not measured again.
        """
        return self._loaded.evidence()

    # Components

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the loss; keyword arguments go to its constructor."""
        self._training.set_loss(adapter_name, loss_cls, kwargs)

    def set_optimizer(self, optimizer_cls: Any = "AdamW", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the optimizer over the adapter's parameters, or over the whole model's.

        Args:
            optimizer_cls: any form of component argument; every optimizer of `torch.optim` has its name there.
            adapter_name: name of the adapter; by default the active one.
            **kwargs: `lr` (1e-5), `weight_decay` (0.01, matrices only), `params`, and the constructor's own.
        """
        self._adapters.set_optimizer(adapter_name, optimizer_cls, kwargs)

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the scheduler of the adapter's optimizer, which must have been set; kwargs go to the constructor."""
        self._training.set_lr_scheduler(adapter_name, scheduler_cls, kwargs)

    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the template that encodes trajectories; `model_id` is this model's unless given."""
        self._training.set_template(adapter_name, template_cls, kwargs)

    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the processor that collates rows; keyword arguments go to its constructor."""
        self._training.set_processor(adapter_name, processor_cls, kwargs)

    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """Add a metric for training, for evaluation, or (None) one for each."""
        self._training.add_metric(adapter_name, metric_cls, is_training, kwargs)

    def set_grad_scaler(self, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set the loss scale of fp16; keyword arguments are those of `torch.amp.GradScaler`."""
        self._training.set_grad_scaler(adapter_name, kwargs)

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch to the Hugging Face module."""
        self._loaded.apply_patch(patch_cls, kwargs)
        self._passes.recompute.forget()

    def undo_patch(self, patch_cls: Any) -> None:
        """Undo a patch that `apply_patch` applied, also one from before the model's first adapter."""
        self._loaded.undo_patch(patch_cls)
        self._passes.recompute.forget()

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any,
        *,
        is_trainable: bool = True,
        gradient_accumulation_steps: int = 1,
        seed: int | None = None,
    ) -> None:
        """Add a LoRA adapter, freeze the base model, and make the adapter the active one.

        Args:
            adapter_name: letters, digits, `_` and `-`.
            config_or_dir: `peft.LoraConfig`, a dict of its fields, or the folder of a saved adapter.
            is_trainable: False adds it only for `forward_only` and sampling.
            gradient_accumulation_steps: backward calls for each update.
            seed: seed of the first weights, which are those of `MultiLoraTransformersModel` with this seed: a layer's
                do not depend on which other layers are adapted. None draws them from torch's generator.

        Raises:
            ArgumentError: PEFT refuses the configuration, or a key of `rank_pattern` or `alpha_pattern` matches no
                adapted layer.
        """
        self._adapters.add(
            adapter_name, config_or_dir, is_trainable=is_trainable, accumulation=gradient_accumulation_steps, seed=seed
        )

    # Forward and backward

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward(
        self,
        *,
        inputs: Inputs,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        router_replay_action: RouterReplayAction | str | None = None,
        router_replay_manual_cleanup: bool = False,
    ) -> ModelOutput:
        """Run the whole batch in training mode and keep its graph.

        Args:
            inputs: rows, trajectories, or a collated batch.
            adapter_name: the adapter to train; by default the active one.
            temperature: divides the logits.
            return_logits: also return `[B, T, V]` logits.
            task: "causal_lm" (or "fused_lm_ce", which computes the same), or "embedding": one vector of length 1 for
                each row, from its last token.
            router_replay_action: with `enable_router_replay`: "record" also returns `routed_experts`, int16 `[B, T,
                routers, k]`, the experts that the routers chose; "replay_forward" uses the `routed_experts` of rows
                that have them, and returns what was used. -1 is no record: padding, or the router's own choice.
            router_replay_manual_cleanup: accepted; no experts are kept between calls.

        Returns:
            `logps` `[B, T]`, and `logits` on request; or `embeddings` `[B, H]`; with graph.

        Raises:
            TrainingStateError: `router_replay_action` without `enable_router_replay`.
            DataError: `routed_experts` of a row do not fit its tokens or the model.
        """
        return self._passes.forward(adapter_name, inputs, temperature, return_logits, task, router_replay_action)

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward_only(
        self,
        *,
        inputs: Inputs,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        router_replay_action: RouterReplayAction | str | None = None,
        router_replay_manual_cleanup: bool = False,
        micro_batch_size: int | None = None,
        disable_lora: bool = False,
        topk_logprobs: int | None = None,
    ) -> ModelOutput:
        """Run in evaluation mode without a graph, in micro-batches of `micro_batch_size` rows.

        `disable_lora=True` (or `adapter_name=""`) uses the base model without adapters. `topk_logprobs=k` also returns
        the k most probable tokens at each trained position, as `topk_logprobs` and `topk_indices` `[B, T, k]`, without
        computing whole logits. The other arguments are those of `forward`.
        """
        return self._passes.forward_only(
            adapter_name, inputs, temperature, return_logits, task, micro_batch_size, disable_lora, topk_logprobs,
            router_replay_action,
        )  # fmt: skip

    @remote_function(collect="mean")
    def calculate_loss(self, *, adapter_name: str | None = None, **loss_kwargs: Any) -> float:
        """Return the loss of the last `forward` or `forward_only`, divided by its own denominator.

        Keyword arguments go to the loss; those with one entry a row are cut with the rows.

        Raises:
            NonFiniteError: as `forward_backward`.
        """
        return self._training.calculate_loss(adapter_name, loss_kwargs)

    @remote_function()
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Add the gradients of the last calculated loss."""
        self._passes.backward(adapter_name)

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
        router_replay_action: RouterReplayAction | str | None = None,
        router_replay_manual_cleanup: bool = False,
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Forward, loss and backward of a batch; memory is bounded by `micro_batch_size` rows.

        Args:
            inputs: rows, trajectories, or a collated batch.
            adapter_name: the adapter to train; by default the active one.
            micro_batch_size: maximum number of rows of a pass; the update does not depend on it.
            temperature: divides the logits.
            return_logits: also return `[B, T, V]` logits.
            task: as in `forward`.
            router_replay_action: as in `forward`.
            router_replay_manual_cleanup: as in `forward`.
            **loss_kwargs: arguments of the loss; `advantages`, `old_logps` and the like are cut with the rows.
                `rewards`, a number for each row, is for a loss that takes it; otherwise it is only checked here, and a
                service records it.

        Returns:
            `loss` (a number, divided by this call's denominator), `num_tokens`, `logps` `[B, T]`; without graph.

        Raises:
            NonFiniteError: the loss is NaN or infinite and `on_nonfinite="raise"`; weights and optimizer are unchanged,
                the gradients of the unfinished step are discarded (as after any error once a gradient was added).
        """
        return self._passes.forward_backward(
            adapter_name, inputs, micro_batch_size, temperature, return_logits, task, loss_kwargs, router_replay_action
        )

    # Step

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
            ArgumentError: `max_grad_norm` is not a number, or `norm_type` is not above 0.
            NonFiniteError: the norm is not finite and `on_nonfinite="raise"`; nothing was updated.
        """
        return self._training.clip_grad_norm(adapter_name, max_grad_norm, norm_type, gradient_accumulation_steps, flush)

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
            optim_params: new values of `lr`, `weight_decay`, `betas`, `eps`, for this and later steps.
            adapter_name: name of the adapter; by default the active one.
            gradient_accumulation_steps: change the number of backward calls a step.
            flush: update from an unfinished accumulation.

        Raises:
            TrainingStateError: nothing was accumulated, or the gradients of the last update were not cleared.
        """
        self._training.step(adapter_name, optim_params, gradient_accumulation_steps, flush)

    @remote_function()
    def zero_grad(
        self,
        *,
        set_to_none: bool = True,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> None:
        """Clear the gradients of a finished accumulation (of an unfinished one too with `flush`)."""
        self._training.zero_grad(adapter_name, set_to_none, gradient_accumulation_steps, flush)

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

        `metrics` is the value for a scheduler such as `ReduceLROnPlateau`; by default the step's loss. `flush` is
        accepted as in `step`, which decides whether there was an update.
        """
        self._training.lr_step(adapter_name, metrics, gradient_accumulation_steps)

    # Metrics and state

    @remote_function(collect="first")
    def calculate_metric(self, is_training: bool, *, adapter_name: str | None = None) -> dict[str, float]:
        """Return the values of all metrics since the last call, and reset them; each is a plain number."""
        return self._training.calculate_metric(adapter_name, is_training)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable summary of what is trained and how."""
        group = self._adapters.select(adapter_name)
        return describe(self.model, group, precision=self.mixed_precision, source=self.model_id)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return the trained weights by saved name (PEFT's names for an adapter), whole; collective if sharded."""
        group = self._adapters.select(adapter_name)
        self.parallel.idle_passes("get_state_dict", 0)
        self.parallel.settle()
        return {name: whole(tensor) for name, tensor in adapters.weights(self.model, group.adapter_name).items()}

    def get_peft_config_dict(self, adapter_name: str | None = None) -> dict[str, Any] | None:
        """Return the adapter's PEFT configuration as a dict, or None for the full model."""
        return self._training.peft_config(adapter_name)

    # ModelCheckpoints and weight transfer

    @remote_function(collect="first")
    def save(
        self,
        name: str | None = None,
        output_dir: str | None = None,
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        loop_state: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Save a PEFT adapter, or the full model as Hugging Face safetensors, with the tokenizer's files.

        Args:
            name: folder name, by default `checkpoint-step-<cur_step>`.
            output_dir: its parent, by default `output`.
            interval: save only when `cur_step` is a multiple; else return None.
            adapter_name: name of the adapter; by default the active one.
            save_optimizer: also save the state that `resume_from_checkpoint` needs to continue bit for bit.
            consumed_train_samples: number from `DataLoader.get_state()`, saved in `trainer_state.json`.
            loop_state: further state of the loop as JSON data, saved there under `loop`.

        Returns:
            the directory, which is written atomically. An older checkpoint of that name is replaced.

        Raises:
            OutputError: it cannot be written, or something other than a checkpoint has this name.
            ArgumentError: `loop_state` is not JSON data.
        """
        return self._checkpoints.save(
            adapter_name, name, output_dir, interval, save_optimizer=save_optimizer,
            consumed_train_samples=consumed_train_samples, loop_state=loop_state,
        )  # fmt: skip

    @remote_function()
    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
        token: str | None = None,
    ) -> None:
        """Load weights (and, with `load_optimizer`, the whole training state) that `save` wrote.

        Args:
            name: a checkpoint's folder, its name below `output_dir`, or its id on a hub.
            output_dir: parent of `name`.
            adapter_name: adapter to load into; by default the active one.
            load_optimizer: load as `resume_from_checkpoint` does.
            token: access token for a private repository of a hub.

        Raises:
            CheckpointError: it is missing, incomplete, or belongs to another model; nothing is changed then.
            HubError: the hub cannot be reached, refuses, or has no such repository.
        """
        self._checkpoints.load(adapter_name, name, output_dir, load_optimizer=load_optimizer, token=token)

    @remote_function(collect="first")
    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Load weights, optimizer, scheduler, counters and random state, adapters and full models alike.

        Args:
            checkpoint_dir: a folder that `save(save_optimizer=True)` wrote.
            resume_only_model: weights and counters only.
            adapter_name: name of the adapter; by default the active one.

        Returns:
            `cur_step`, `consumed_train_samples`, `gradient_accumulation_steps`.
        """
        return self._checkpoints.resume(adapter_name, Path(checkpoint_dir), only_model=resume_only_model)

    @remote_function(dispatch="all")
    def send_weights(
        self,
        adapter_name: str | None = None,
        base_sync_done: bool = False,
        merge_and_sync: bool = False,
        model_keys: Sequence[str] | None = None,
    ) -> None:
        """Send weights with the engine that a `CheckpointEngineManager` prepared, and wait until they were received.

        Weights of the base have the names of the Hugging Face model, tied ones are sent once; A and B of an adapter
        follow under PEFT's names.

        Args:
            adapter_name: name of the adapter; by default the active one. Without adapters all weights are sent.
            base_sync_done: send only the adapter.
            merge_and_sync: send the base with the merged adapter instead of the adapter.
            model_keys: names of the weights of the receiver, compared before anything is computed.

        Raises:
            ArgumentError: the receiver lacks a weight, or `base_sync_done` with `merge_and_sync`.
            Unsupported: the adapter cannot be merged, or cannot be sent alone, or the model is sharded.
        """
        weights = outgoing_weights(
            self._loaded, self._adapters, adapter_name, base_sync_done, merge_and_sync, model_keys
        )
        asyncio.run(self.checkpoint_engine.send_weights(weights))
