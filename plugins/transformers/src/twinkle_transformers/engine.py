"""`TransformersEngine`: many LoRA adapters on one Hugging Face model, in fused passes and one batch of samples."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.engine import (
    AdapterBytes,
    AdapterRef,
    AdapterSpec,
    Engine,
    EngineInfo,
    Feature,
    Operation,
    OperationError,
    OperationResult,
    Progress,
    SampledTokens,
    SavedAdapter,
    Step,
    StepResult,
    Usage,
)
from twinkle.errors import ArgumentError, CapacityError, CheckpointError, EngineFault, TwinkleError, Unsupported
from twinkle_transformers.adapters import WEIGHTS
from twinkle_transformers.backbone import context_of
from twinkle_transformers.full_model import FullModel
from twinkle_transformers.group import PRECISION, check_adapter
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.memory import is_out_of_memory
from twinkle_transformers.optimizers import try_optimizer
from twinkle_transformers.pool import snapshots
from twinkle_transformers.pool.multi import MultiLoraTransformersModel
from twinkle_transformers.sampler import TorchSampler
from twinkle_transformers.sampling.requests import SampleHandle

UNLIMITED_CONTEXT: Final = 1 << 20
"""Maximum number of tokens of a row where the model's configuration does not say."""
_FLOPS_PER_PASS: Final = {"cpu": 1e11, "cuda": 1e14}
"""About a second of two CPU cores, or of a small GPU. Constants, not measurements: the boundaries of passes change the
last digits of results."""
_MIN_TOKENS: Final = {"cpu": 128, "cuda": 1024}
"""Below this number of tokens, matrix products are far from their full speed."""
_MAX_TOKENS: Final = {"cpu": 1024, "cuda": 16_384}
"""Above this number of tokens, matrix products do not get faster."""
_SEQUENCES: Final = {"cpu": 32, "cuda": 256}
"""Sequences that are decoded together by default."""
_DEVICE_FAULTS: Final = (
    "CUDA error", "cuDNN error", "CUBLAS_STATUS", "device-side assert", "HIP error", "NCCL error",
)  # fmt: skip
_INIT: Final = {"kaiming": True, "gaussian": "gaussian", "random": False}
"""`init_lora_weights` of PEFT by the names of `AdapterSpec.init`."""
_VOCABULARIES: Final = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "*.tiktoken", "tiktoken.model",
)  # fmt: skip


