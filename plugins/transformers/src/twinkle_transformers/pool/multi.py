"""`MultiLoraTransformersModel`: one frozen base model, and many adapters that train in one pass."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch

from twinkle import registry, remote_class, remote_function
from twinkle.checkpoint_engine import CheckpointEngineMixin
from twinkle.data_format import ModelOutput
from twinkle.errors import ArgumentError, Unsupported
from twinkle.model import TwinkleModel
from twinkle.model.base import Inputs
from twinkle_torch.numerics import Evidence
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.batches import check_sharing
from twinkle_transformers.checkpoints import ModelCheckpoints
from twinkle_transformers.describe import describe
from twinkle_transformers.group import DEFAULT_METRICS, OptimizerGroup
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.pool.adapters import PooledAdapters, PoolLimits
from twinkle_transformers.pool.calls import PoolCalls
from twinkle_transformers.pool.pool import TOKENS_PER_PASS, LoraPool
from twinkle_transformers.sync.sending import outgoing_weights
from twinkle_transformers.training import AdapterTraining

Names = str | Sequence[str | None]


@remote_class()
class MultiLoraTransformersModel(TwinkleModel, CheckpointEngineMixin):
    """One frozen base model and many LoRA adapters, each with its own optimizer, loss, template, processor and metrics.

    Every method takes `adapter_name=`, which is required. `forward_backward`, `forward_only` and `clip_grad_and_step`
    also take a list: rows of several adapters then run through the model together, and each adapter gets the results
    that it would get alone. Dropout of the base model is off; adapters have their own.

    Args:
        lora_config: default fields of adapters that are given as mappings.
        max_loras: maximum number of adapters; by default memory is the only limit.
        max_r: maximum rank; by default there is no limit.
        max_length: maximum length of rows; by default the model's context is the limit.
        target_modules: layers that adapters may adapt: "all-linear", or last names of layers.
        tokens_per_pass: maximum number of tokens of a pass; the update does not depend on it.
        share_prefixes: compute a prompt that several rows of an adapter begin with once. True is an error on a model
            that does not support it; "auto" computes whole rows there.
        adapter_memory: maximum number of bytes of adapters on the device, beyond which those idle longest move to host
            memory; by default 40 % of the free memory.
        host_memory: maximum number of bytes of adapters there, beyond which they move to disk; by default 25 % of the
            free memory.
        **kwargs: arguments of `TransformersModel`.

    Raises:
        Unsupported: the mesh shards the model, or the model cannot carry adapters.
    """

    default_metrics = DEFAULT_METRICS

    def __init__(
        self,
        model_cls: Any = None,
        model_id: str | None = None,
        config: Any = None,
        device_mesh: Any = None,
        mixed_precision: Literal["auto", "no", "fp8", "fp16", "bf16"] = "auto",
        *,
        lora_config: Mapping[str, Any] | None = None,
        max_loras: int | None = None,
        max_r: int | None = None,
        max_length: int | None = None,
        target_modules: str | Sequence[str] = "all-linear",
        tokens_per_pass: int = TOKENS_PER_PASS,
        share_prefixes: bool | Literal["auto"] = "auto",
        adapter_memory: int | None = None,
        host_memory: int | None = None,
        **kwargs: Any,
    ) -> None:
        if mixed_precision not in ("auto", "no", "bf16"):
            raise Unsupported(
                f"MultiLoraTransformersModel: mixed_precision must be 'auto', 'bf16' or 'no', got {mixed_precision!r}"
            )
        check_sharing(share_prefixes)
        limits = PoolLimits(max_loras, max_r, max_length, target_modules)
        if kwargs.get("enable_router_replay"):
            raise Unsupported(
                "MultiLoraTransformersModel: enable_router_replay is for TransformersModel; a pass of several adapters "
                "has rows of several callers, and experts are not recorded for each"
            )
        loaded = LoadedModel(model_cls, model_id, config, device_mesh, mixed_precision, **kwargs)
        if loaded.parallel.in_lockstep:
            raise Unsupported("MultiLoraTransformersModel: a mesh with fsdp shards the base model; use dp alone")
        self._loaded = loaded
        self.model_id, self.model_path, self.base = loaded.model_id, loaded.path, loaded.base
        self.device, self.device_mesh, self.parallel = loaded.device, loaded.device_mesh, loaded.parallel
        self.mixed_precision, self.on_nonfinite = loaded.mixed_precision, loaded.on_nonfinite
        self.pool = LoraPool(
            loaded.backbone, loaded.device, loaded.autocast, loaded.compute_dtype, loaded.new_recompute,
            loaded.new_group, OptimizerGroup("").encoder(loaded.tokenizer_path), tokens_per_pass=tokens_per_pass,
            on_nonfinite=loaded.on_nonfinite, adapter_memory=adapter_memory, host_memory=host_memory,
            parallel=loaded.parallel, share_prefixes=share_prefixes,
        )  # fmt: skip
        self._adapters = PooledAdapters(self.pool, limits, lora_config or {})
        self._training = AdapterTraining(loaded, self._adapters)
        self._calls = PoolCalls(self.pool, self._adapters, self._training, limits, loaded.on_nonfinite)
        self._checkpoints = ModelCheckpoints(loaded, self._adapters)

    @property
    def model(self) -> Any:
        """The Hugging Face module, without a PEFT wrapper: the pool adds the terms of adapters itself."""
        return self._loaded.module

    @property
    def backbone(self) -> Backbone:
        """The module as body and head."""
        return self._loaded.backbone

    @property
    def optimizer_group(self) -> dict[str, OptimizerGroup]:
        """Training state of each adapter by name."""
        return self._adapters.groups

    @property
    def active_group(self) -> str:
        """Name of the adapter that was added last."""
        return self._adapters.active

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which forwards of this model run: mixed precision, if it is on."""
        return self._loaded.autocast()

    def evidence(self) -> list[Evidence]:
        """Return what was measured about each fast path of this model, including that of adapters in one pass."""
        evidence = self._loaded.evidence()
        return evidence if self.pool.passes.evidence is None else [*evidence, self.pool.passes.evidence]

    # Components

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """See `TransformersModel.set_loss`."""
        self._training.set_loss(adapter_name, loss_cls, kwargs)

    def set_optimizer(self, optimizer_cls: Any = "AdamW", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set an adapter's optimizer; the arguments are those of `TransformersModel.set_optimizer`.

        An elementwise optimizer (AdamW, SGD, ...) updates all weights as one vector; others, and `params=` with rules,
        get the matrices A and B by PEFT's names.
        """
        self._adapters.set_optimizer(adapter_name, optimizer_cls, kwargs)

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """See `TransformersModel.set_lr_scheduler`."""
        self._training.set_lr_scheduler(adapter_name, scheduler_cls, kwargs)

    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """See `TransformersModel.set_template`."""
        self._training.set_template(adapter_name, template_cls, kwargs)

    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """See `TransformersModel.set_processor`."""
        self._training.set_processor(adapter_name, processor_cls, kwargs)

    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """See `TransformersModel.add_metric`."""
        self._training.add_metric(adapter_name, metric_cls, is_training, kwargs)

    def set_grad_scaler(self, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """See `TransformersModel.set_grad_scaler`."""
        self._training.set_grad_scaler(adapter_name, kwargs)

    def apply_patch(self, patch_cls: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Apply a patch to the Hugging Face module, unless it would bypass adapters; or one to an adapter.

        Args:
            patch_cls: the patch. One with `per_adapter`, such as `NEFTunePatch`, changes one adapter's training passes
                only; applying it again replaces it.
            adapter_name: the adapter of such a patch; None for all others.
            **kwargs: arguments of the patch.

        Raises:
            Unsupported: the patch replaces the forward of a layer that adapters may be on; nothing is changed then.
            ArgumentError: a patch of the module was given an adapter, or one of adapters none.
        """
        if self._is_per_adapter(patch_cls, adapter_name):
            tenant, patch = self._adapters.tenant(adapter_name), registry().build(patch_cls, "patch", **kwargs)
            tenant.patches = [other for other in tenant.patches if type(other) is not type(patch)] + [patch]
            return
        self._loaded.apply_patch(patch_cls, kwargs)
        try:
            self.pool.rebind(self._loaded.backbone)
        except Unsupported:
            self.undo_patch(patch_cls)
            raise

    @staticmethod
    def _is_per_adapter(patch_cls: Any, adapter_name: str | None) -> bool:
        per_adapter = bool(getattr(registry().resolve(patch_cls, "patch"), "per_adapter", False))
        if per_adapter and adapter_name is None:
            raise ArgumentError(f"{patch_cls!r} is a patch of one adapter; give adapter_name=")
        if adapter_name is not None and not per_adapter:
            raise ArgumentError(
                f"{patch_cls!r} changes the base model, which all adapters share; leave adapter_name= out"
            )
        return per_adapter

    def undo_patch(self, patch_cls: Any, *, adapter_name: str | None = None) -> None:
        """Undo a patch that `apply_patch` applied, with the same `adapter_name`."""
        if self._is_per_adapter(patch_cls, adapter_name):
            tenant, kind = self._adapters.tenant(adapter_name), registry().resolve(patch_cls, "patch")
            tenant.patches = [other for other in tenant.patches if type(other) is not kind]
            return
        self._loaded.undo_patch(patch_cls)
        self.pool.rebind(self._loaded.backbone)

    # Adapters

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any,
        *,
        gradient_accumulation_steps: int = 1,
        seed: int | None = None,
    ) -> None:
        """Add a LoRA adapter.

        Args:
            adapter_name: letters, digits, `_` and `-`.
            config_or_dir: `peft.LoraConfig`; a mapping of its fields and of `seed`, `train_attn`, `train_mlp`,
                `train_unembed`; or the folder (or hub id) of a saved adapter.
            gradient_accumulation_steps: backward calls for each update.
            seed: seed of first weights and dropout; by default a function of torch's seed and the name.

        Raises:
            ArgumentError: the name is taken, a value is invalid, nothing matches, or a limit is exceeded.
            Unsupported: a field that is not supported for adapters on a shared base model.
        """
        self._adapters.add(adapter_name, config_or_dir, accumulation=gradient_accumulation_steps, seed=seed)

    def remove_adapter(self, adapter_name: str) -> None:
        """Remove an adapter with its optimizer and gradients; the name can be used again."""
        self._adapters.remove(adapter_name)
        self._calls.forget(adapter_name)

    def sampler_version(self, adapter_name: str) -> AdapterVersion:
        """Return the present weights of an adapter; training does not change the result. See `LoraPool.version`."""
        return self.pool.version(adapter_name)

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
    ) -> ModelOutput:
        """Run a batch of one adapter in training mode and keep its graph; see `TransformersModel.forward`."""
        options = {"temperature": temperature, "return_logits": return_logits, "task": task}
        return self._calls.forward(adapter_name, inputs, options)

    def drop_forward(self, *, adapter_name: str | None = None) -> None:
        """Free the graph of the last `forward` of an adapter; `backward` then needs a new one."""
        self._calls.drop_forward(adapter_name)

    @remote_function(collect="mean")
    def calculate_loss(self, *, adapter_name: str | None = None, **loss_kwargs: Any) -> float:
        """See `TransformersModel.calculate_loss`."""
        return self._training.calculate_loss(adapter_name, loss_kwargs)

    @remote_function()
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Add the gradients of the last calculated loss of an adapter."""
        self._calls.backward(adapter_name)

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward_backward(
        self,
        *,
        inputs: Any,
        adapter_name: Names | None = None,
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        **loss_kwargs: Any,
    ) -> Any:
        """Forward, loss and backward of rows of one adapter or of several at once.

        Args:
            inputs: rows, trajectories, or a collated batch; with several adapters a list of rows or trajectories.
            adapter_name: one name, or one a row (None is the base model, which only goes forward).
            micro_batch_size: maximum number of rows of an adapter in a pass; the update does not depend on it.
            temperature: divides the logits.
            return_logits: also return logits.
            task: as in `forward`.
            **loss_kwargs: arguments of the losses; those with one entry a row are cut with the rows, where None means
                that the row has none. `ref_logps="base"` (or "base" as entry of a row) computes the base model's
                log-probabilities of these rows in the same pass.

        Returns:
            for one name, `loss`, `num_tokens` and `logps` `[B, T]`; for a list, one output a row, in order: `logps`
            `[T]`, and the `loss` and `num_tokens` of its adapter's rows.

        Raises:
            OperationsFailed: with a list, the operation of an adapter failed; the others were completed.
        """
        options = {"temperature": temperature, "return_logits": return_logits, "task": task}
        return self._calls.forward_backward(adapter_name, inputs, micro_batch_size, options, loss_kwargs)

    @remote_function(dispatch="slice_dp", collect="flatten")
    def forward_only(
        self,
        *,
        inputs: Any,
        adapter_name: Names | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = "causal_lm",
        micro_batch_size: int | None = None,
        disable_lora: bool = False,
        topk_logprobs: int | None = None,
    ) -> Any:
        """Run rows of one adapter or of several without a graph; `disable_lora=True` uses only the base model.

        Arguments and results are those of `forward_backward`, without a loss; `topk_logprobs` is that of
        `TransformersModel`.
        """
        options: dict[str, Any] = {"temperature": temperature, "return_logits": return_logits, "task": task}
        options["topk_logprobs"] = topk_logprobs
        return self._calls.forward_only(adapter_name, inputs, micro_batch_size, options, disable_lora)

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
        """See `TransformersModel.clip_grad_norm`."""
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
        """See `TransformersModel.step`."""
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
        """See `TransformersModel.zero_grad`."""
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
        """See `TransformersModel.lr_step`."""
        self._training.lr_step(adapter_name, metrics, gradient_accumulation_steps)

    @remote_function(collect="first")
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: Any = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> Any:
        """`clip_grad_norm`, `step`, `zero_grad` and `lr_step` of one adapter, or of a list of them in one call.

        Returns:
            for a list, the norm of each adapter's gradient before clipping (0 if an accumulation is unfinished).
        """
        return self._calls.clip_grad_and_step(
            adapter_name, max_grad_norm, norm_type, gradient_accumulation_steps, flush
        )

    # Metrics and state

    @remote_function(collect="first")
    def calculate_metric(self, is_training: bool, *, adapter_name: str | None = None) -> dict[str, float]:
        """See `TransformersModel.calculate_metric`."""
        return self._training.calculate_metric(adapter_name, is_training)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable summary of what is trained and how."""
        tenant = self._adapters.tenant(adapter_name)
        trained = tenant.plan.layout.parameters
        return describe(self.model, tenant.group, precision=self.mixed_precision, source=self.model_id, trained=trained)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return an adapter's weights by PEFT's names."""
        return self._adapters.state_dict(adapter_name)

    def get_peft_config_dict(self, adapter_name: str | None = None) -> dict[str, Any] | None:
        """See `TransformersModel.get_peft_config_dict`."""
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
        """See `TransformersModel.save`."""
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
        """See `TransformersModel.load`."""
        self._checkpoints.load(adapter_name, name, output_dir, load_optimizer=load_optimizer, token=token)

    @remote_function(collect="first")
    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """See `TransformersModel.resume_from_checkpoint`."""
        return self._checkpoints.resume(adapter_name, Path(checkpoint_dir), only_model=resume_only_model)

    @remote_function(dispatch="all")
    def send_weights(
        self,
        adapter_name: str | None = None,
        base_sync_done: bool = False,
        merge_and_sync: bool = False,
        model_keys: Sequence[str] | None = None,
    ) -> None:
        """See `TransformersModel.send_weights`."""
        weights = outgoing_weights(
            self._loaded, self._adapters, adapter_name, base_sync_done, merge_and_sync, model_keys
        )
        asyncio.run(self.checkpoint_engine.send_weights(weights))
