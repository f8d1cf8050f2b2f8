"""`MultiLoraTransformersModel`: one frozen base model, and many adapters that train in one pass."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from twinkle import get_logger, registry, remote_class, remote_function
from twinkle.data_format import ModelOutput
from twinkle.digests import check_digests
from twinkle.engine import Operation, OperationError, OperationResult
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle.hub import local_folder
from twinkle.model.base import Inputs
from twinkle_torch.numerics import Evidence
from twinkle_transformers.adapters import CONFIG, WEIGHTS
from twinkle_transformers.describe import describe
from twinkle_transformers.flat_step import is_elementwise
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.optimizers import DEFAULT_WEIGHT_DECAY, build_optimizer
from twinkle_transformers.options import PRECISION
from twinkle_transformers.pool import files
from twinkle_transformers.pool.passes import Flight
from twinkle_transformers.pool.pool import TOKENS_PER_PASS, LoraPool, seed_of
from twinkle_transformers.pool.stepping import step_together
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.pool.together import answers, check_names, encode_each, joined, share, sort_rows
from twinkle_transformers.pool.work import Work
from twinkle_transformers.rows import as_rows
from twinkle_transformers.scoring import loss_name
from twinkle_transformers.sharing import check_sharing
from twinkle_transformers.stepping import set_accumulation
from twinkle_transformers.sync.terms import Changes, terms_of
from twinkle_transformers.versions import AdapterVersion

Names = str | Sequence[str | None]


@remote_class()
class MultiLoraTransformersModel(TransformersModel):
    """One frozen base model and many LoRA adapters, each with everything that a training of its own has.

    Every method takes `adapter_name=`, which is required. `forward_backward`, `forward_only` and `clip_grad_and_step`
    also take a list: rows of several adapters then go through the model together, and what each adapter gets is what
    it would have got alone. The base model sees its own dropout switched off; adapters have theirs.

    Args:
        lora_config: fields that an adapter given as a mapping has unless it says otherwise.
        max_loras: refuse more adapters than this; by default memory is the only limit.
        max_r: refuse higher ranks; by default there is no limit.
        max_length: refuse longer rows; by default the model's context is the limit.
        target_modules: what adapters may adapt: "all-linear", or last names of layers.
        tokens_per_pass: rows are computed so many tokens at a time; the update does not depend on it.
        share_prefixes: compute a prompt that several rows of an adapter begin with once. True is an error on a model
            that cannot; "auto" computes rows whole there.
        adapter_memory: bytes that adapters may take where the model is, beyond which those that were idle longest wait
            in host memory; by default 40 % of what is free.
        host_memory: bytes that those may take there, beyond which they wait on disk; by default 25 % of what is free.
        **kwargs: those of `TransformersModel`.

    Raises:
        Unsupported: the mesh shards the model, or the model cannot see several sequences in one row.
    """

    def __init__(
        self,
        model_cls: Any = None,
        model_id: str | None = None,
        config: Any = None,
        device_mesh: Any = None,
        mixed_precision: Literal["no", "fp8", "fp16", "bf16"] = "bf16",
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
        if mixed_precision not in ("no", "bf16"):
            raise Unsupported(
                f"MultiLoraTransformersModel: mixed_precision={mixed_precision!r} is not supported; use 'bf16' or 'no'"
            )
        super().__init__(model_cls, model_id, config, device_mesh, mixed_precision, **kwargs)
        if self.parallel.in_lockstep:
            raise Unsupported("MultiLoraTransformersModel: a mesh with fsdp shards the base model; use dp alone")
        dtype = PRECISION[self.mixed_precision] or self.model.dtype
        self.pool = LoraPool(
            self._backbone, self.device, self.autocast, dtype, self._recompute, self._new_group, self._encode,
            tokens_per_pass=tokens_per_pass, on_nonfinite=self.on_nonfinite, adapter_memory=adapter_memory,
            host_memory=host_memory, parallel=self.parallel,
        )  # fmt: skip
        self._shares = check_sharing(share_prefixes)
        self._settle_sharing()
        self._defaults = dict(lora_config or {})
        self._limits = files.Limits(max_loras, max_r, max_length, target_modules)
        self._flights: dict[str, tuple[Tenant, Work, Flight, tuple[int, int]]] = {}
        self.optimizer_group, self.active_group = {}, ""

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch to the Hugging Face module, unless adapters could not act past it.

        Raises:
            Unsupported: the patch replaces the forward of a layer that adapters may be on; nothing is changed then.
        """
        super().apply_patch(patch_cls, **kwargs)
        try:
            self._look_again()
        except Unsupported:
            self.undo_patch(patch_cls)
            raise

    def undo_patch(self, patch_cls: Any) -> None:
        """Undo a patch that `apply_patch` applied."""
        super().undo_patch(patch_cls)
        self._look_again()

    def _look_again(self) -> None:
        self.pool.look_again(self._backbone)
        self._settle_sharing()

    def _settle_sharing(self) -> None:
        refusal = self._backbone.segmenter.check_prefixes() if self._shares else "not wanted"
        if refusal is not None and self._shares is True:
            raise Unsupported(f'{refusal}, or use share_prefixes="auto", which computes rows whole here')
        self.pool.passes.share_prefixes = refusal is None

    def evidence(self) -> list[Evidence]:
        """Return what was measured about each fast path of this model, that of adapters in one pass included."""
        found = super().evidence()
        return found if self.pool.passes.evidence is None else [*found, self.pool.passes.evidence]

    # adapters

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
            seed: of first weights and dropout; by default of torch's seed and the name.

        Raises:
            ArgumentError: the name is taken, a value is wrong, nothing matches, or a limit is passed.
            Unsupported: a field that adapters on a shared base model cannot have.
        """
        folder = local_folder(config_or_dir) if isinstance(config_or_dir, str | Path) else None
        config = config_or_dir if folder is None else files.read_config_of(folder)
        if isinstance(config, Mapping):
            config = {**self._defaults, **config}
        self._limits.check_count(adapter_name, len(self.pool.tenants))
        ref = self.pool.add(adapter_name, config, seed=self._agreed_seed(adapter_name, config, seed))
        tenant = self.pool.tenants.find(ref)
        try:
            self._limits.check(adapter_name, tenant.plan)
            set_accumulation(tenant.group, gradient_accumulation_steps)
            if folder is not None:
                check_digests(folder, (WEIGHTS, CONFIG))
                files.load_weights(self.pool.tenants[ref], folder, self.pool.sites)
        except BaseException:
            self.pool.remove(ref)
            raise
        self.optimizer_group[adapter_name] = tenant.group
        self.active_group = adapter_name

    def remove_adapter(self, adapter_name: str) -> None:
        """Remove an adapter with its optimizer and gradients; its name is free again."""
        self.pool.remove(adapter_name)
        del self.optimizer_group[adapter_name]
        self._flights.pop(adapter_name, None)

    def set_optimizer(self, optimizer_cls: Any = "AdamW", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set an adapter's optimizer; arguments as those of `TransformersModel`.

        One that updates each number by itself (AdamW, SGD, ...) runs over all of them as one vector; others, and
        `params=` with rules, get the matrices A and B by PEFT's names.
        """
        tenant = self._tenant(adapter_name)
        found = registry().resolve(optimizer_cls, "optimizer")
        if isinstance(found, type) and is_elementwise(found) and kwargs.get("params") is None:
            if found in (torch.optim.Adam, torch.optim.AdamW) and not kwargs.get("foreach"):
                kwargs.setdefault("fused", True)
            optimizer = build_optimizer(found, [("adapter", tenant.flat)], **kwargs)
            for group in optimizer.param_groups:  # a vector, but of matrices: they decay
                if "weight_decay" in group:
                    decay = kwargs.get("weight_decay")
                    group["weight_decay"] = DEFAULT_WEIGHT_DECAY if decay is None else decay
                    group["decays"] = True
            tenant.group.left_out = []
        else:
            optimizer = build_optimizer(found, list(tenant.views().items()), **kwargs)
            tenant.group.left_out = [tenant.flat, *tenant.views().values()]
        tenant.group.optimizer = optimizer
        if tenant.group.lr_scheduler is not None:
            get_logger().warning("adapter %r: its scheduler followed the old optimizer; set it again", tenant.name)
            tenant.group.lr_scheduler = None

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
        """Run a batch of one adapter in training mode and keep its graph; arguments as those of `TransformersModel`."""
        tenant = self._tenant(adapter_name)
        tenant.group.begin_backward()
        self._ready(tenant.group, training=True)
        options = {"temperature": temperature, "return_logits": return_logits, "task": task}
        rows = self._encoded(tenant.group, inputs)
        work = self.pool.prepare(0, Operation(tenant.ref, "forward_backward", rows, options=options), staged=True)
        flight = self.pool.passes.forward(work.parts)
        if work.error is not None:
            raise work.error
        self._flights[tenant.name] = (tenant, work, flight, tenant.state)
        tenant.group.training = True
        tenant.group.train_status.passes = [part.item for part in work.parts if part.item is not None]
        return tenant.group.train_status.passes[0].outputs

    @remote_function()
    def backward(self, *, adapter_name: str | None = None) -> None:
        """Add the gradients of the last calculated loss of an adapter."""
        tenant = self._tenant(adapter_name)
        tenant.group.begin_backward()
        owner, work, flight, state = self._flights.get(tenant.name, (None, None, None, (0, 0)))
        if owner is not tenant or work is None or flight is None:
            raise TrainingStateError("backward: there is no forward; call forward and calculate_loss first")
        if state != tenant.state:
            raise TrainingStateError(
                f"backward: the weights of adapter {tenant.name!r} have changed since its forward; call forward and "
                "calculate_loss again"
            )
        for item in (part.item for part in work.parts if part.item is not None and part.item.usable):
            if item.loss is None:
                raise TrainingStateError(
                    "backward: no loss was calculated; call calculate_loss() (or forward_backward()) first"
                )
            if not item.loss.loss_sum.requires_grad:
                name = loss_name(tenant.group.loss_instance)
                raise TrainingStateError(f"backward: the result of {name} has no gradient; was it detached?")
        del self._flights[tenant.name]
        self.pool.passes.backward(flight)
        self.pool.collect(flight)
        if isinstance(result := self.pool.finish(work), OperationError):
            raise result.error

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
            micro_batch_size: rows of an adapter in the model at one time; the update does not depend on it.
            temperature: divides the logits.
            return_logits: also return logits.
            task: as in `forward`.
            **loss_kwargs: arguments of the losses; what has one entry a row is cut with the rows, and an entry of None
                means that its row has none. `ref_logps="base"` (or "base" as entry of a row) computes the base model's
                log-probabilities of these rows in the same pass.

        Returns:
            for one name `loss`, `num_tokens` and `logps` `[B, T]`; for a list one output a row, in order: `logps`
            `[T]`, and the `loss` and `num_tokens` of its adapter's rows.

        Raises:
            OperationsFailed: with a list, if the operation of an adapter failed; the others are done.
        """
        options = {"temperature": temperature, "return_logits": return_logits, "task": task}
        if isinstance(adapter_name, str | None):
            tenant = self._tenant(adapter_name)
            self._ready(tenant.group, training=True)
            rows = self._encoded(tenant.group, inputs)
            operation = Operation(tenant.ref, "forward_backward", rows, None, loss_kwargs, options)
            work = self._run([operation], micro_batch_size)[0]
            tenant.group.training, tenant.group.train_status.passes = True, []
            return self._joined(tenant.group, work)
        with self.pool.paging.together():
            return self._mixed(inputs, adapter_name, options, loss_kwargs, micro_batch_size, training=True)

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
        """Run rows of one adapter or of several without a graph; `disable_lora=True` sees the base model alone.

        Arguments and results are those of `forward_backward`, without a loss; `topk_logprobs` is that of
        `TransformersModel`.
        """
        options: dict[str, Any] = {"temperature": temperature, "return_logits": return_logits, "task": task}
        options["topk_logprobs"] = topk_logprobs
        if isinstance(adapter_name, str | None):
            tenant = self._tenant(adapter_name)
            rows = self._encoded(tenant.group, inputs)
            operation = Operation(None if disable_lora else tenant.ref, "forward", rows, None, {}, options)
            [(work, result)] = self._run([operation], micro_batch_size, evaluates=tenant)
            tenant.group.training = False
            tenant.group.eval_status.passes = [p.item for p in work.parts if p.item is not None] if work else []
            return self._joined(tenant.group, (work, result))
        names = [None] * len(adapter_name) if disable_lora else adapter_name
        with self.pool.paging.together():
            return self._mixed(inputs, names, options, {}, micro_batch_size, training=False)

    # the step

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
            for a list the norm of each adapter's gradient before clipping (0 where an accumulation is unfinished).
        """
        how = (self.parallel, max_grad_norm, norm_type, self.on_nonfinite)
        options: dict[str, Any] = {"gradient_accumulation_steps": gradient_accumulation_steps, "flush": flush}
        if isinstance(adapter_name, str | None):
            step_together([self._tenant(adapter_name)], *how, **options)
            return None
        if not isinstance(adapter_name, list | tuple):
            raise ArgumentError(f"adapter_name is a {type(adapter_name).__name__}; give a name or a list of names")
        if len(set(adapter_name)) < len(adapter_name):
            raise ArgumentError("clip_grad_and_step: an adapter is named twice; each has one step")
        with self.pool.paging.together():
            tenants = [self._tenant(name) for name in adapter_name]
            return step_together(tenants, *how, **options)

    # numbers

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return an adapter's weights by PEFT's names."""
        tenant = self._tenant(adapter_name)
        return files.weights_of(tenant.plan, tenant.flat)

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable summary of what is trained and how."""
        tenant = self._tenant(adapter_name)
        trained = tenant.plan.layout.parameters
        return describe(self.model, tenant.group, precision=self.mixed_precision, source=self.model_id, trained=trained)

    def sampler_version(self, adapter_name: str) -> AdapterVersion:
        """Return an adapter's weights as they are now, which training does not change; see `LoraPool.version`."""
        return self.pool.version(adapter_name)

    # inside

    def _changes(self, adapter_name: str | None) -> tuple[str, Changes]:
        tenant = self._tenant(adapter_name)
        version = self.pool.version(tenant.ref)
        if experts := [name for name, shape in version.layout.shapes.items() if shape.experts]:
            raise Unsupported(
                f"adapter {tenant.name!r} adapts experts ({experts[0]}), which are neither merged nor sent; share the "
                "model instead: TorchSampler(model=model)"
            )
        return tenant.name, Changes(terms_of(version, self.pool.sites))

    def _agreed_seed(self, name: str, config: Any, seed: int | None) -> int | None:
        """Return the seed of an adapter's first weights; where none is given, ranks take that of the first."""
        given = seed is not None or (isinstance(config, Mapping) and config.get("seed") is not None)
        if given or self.parallel.ranks.alone:
            return seed
        return int(self.parallel.ranks.agree(f"adapter {name!r}", float(seed_of(name) % 2**53))[0])

    def _tenant(self, adapter_name: str | None) -> Tenant:
        if adapter_name is None:
            raise ArgumentError(
                f"adapter_name is required where many adapters share a model; there are {self.pool.tenants.names()}"
            )
        return self.pool.tenants[adapter_name]

    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        return self._tenant(adapter_name).group

    def _select(self, adapter_name: str | None) -> OptimizerGroup:
        return self._tenant(adapter_name).group

    def _trained(self, adapter_name: str | None, *, saving: bool = False) -> OptimizerGroup:
        return self._tenant(adapter_name).group

    def _place(self, group: OptimizerGroup, *, trained: bool = True) -> None:
        """Do nothing: every rank has the whole of an adapter, and made it from the same seed."""

    def _names(self, group: OptimizerGroup) -> Mapping[str, torch.nn.Parameter]:
        return self._tenant(group.adapter_name).parameters()

    def _weights(self, group: OptimizerGroup) -> Mapping[str, torch.Tensor]:
        return self.get_state_dict(adapter_name=group.adapter_name)

    def _load_adapter(self, group: OptimizerGroup, folder: Path) -> None:
        files.load_weights(self._tenant(group.adapter_name), folder, self.pool.sites)

    def _resumed(self, group: OptimizerGroup) -> None:
        self._tenant(group.adapter_name).adopt_gradients()

    def _encode(self, trajectory: Any) -> Any:
        return self.pool.base.encoder(self.model_path)(trajectory)

    def _encoder(self, group: OptimizerGroup) -> Callable[[Any], Any]:
        encode: Callable[[Any], Any] = self._encode if group.template is None else group.template.encode
        return encode

    def _encoded(self, group: OptimizerGroup, inputs: Any) -> list[Any]:
        rows = as_rows(inputs, self._encoder(group))
        self._limits.check_rows(rows)
        return rows

    def _run(
        self, operations: Sequence[Operation | OperationError], rows: int | None, evaluates: Tenant | None = None
    ) -> list[tuple[Work | None, OperationResult | OperationError]]:
        found: list[tuple[Work | None, Any]] = []
        for index, operation in enumerate(operations):
            if isinstance(operation, OperationError):
                found.append((None, operation))
                continue
            try:
                found.append((self.pool.prepare(index, operation, rows=rows, evaluates=evaluates), None))
            except Exception as error:  # a loss or processor may raise anything, and the others go on
                name = None if operation.adapter is None else self.pool.tenants.find(operation.adapter).name
                found.append((None, OperationError(error, name, index)))
        self.pool.execute([work for work, _ in found if work is not None])
        return [(work, failed if work is None else self.pool.finish(work)) for work, failed in found]

    def _joined(self, group: OptimizerGroup, done: tuple[Work | None, Any]) -> ModelOutput:
        _, result = done
        if isinstance(result, OperationError):
            raise result.error
        return joined(result, left=group.pads_left())

    def _mixed(
        self, inputs: Any, names: Any, options: Mapping[str, Any], loss_kwargs: Mapping[str, Any], size: int | None, *,
        training: bool,
    ) -> list[ModelOutput]:  # fmt: skip
        names = check_names(names, inputs)
        rows = sort_rows(names)
        tenants = {name: self._tenant(name) for name in rows if name is not None}
        losses: dict[str | None, Any] = {}
        for name, tenant in tenants.items() if training else ():
            self._ready(tenant.group, training=True)
            losses[name] = tenant.group.loss()
        shares = share(loss_kwargs, losses, rows) if loss_kwargs else {}
        operations: list[Operation | OperationError] = []
        for who, mine in rows.items():
            group = self.pool.base if who is None else tenants[who].group
            try:
                encoded = encode_each([inputs[row] for row in mine], self._encoder(group))
                self._limits.check_rows(encoded)
            except Exception as error:  # a template may raise anything, and the others go on
                operations.append(OperationError(error, who, len(operations)))
                continue
            if who is None:
                operations.append(Operation(None, "forward", encoded, options=options))
            else:
                kind: Literal["forward", "forward_backward"] = "forward_backward" if training else "forward"
                arguments = shares.get(who, {})
                operations.append(Operation(tenants[who].ref, kind, encoded, None, arguments, options))
        results = [result for _, result in self._run(operations, size)]
        for tenant in tenants.values():  # calculate_loss must not score an earlier forward
            tenant.group.training = training
            (tenant.group.train_status if training else tenant.group.eval_status).passes = []
        return answers(rows, results, len(names))