class TransformersEngine(Engine):
    """Trains and samples LoRA adapters with `MultiLoraTransformersModel` and `TorchSampler`, which share the weights.

    Args:
        model_id: folder of the base model, or its id at a hub.
        pass_tokens: maximum number of tokens of a forward pass. By default it follows from the model's size and the
            kind of device, so that a pass takes about a second on a small machine.
        model: further arguments of `MultiLoraTransformersModel`.
        sampler: further arguments of `TorchSampler`.

    Raises:
        ModelLoadError: the model cannot be loaded.
        Unsupported: adapters cannot share passes of this model.
    """

    def __init__(
        self,
        model_id: str,
        *,
        pass_tokens: int | None = None,
        model: Mapping[str, Any] | None = None,
        sampler: Mapping[str, Any] | None = None,
    ) -> None:
        precision: Any = "bf16" if torch.cuda.is_available() else "no"
        self._model = MultiLoraTransformersModel(model_id=model_id, **{"mixed_precision": precision, **(model or {})})
        self._pool = self._model.pool
        self._kind = "cpu" if self._model.device.type == "cpu" else "cuda"
        if pass_tokens is None:
            pass_tokens = default_pass_tokens(self._kind, self._pool.costs.base, self._pool.tokens_per_pass)
        elif isinstance(pass_tokens, bool) or not isinstance(pass_tokens, int) or pass_tokens < 1:
            raise ArgumentError(f"pass_tokens must be an integer of at least 1, got {pass_tokens!r}")
        self._pool.tokens_per_pass = pass_tokens
        self._sampler = TorchSampler(model=self._model, **{"max_batch_size": _SEQUENCES[self._kind], **(sampler or {})})
        self._specs: dict[AdapterRef, AdapterSpec] = {}
        self._options = {"mixed_precision": precision, **(model or {})}
        self._full: FullModel | None = None
        self._places: list[int] | None = None  # of the pool's operations in the present call
        self._requests: list[_Request] = []
        self._ended: Callable[[int, OperationResult | OperationError], None] = lambda index, result: None
        self._info = self._describe()

    def _describe(self) -> EngineInfo:
        module = self._model.model
        folder = Path(str(self._model.model_path))
        has_tokenizer = any(any(folder.glob(name)) for name in _VOCABULARIES)
        features: set[Feature] = {
            "composition", "early_results", "full_parameters", "interrupt", "logit_bias", "min_p", "model", "page",
            "penalties", "prompt_scores",
        }  # fmt: skip
        if has_tokenizer:
            features |= {"stop_strings", "structured_outputs"}
        if any(site.head for site in self._pool.sites.values()):
            features.add("train_unembed")
        dtype = PRECISION[self._model.mixed_precision] or module.dtype
        return EngineInfo(
            architecture=type(module).__name__,
            context=context_of(module.config) or UNLIMITED_CONTEXT,
            vocabulary=int(module.get_input_embeddings().weight.shape[0]),
            tokenizer=folder if has_tokenizer else None,
            device=str(self._model.device),
            dtype=str(dtype).removeprefix("torch."),
            features=frozenset(features),
            paths=tuple(path.as_dict() for path in (*self._model.evidence(), *self._sampler.evidence())),
        )

    def describe(self) -> EngineInfo:
        """Return what the base model is and what the engine supports."""
        return self._info

    # Adapters

    def add(self, name: str, spec: AdapterSpec) -> AdapterRef:
        """Create an adapter, or (rank 0) a full model; see `Engine.add`."""
        if isinstance(spec.rank, bool) or not isinstance(spec.rank, int) or spec.rank < 0:
            raise ArgumentError(f"rank must be an integer of at least 1, or 0 to train all weights, got {spec.rank!r}")
        if self._full_of(name) is not None:
            raise ArgumentError(f"adapter {name!r} already exists; choose another name")
        if spec.rank == 0:
            return self._add_full(name, spec)
        config = {
            "r": spec.rank, "lora_alpha": spec.alpha, "lora_dropout": spec.dropout, **_targets_of(spec),
            "rank_pattern": dict(spec.rank_pattern), "alpha_pattern": dict(spec.alpha_pattern),
            "use_rslora": spec.rslora, "init_lora_weights": _INIT[spec.init],
        }  # fmt: skip
        with _engine_errors():
            self._model.add_adapter_to_model(name, config, seed=spec.seed)
            ref = self._pool.ref(name)
        self._specs[ref] = spec
        return ref

    def _add_full(self, name: str, spec: AdapterSpec) -> AdapterRef:
        """Begin to train all weights of a copy of the base model."""
        check_adapter(name, dict.fromkeys(self._pool.tenants.names()))
        if self._full is not None:
            raise CapacityError(f"{self._full.name!r} trains all weights already; one full model fits at a time")
        size = sum(parameter.numel() for parameter in self._model.model.parameters())
        ref = self._pool.tenants.next_ref(name)
        folder = str(self._model.model_path or self._model.model_id)
        with _engine_errors():
            self._full = FullModel(ref, spec, folder, self._options, self.pass_tokens, size)
        self._specs[ref] = spec
        return ref

    def _full_of(self, adapter: str | AdapterRef | None) -> FullModel | None:
        """Return the full model if a name or reference means it."""
        if self._full is None or adapter is None:
            return None
        return self._full if adapter in (self._full.name, self._full.ref) else None

    def remove(self, adapter: AdapterRef) -> None:
        """Remove an adapter; see `Engine.remove`."""
        if (full := self._full_of(adapter)) is not None:
            full.clear()
            self._full = None
            del self._specs[adapter]
            return
        with _engine_errors():
            self._model.remove_adapter(self._name(adapter))
        del self._specs[adapter]

    def set_optimizer(self, adapter: AdapterRef, name: str = "AdamW", **options: Any) -> None:
        """Give an adapter a fresh optimizer; see `Engine.set_optimizer`."""
        if (full := self._full_of(adapter)) is not None:
            with _engine_errors():
                full.call("zero_grad", flush=True)
                full.call("set_optimizer", name, **options)
            return
        own = self._name(adapter)
        with _engine_errors():
            self._model.zero_grad(adapter_name=own)
            self._model.set_optimizer(name, adapter_name=own, **options)

    def usage(self, adapter: AdapterRef) -> Usage:
        """Return what the operations of an adapter have cost."""
        if (full := self._full_of(adapter)) is not None:
            return full.usage
        return self._pool.usage(adapter)

    def bytes_of(self, adapter: AdapterRef) -> AdapterBytes:
        """Return how much memory an adapter takes."""
        if (full := self._full_of(adapter)) is not None:
            return full.bytes_of()
        return self._pool.bytes_of(adapter)

    def page(self, adapter: AdapterRef, to: Literal["device", "host", "disk"], folder: Path | None = None) -> None:
        """Move an adapter's state; see `Engine.page`."""
        if self._full_of(adapter) is not None:
            raise Unsupported("page: a full model stays on the device; remove it, or snapshot it first")
        with _engine_errors():
            self._pool.page(adapter, to, folder)

    # Training

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens of a forward pass."""
        return self._pool.tokens_per_pass

    def run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """Run operations together; see `Engine.run`."""
        own = [self._full_of(operation.adapter or operation.metrics_of) for operation in operations]
        if not any(own):
            return self._run(operations)
        results: dict[int, OperationResult | OperationError] = {}
        for index, (full, operation) in enumerate(zip(own, operations, strict=True)):
            if full is not None:
                results[index] = full.run(operation, index)
                self._ended(index, results[index])
        self._places = [index for index, full in enumerate(own) if full is None]
        try:
            for place, result in zip(self._places, self._run([operations[i] for i in self._places]), strict=True):
                results[place] = replace(result, index=place) if isinstance(result, OperationError) else result
        finally:
            self._places = None
        return [results[index] for index in range(len(operations))]

    def _run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        if not operations:
            return []
        before = self._backward_calls()
        try:
            results = self._pool.run(operations)
        except Exception as error:
            if isinstance(error, EngineFault):
                raise
            _check_device(error)
            if self._backward_calls() != before:
                raise EngineFault(f"a pass stopped halfway: {type(error).__name__}") from error
            if is_out_of_memory(error):
                raise CapacityError(f"cannot run {len(operations)} operations: out of memory") from error
            raise
        for result in results:
            if isinstance(result, OperationError):
                _check_device(result.error)
        return results

    def _backward_calls(self) -> int:
        """Return how many operations of the present adapters have added gradients."""
        return sum(group.cur_step for group in self._model.optimizer_group.values())

    def step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        """Update adapters together; see `Engine.step`."""
        own = [self._full_of(step.adapter) for step in steps]
        results: dict[int, StepResult | OperationError] = {}
        for index, (full, step) in enumerate(zip(own, steps, strict=True)):
            if full is not None:
                results[index] = full.step(step, index)
        rest = [index for index, full in enumerate(own) if full is None]
        for place, result in zip(rest, self._step([steps[index] for index in rest]), strict=True):
            results[place] = replace(result, index=place) if isinstance(result, OperationError) else result
        return [results[index] for index in range(len(steps))]

    def _step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        if not steps:
            return []
        try:
            results = self._pool.step(steps)
        except Exception as error:  # some adapters may have been updated
            raise EngineFault(f"an optimizer step stopped halfway: {type(error).__name__}") from error
        for result in results:
            if isinstance(result, OperationError):
                _check_device(result.error)
        return results

    def report(self, ended: Callable[[int, OperationResult | OperationError], None]) -> None:
        """Set the function that is called with results; see `Engine.report`."""

        def checked(index: int, result: OperationResult | OperationError) -> None:
            if isinstance(result, OperationError):
                _check_device(result.error)
            with _stops():
                ended(index, result)

        def of_pool(index: int, result: OperationResult | OperationError) -> None:
            place = index if self._places is None else self._places[index]
            checked(place, replace(result, index=place) if isinstance(result, OperationError) else result)

        self._ended, self._pool.ended = checked, of_pool

    # Adapters as a model

    def as_model(self) -> Any:
        """Return the model, whose methods raise the errors of the contract; see `Engine.as_model`."""
        return _CheckedModel(self._model, self._full_of)

    def progress(self, adapter: AdapterRef) -> Progress:
        """Return how far the training of an adapter is."""
        if (full := self._full_of(adapter)) is not None:
            return full.progress()
        group = self._pool.tenants.find(adapter).group
        rates = () if group.optimizer is None else tuple(group.learning_rates())
        return Progress(group.cur_step, group.updates, group.pending, group.gradient_accumulation_steps, rates)

    def interrupt(self, between: Callable[[], None]) -> None:
        """Set the function that is called between passes; see `Engine.interrupt`."""

        def guarded() -> None:
            with _stops():
                between()

        self._pool.between = guarded

    # State

    def snapshot(self, adapter: AdapterRef, *, gradient: bool = True) -> SavedAdapter:
        """Copy the complete state of an adapter; see `Engine.snapshot`."""
        if (full := self._full_of(adapter)) is not None:
            with _engine_errors():
                return full.snapshot(gradient=gradient)
        with _engine_errors():
            taken = self._pool.snapshot(adapter, gradient=gradient)
        return snapshots.AdapterSnapshot(self._specs[adapter], taken["tensors"], taken["state"])

    def read_spec(self, folder: Path) -> AdapterSpec | None:
        """Return the specification in a written snapshot; None if the folder holds no snapshot."""
        return snapshots.read_spec(folder)

    def restore(self, adapter: AdapterRef, folder: Path) -> None:
        """Replace the state of an adapter by a written snapshot; see `Engine.restore`."""
        if (full := self._full_of(adapter)) is not None:
            with _engine_errors():
                full.restore(folder)
            return
        with _engine_errors():
            written, own = snapshots.WrittenSnapshot.read(folder), self._specs[adapter]
            for name, saved_value in asdict(written.spec).items():
                if name != "seed" and saved_value != getattr(own, name):
                    raise CheckpointError(
                        f"cannot restore the snapshot: it was saved with {name}={saved_value}, the adapter has "
                        f"{name}={getattr(own, name)}"
                    )
            state = self._pool.snapshot(adapter, gradient=False)["state"]
            saved, group = written.state["optimizer"], self._pool.tenants.find(adapter).group
            fresh = saved is not None and group.optimizer is None
            if fresh:
                self._model.set_optimizer(saved["class"], adapter_name=adapter.name)
            try:
                self._pool.restore(adapter, written.arranged_as(state))
            except BaseException:
                if fresh:
                    group.optimizer = None
                raise

    def export(self, adapter: AdapterRef, base: str) -> SavedAdapter:
        """Copy the weights of an adapter in PEFT's format, or a full model; see `Engine.export`."""
        if (full := self._full_of(adapter)) is not None:
            with _engine_errors():
                return full.export()
        name = self._name(adapter)
        with _engine_errors():
            config = copy.deepcopy(self._model.optimizer_group[name].adapter_config)
            config.base_model_name_or_path, config.inference_mode = base, True
            return PeftAdapter(dict(self._model.get_state_dict(adapter_name=name)), config)

    def load(self, adapter: AdapterRef, folder: Path) -> None:
        """Replace the weights of an adapter by files in PEFT's format; see `Engine.load`."""
        if (full := self._full_of(adapter)) is not None:
            with _engine_errors():
                full.load(folder)
            return
        name = self._name(adapter)
        try:
            with _engine_errors():
                self._model.load(str(folder), adapter_name=name)
        except (ArgumentError, Unsupported) as error:
            raise CheckpointError(str(error)) from error

    # Sampling

    def version(self, adapter: AdapterRef) -> AdapterVersion:
        """Return the present weights of an adapter; the same object until they change."""
        if self._full_of(adapter) is not None:
            raise Unsupported("a full model cannot be sampled beside adapters; save it, and load it where you sample")
        with _engine_errors():
            return self._pool.version(adapter)

    def read_version(self, folder: Path) -> AdapterVersion:
        """Read weights in PEFT's format; see `Engine.read_version`."""
        with _engine_errors():
            return self._pool.read_version(folder)

    def submit(
        self, tokens: Sequence[int], params: SamplingParams | Mapping[str, Any], version: Any = None, *,
        cache_salt: str | None = None,
    ) -> "_Request":  # fmt: skip
        """Begin to sample a prompt; see `Engine.submit`."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams.from_dict(params)
        row: Any = {"input_ids": list(tokens)}
        options: dict[str, Any] = {"use_base_model": True} if version is None else {"adapter_version": version}
        options["cache_salt"] = cache_salt
        with _engine_errors():
            if params.max_tokens is not None:
                handle = self._sampler.submit(row, params, **options)
            else:
                room = replace(params, max_tokens=max(1, self._info.context - len(tokens)))
                try:
                    handle = self._sampler.submit(row, room, **options)
                except CapacityError:  # the sampler's own limit is what its cache has room for
                    handle = self._sampler.submit(row, params, **options)
        request = _Request(handle)
        self._requests.append(request)
        return request

    def decode(self) -> bool:
        """Take one step for all requests; see `Engine.decode`.

        A model that cannot be sampled step by step completes one request in each call.
        """
        self._requests = [request for request in self._requests if not request.done]
        if not self._requests:
            return False
        try:
            if not self._sampler.step() and not any(request.done for request in self._requests):
                self._requests[0].finish()
        except Exception as error:
            _check_device(error)
            for request in self._requests:
                request.fail(error)
        return True

    def _name(self, adapter: AdapterRef) -> str:
        """Return an adapter's name, after checking that the reference is still valid."""
        return self._pool.tenants.find(adapter).name


