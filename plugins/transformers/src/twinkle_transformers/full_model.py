"""All weights of a base model in training, as an engine of adapters offers it: rank 0.

The model is a copy of its own, loaded from the same files, so that the base model of the adapters never changes. Under
mixed precision trained weights are float32, which the base model's are not; without it, the copy adds a quarter to the
memory that gradients and moments take anyway.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from twinkle.engine import (
    AdapterBytes,
    AdapterRef,
    AdapterSpec,
    Operation,
    OperationError,
    OperationResult,
    Progress,
    Step,
    StepResult,
    Usage,
)
from twinkle.errors import (
    ArgumentError,
    CapacityError,
    CheckpointError,
    EngineFault,
    TrainingStateError,
    TwinkleError,
    Unsupported,
)
from twinkle.hub.quiet import quiet_transformers
from twinkle.platform import Platform
from twinkle_transformers.checkpoints import check_full_model, copy_tokenizer, load_full_model
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.memory import free_bytes, host_copy, is_out_of_memory
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.optimizers import try_optimizer
from twinkle_transformers.pool.passes import UsageMeter
from twinkle_transformers.pool.snapshots import (
    FORMAT,
    GRADIENT,
    STATE,
    TENSORS,
    WrittenSnapshot,
    put_optimizer,
    take_training,
)

_BYTES: Final = 16
"""Bytes that a parameter in training takes: weight, gradient, and two moments of AdamW, in float32."""
_WHOLE_ROW: Final = ("embeddings",)
"""Outputs `[B, ...]` that have no entry for each token."""
_OF_POOLS: Final = frozenset({
    "adapter_memory", "host_memory", "lora_config", "max_length", "max_loras", "max_r", "share_prefixes",
    "target_modules", "tokens_per_pass",
})  # fmt: skip
"""Arguments of `MultiLoraTransformersModel` that `TransformersModel` does not have, or that change rounding."""


class FullModel:
    """A model of which all weights are trained: `TransformersModel` without adapters, behind the contract of an engine.

    An operation that fails has changed nothing. Random numbers (the base model's own dropout) are a function of the
    seed and of the operation's number, so that an operation can be computed again.

    Args:
        ref: the reference that means it.
        spec: its specification, whose rank is 0.
        model_id: folder of the base model.
        options: arguments of the engine's model; those of adapters are left out.
        pass_tokens: maximum number of tokens of a pass; a longer row has a pass of its own.
        size: number of parameters.

    Raises:
        ArgumentError: the specification has fields of an adapter.
        CapacityError: weights, gradients and moments do not fit into memory.
    """

    def __init__(
        self, ref: AdapterRef, spec: AdapterSpec, model_id: str, options: Mapping[str, Any], pass_tokens: int, size: int
    ) -> None:
        if spec != AdapterSpec(0, spec.seed, spec.alpha, 0.0, spec.train_attn, spec.train_mlp, spec.train_unembed):
            raise ArgumentError(
                "rank 0 trains all weights: dropout, targets, exclude, rslora, init and the patterns are "
                "of adapters; leave them out"
            )
        self.ref, self.spec, self._pass_tokens = ref, spec, pass_tokens
        own = {name: value for name, value in options.items() if name not in _OF_POOLS}
        _check_memory(size)
        self.model = TransformersModel(model_id=model_id, **own)
        self.group.seed = spec.seed
        self._costs = UsageMeter(self.model.model)
        self._usage = Usage()

    @property
    def group(self) -> OptimizerGroup:
        """Its training state."""
        return self.model.optimizer_group[""]

    @property
    def name(self) -> str:
        """Name of its reference."""
        return self.ref.name

    # Training

    def run(self, operation: Operation, index: int) -> OperationResult | OperationError:
        """Run an operation; see `Engine.run`."""
        try:
            with self._unchanged_on_error(operation.kind == "forward_backward"), self._noise(operation.number):
                outputs = self._outputs(operation)
        except Exception as error:  # a loss or processor may raise anything
            if is_out_of_memory(error) and not isinstance(error, TwinkleError):
                short = CapacityError(f"out of memory: {error}")
                short.__cause__ = error
                return OperationError(short, self.name, index)
            return OperationError(error, self.name, index)
        return self._result(operation, outputs)

    def _outputs(self, operation: Operation) -> Mapping[str, Any]:
        if operation.adapter is not None and operation.loss is not None and operation.kind == "forward":
            raise Unsupported("a forward of a full model has no loss of its own; call calculate_loss")
        rows: Any = [dict(row) for row in operation.rows]
        options: dict[str, Any] = {"micro_batch_size": self._rows_per_pass(operation), **operation.options}
        if operation.kind == "forward":
            return self.model.forward_only(inputs=rows, **options)
        if operation.loss_inputs.get("ref_logps") is not None and isinstance(operation.loss_inputs["ref_logps"], str):
            raise Unsupported(
                "ref_logps='base' is for adapters, whose base model is not trained; compute the reference with "
                "forward_only before the training"
            )
        if options.pop("topk_logprobs", None) is not None:
            raise Unsupported("topk_logprobs: call forward_only; forward_backward of a full model does not return them")
        with self._loss(operation):
            return self.model.forward_backward(inputs=rows, **options, **operation.loss_inputs)

    @contextmanager
    def _loss(self, operation: Operation) -> Iterator[None]:
        """Use the loss of an operation, if it has one, instead of the model's."""
        before = self.group.loss_instance
        if operation.loss is not None:
            self.model.set_loss(operation.loss, **operation.loss_options)
        try:
            yield
        finally:
            if operation.loss is not None:
                self.group.loss_instance = before

    def _rows_per_pass(self, operation: Operation) -> int:
        """Return the number of rows of a pass: a function of the rows alone, so that numbers can be computed again."""
        longest = max((len(row["input_ids"]) for row in operation.rows), default=1)
        return max(1, self._pass_tokens // max(1, longest))

    def _result(self, operation: Operation, outputs: Mapping[str, Any]) -> OperationResult:
        tokens = sum(len(row["input_ids"]) for row in operation.rows)
        training = operation.kind == "forward_backward"
        usage = Usage(tokens, tokens, 0, tokens * self._costs.base * (6 if training else 2))
        self._usage += usage
        result = OperationResult(self._by_row(operation, outputs), usage=usage)
        if training:
            result.denominator = float(outputs["num_tokens"])
            result.loss_sum = float(outputs["loss"]) * result.denominator
        return result

    def _by_row(self, operation: Operation, outputs: Mapping[str, Any]) -> list[Any]:
        """Return the outputs of each row, without padding."""
        rows: list[dict[str, Any]] = [{} for _ in operation.rows]
        left = self.group.pads_left()
        for name, value in outputs.items():
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(rows):
                continue
            for place, row in enumerate(rows):
                own = value[place].detach()
                if name not in _WHOLE_ROW and own.ndim:
                    length = len(operation.rows[place]["input_ids"])
                    own = own[len(own) - length :] if left else own[:length]
                row[name] = own
        return rows

    @contextmanager
    def _unchanged_on_error(self, training: bool) -> Iterator[None]:
        """Put gradients aside while an operation runs, and add its own to them if it succeeds."""
        group = self.group
        if training and group.stepped:  # a new accumulation begins
            group.clear_gradients()
        if not training or group.divided:  # the call is refused before it changes anything
            yield
            return
        aside = {name: p.grad for name, p in self.parameters().items() if p.grad is not None}
        counters = group.cur_step, group.pending, group.denominator, group.loss_sum, group.skipped
        unseen = list(group.train_status.unseen)
        for parameter in self.parameters().values():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for name, parameter in self.parameters().items():
                parameter.grad = aside.get(name)
            group.cur_step, group.pending, group.denominator, group.loss_sum, group.skipped = counters
            group.train_status.unseen = unseen
            raise
        for name, parameter in self.parameters().items():
            if (before := aside.get(name)) is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    @contextmanager
    def _noise(self, number: int | None) -> Iterator[None]:
        """Draw random numbers from the seed and the number of an operation."""
        number = self.group.cur_step if number is None else number
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((self.spec.seed * 1_000_003 + number) % 2**63)
            yield

    def step(self, step: Step, index: int) -> StepResult | OperationError:
        """Make a step; see `Engine.step`.

        Raises:
            EngineFault: the optimizer failed, perhaps after it had updated some weights.
        """
        group = self.group
        updates = group.updates
        try:
            if not step.divide or step.zero_if_none:
                raise Unsupported("a full model is stepped by native calls; its losses are divided, not summed")
            if not group.pending:
                raise TrainingStateError("step: the model has no accumulated gradients; call backward first")
            norm = self.model.clip_grad_norm(step.max_grad_norm, flush=True)
            self.model.step(optim_params=step.optim_params or None, flush=True)
            self.model.zero_grad(flush=True)
            self.model.lr_step()
        except Exception as error:
            if group.updates != updates:
                group.train_status.unseen.clear()
                group.clear_gradients()
                failed = TrainingStateError(f"the step was made, and then a metric or the scheduler failed: {error}")
                failed.__cause__ = error
                return OperationError(failed, self.name, index)
            if not isinstance(error, TwinkleError):
                raise EngineFault(f"an optimizer step stopped halfway: {type(error).__name__}") from error
            return OperationError(error, self.name, index)
        return StepResult(float(norm), group.updates > updates)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `TwinkleModel`; one that takes a list of adapters returns a list.

        Raises:
            EngineFault: memory was exhausted after gradients were added.
        """
        listed = not isinstance(kwargs.pop("adapter_name", None), str | None)
        if name == "clip_grad_and_step":
            norm = self._clip_and_step(*args, **kwargs)
            return [norm] if listed else norm
        if name == "drop_forward":
            self.group.train_status.passes = []
            return None
        if name == "set_optimizer":
            given = args[0] if args else kwargs.get("optimizer_cls", "AdamW")
            rest = {key: value for key, value in kwargs.items() if key != "optimizer_cls"}
            try_optimizer(given, self.model.device, rest)
        try:
            with self._noise(None):
                return getattr(self.model, name)(*args, **kwargs)
        except Exception as error:
            if name == "backward" and is_out_of_memory(error):
                raise EngineFault("a backward stopped halfway: out of memory") from error
            raise

    def _clip_and_step(
        self, max_grad_norm: float = 1.0, norm_type: float = 2, *, flush: bool = False,
        gradient_accumulation_steps: int | None = None,
    ) -> float:  # fmt: skip
        """Step if a step is due; return the norm of the gradient before clipping, and otherwise 0."""
        due: dict[str, Any] = {"gradient_accumulation_steps": gradient_accumulation_steps, "flush": flush}
        norm = self.model.clip_grad_norm(max_grad_norm, norm_type, **due)
        self.model.step(**due)
        self.model.zero_grad(**due)
        self.model.lr_step(**due)
        return float(norm)

    def progress(self) -> Progress:
        """Return how far the training is."""
        group = self.group
        rates = () if group.optimizer is None else tuple(group.learning_rates())
        return Progress(group.cur_step, group.updates, group.pending, group.gradient_accumulation_steps, rates)

    @property
    def usage(self) -> Usage:
        """What all successful operations have cost."""
        return self._usage

    def bytes_of(self) -> AdapterBytes:
        """Return how much memory weights, gradients and optimizer take."""
        held = [*self.model.model.parameters(), *(p.grad for p in self.parameters().values() if p.grad is not None)]
        if self.group.optimizer is not None:
            states = self.group.optimizer.state.values()
            held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return AdapterBytes(device=sum(tensor.numel() * tensor.element_size() for tensor in held))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.model.model.named_parameters() if p.requires_grad}

    # State

    def export(self) -> "SavedFullModel":
        """Copy the weights, as a folder of transformers."""
        return SavedFullModel(self.model.model, _copies(self.model.model.state_dict()), self.model.tokenizer_path)

    def snapshot(self, *, gradient: bool) -> "FullSnapshot":
        """Copy weights and training state; see `Engine.snapshot`."""
        tensors, state = take_training(self.group, self.parameters, gradient=gradient)
        if gradient:
            pending = {name: p.grad for name, p in self.parameters().items() if p.grad is not None}
            tensors |= {f"{GRADIENT}/{name}": host_copy(grad) for name, grad in pending.items()}
        return FullSnapshot(self.export(), self.spec, tensors, state)

    def restore(self, folder: Path) -> None:
        """Replace weights and training state by a written snapshot, whole or not at all.

        Raises:
            CheckpointError: it is damaged, of an adapter, or of another model.
        """
        written = WrittenSnapshot.read(folder)
        if written.spec.rank:
            raise CheckpointError(
                f"cannot restore the snapshot: it is of an adapter of rank {written.spec.rank}, not of a full model"
            )
        group, saved = self.group, written.state["optimizer"]
        before = group.optimizer
        pending = self._gradients(written.tensors)
        check_full_model(self.model.model.state_dict(), folder)
        if saved is not None and before is None:
            self.model.set_optimizer(saved["class"])
        try:
            put_counters = put_optimizer(group, self.parameters, written.tensors, written.state)
            load_full_model(self.model.model.state_dict(), folder)
        except BaseException:
            group.optimizer = before
            raise
        group.drop_passes()
        for name, parameter in self.parameters().items():
            parameter.grad = pending.get(name)
        put_counters()

    def _gradients(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the pending gradients in a snapshot.

        Raises:
            CheckpointError: they are of another model.
        """
        own, prefix = self.parameters(), f"{GRADIENT}/"
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for name, tensor in found.items():
            if name not in own or own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                raise CheckpointError(f"cannot restore the snapshot: its gradient of {name!r} is of another model")
        return {name: tensor.to(own[name].device) for name, tensor in found.items()}

    def load(self, folder: Path) -> None:
        """Replace the weights by a checkpoint's; the optimizer stays."""
        self.model.load(str(folder))

    def clear(self) -> None:
        """Overwrite the weights with zeros, and free them."""
        with torch.no_grad():
            for parameter in self.model.model.parameters():
                parameter.zero_()
        self.group.clear_gradients()
        self.group.optimizer = None


@dataclass(frozen=True, slots=True)
class SavedFullModel:
    """A copy of all weights, in host memory.

    Attributes:
        module: writes the configuration; its own weights are not read.
        weights: by name; tied weights are one tensor.
        tokenizer: folder of the tokenizer.
    """

    module: Any
    weights: Mapping[str, Tensor]
    tokenizer: Path | None

    def write(self, folder: Path) -> None:
        """Write `model.safetensors` (or its parts and their index), `config.json` and the tokenizer's files."""
        with quiet_transformers():
            self.module.save_pretrained(folder, state_dict=dict(self.weights))
        copy_tokenizer(self.tokenizer, folder)


@dataclass(frozen=True, slots=True)
class FullSnapshot:
    """A copy of weights and training state, in host memory.

    Attributes:
        weights: see `SavedFullModel`.
        spec: the specification.
        tensors: optimizer, pending gradients, and passes that metrics have not seen.
        state: counters, optimizer, scheduler and metrics, as JSON data.
    """

    weights: SavedFullModel
    spec: AdapterSpec
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write the weights, `state.safetensors` and `state.json` into a folder."""
        self.weights.write(folder)
        save_file(dict(self.tensors), folder / TENSORS)
        document = {"format": FORMAT, "create": self.spec.as_json(), "vectors": [], "state": dict(self.state)}
        (folder / STATE).write_text(json.dumps(document, indent=2, sort_keys=True), encoding="utf-8")


def _check_memory(size: int) -> None:
    """Refuse to train more parameters than memory holds; activations come on top.

    Raises:
        CapacityError: weights, gradients and moments do not fit.
    """
    free = free_bytes(torch.device(Platform.get_local_device()))
    if free is not None and size * _BYTES > free:
        raise CapacityError(
            f"training all {size:,} parameters takes at least {size * _BYTES:,} bytes, and {free:,} are free; "
            "train an adapter, or use a machine with more memory"
        )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory; tied tensors stay one tensor, so that they are written once."""
    copied: dict[tuple[Any, ...], Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if key not in copied:
            copied[key] = host_copy(tensor)
        result[name] = copied[key]
    return result