def _targets_of(spec: AdapterSpec) -> dict[str, Any]:
    """Return the fields of a configuration that select layers."""
    exclude: dict[str, Any] = {}
    if spec.exclude:
        exclude["exclude_modules"] = spec.exclude if isinstance(spec.exclude, str) else list(spec.exclude)
    if spec.targets is None:
        if exclude:
            raise ArgumentError("exclude must be empty without targets: train_attn, train_mlp, ... select all layers")
        return {"train_attn": spec.train_attn, "train_mlp": spec.train_mlp, "train_unembed": spec.train_unembed}
    if spec.targets == ("all-linear",):
        return {"target_modules": "all-linear", **exclude}
    return {"target_modules": spec.targets if isinstance(spec.targets, str) else list(spec.targets) or None, **exclude}


class _CheckedModel:
    """`MultiLoraTransformersModel` with the errors of the contract, where optimizers are tried before they are set.

    Args:
        model: the model.
        full_of: returns the full model that a name means.
    """

    def __init__(self, model: MultiLoraTransformersModel, full_of: Callable[[str | None], FullModel | None]) -> None:
        self._model, self._full_of = model, full_of

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)

        @functools.wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("adapter_name")
            names = given if isinstance(given, list) else [given]
            with _engine_errors():
                if len(names) == 1 and (full := self._full_of(names[0])) is not None:
                    return full.call(name, *args, **kwargs)
                return method(*args, **kwargs)

        return checked

    def set_optimizer(self, optimizer_cls: Any = "AdamW", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Set an adapter's optimizer.

        Raises:
            ArgumentError: it cannot make a step; in a step of many adapters, its error would end the process.
        """
        with _engine_errors():
            if (full := self._full_of(adapter_name)) is not None:
                full.call("set_optimizer", optimizer_cls, **kwargs)
                return
            try_optimizer(optimizer_cls, self._model.device, kwargs)
            self._model.set_optimizer(optimizer_cls, adapter_name=adapter_name, **kwargs)


def default_pass_tokens(kind: str, parameters: float, limit: int) -> int:
    """Return the maximum number of tokens of a pass: a function of the model's size and the kind of device.

    Args:
        kind: "cpu" or "cuda".
        parameters: number of parameters that a token meets.
        limit: upper bound.
    """
    # Forward and backward through a frozen base take 4 flops for each parameter and token.
    tokens = int(_FLOPS_PER_PASS[kind] / (4 * max(1.0, parameters)))
    return min(limit, _MAX_TOKENS[kind], max(_MIN_TOKENS[kind], tokens // 64 * 64))


class _Request:
    """A request of `TorchSampler`; see `SampleRequest`."""

    def __init__(self, handle: SampleHandle) -> None:
        self._handle = handle
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._error is not None or self._handle.done

    def progress(self, sample: int = 0, start: int = 0) -> SampledTokens:
        """Return what has been drawn so far."""
        self._raise()
        return self._handle.progress(sample, start)

    def result(self) -> SampleResponse:
        """Return the samples, after decoding until they are complete."""
        self._raise()
        with _engine_errors():
            return self._handle.result()

    def cancel(self) -> None:
        """End the request."""
        self._handle.cancel()

    def finish(self) -> None:
        """Decode until this request is complete."""
        try:
            self._handle.result()
        except Exception as error:
            _check_device(error)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if not self.done:
            self._error = error
            self._handle.cancel()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A copy of an adapter's weights and the configuration that PEFT expects beside them."""

    tensors: dict[str, Tensor]
    config: Any

    def write(self, folder: Path) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json` into a folder."""
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        self.config.save_pretrained(str(folder))


@contextmanager
def _stops() -> Iterator[None]:
    """Convert any exception to an `EngineFault`: earlier passes of the call have added their gradients."""
    try:
        yield
    except EngineFault:
        raise
    except Exception as error:
        raise EngineFault(f"a pass was stopped by {type(error).__name__}") from error


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Raise errors of torch as those of the contract: `EngineFault` of a device, `CapacityError` of memory."""
    try:
        yield
    except Exception as error:
        _check_device(error)
        if not isinstance(error, TwinkleError) and is_out_of_memory(error):
            raise CapacityError(f"out of memory: {error}") from error
        raise


def is_device_fault(error: BaseException) -> bool:
    """Return whether an error means that the device has failed; lack of memory does not."""
    if isinstance(error, TwinkleError | MemoryError) or "out of memory" in str(error):
        return False
    return any(text in str(error) for text in _DEVICE_FAULTS)


def _check_device(error: BaseException) -> None:
    if is_device_fault(error):
        raise EngineFault(f"the device failed: {type(error).__name__}") from error
