"""LoRA adapters through PEFT: their layers, adding, selecting, reading and writing their weights under PEFT's names."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from twinkle.digests import check_digests
from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.hub import local_folder
from twinkle_registry import check_keywords
from twinkle_transformers.first_weights import draw_down, generator_of
from twinkle_transformers.parallel import copy_into
from twinkle_transformers.patterns import FIELDS, check_patterns, settle_order
from twinkle_transformers.sites import is_at_rest
from twinkle_transformers.training_state import read_tensors
from twinkle_transformers.value_heads import leave_head, peft_task

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_MEANING = ("lora_alpha", "r", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
"""Fields of a configuration that change the output of the same weights."""
_Term = tuple[Tensor, Tensor | None, Tensor, Tensor, float, Callable[[Tensor], Tensor] | None, bool]
_DROPOUTS = (nn.Identity, nn.Dropout)
_PLAIN = (Tensor, nn.Parameter)
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def add_adapter(model: nn.Module, name: str, config_or_dir: Any, *, seed: int | None = None) -> tuple[PeftModel, Any]:
    """Add an adapter to a plain or already wrapped module.

    Args:
        model: the Hugging Face module, or the `PeftModel` around it.
        name: the adapter's name.
        config_or_dir: a `peft.LoraConfig`, a mapping of its fields, or the folder or
            hub id of a saved adapter.
        seed: seed of the first weights of each layer; None draws them from torch's generator, as PEFT does.

    Returns:
        the `PeftModel` and the adapter's configuration. Adapter weights are float32 for any dtype of the base.

    Raises:
        CheckpointError: the folder contains no adapter, or one for another model; the model is unchanged then.
        ArgumentError: PEFT refuses the configuration, or a key of a pattern matches no adapted layer.
        Unsupported: the configuration is not LoRA, or a seed is given with another `init_lora_weights`.
    """
    folder = None
    if isinstance(config_or_dir, str | Path):
        folder = local_folder(config_or_dir)
        config = read_config(folder)
    elif isinstance(config_or_dir, Mapping):
        check_keywords(LoraConfig, config_or_dir, what=f"adapter {name!r}")
        try:
            config = LoraConfig(**config_or_dir)
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"adapter {name!r}: PEFT refuses the configuration: {error}") from error
    else:
        config = config_or_dir
    if not isinstance(config, LoraConfig):
        raise Unsupported(
            f"adapter {name!r}: {type(config).__name__} is not supported; give a peft.LoraConfig, a dict of its "
            "fields, or the folder of a saved LoRA adapter"
        )
    if config.r < 1:
        raise ArgumentError(f"adapter {name!r}: rank r must be at least 1, got {config.r}")
    config = copy.deepcopy(config)  # PEFT changes it, and the caller may use it again
    _check_seed(name, seed, config, folder)
    check_patterns(name, config)
    config.base_model_name_or_path = None
    config.task_type = peft_task(model.get_base_model() if isinstance(model, PeftModel) else model, config.task_type)
    leave_head(config)
    trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        with warnings.catch_warnings():
            # Users cannot avoid these warnings: peft 0.21 reads an attribute that transformers 5.23 renamed, and warns
            # about short adapter names because of its own loader, which is not used here.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            warnings.filterwarnings("ignore", message="Adapter name .* should not be contained in the prefix")
            warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")  # checked below
            if isinstance(model, PeftModel):
                model.add_adapter(name, config)
                wrapped = model
            else:
                wrapped = get_peft_model(model, config, adapter_name=name)
    except ValueError as error:
        raise (CheckpointError if folder else ArgumentError)(
            f"adapter {name!r} does not fit the model: {error}"
        ) from error
    try:
        _check_trained(wrapped, name, trainable if isinstance(model, PeftModel) else set(), config)
        if any(getattr(config, field) for field in FIELDS):
            layers = _adapted_layers(wrapped, name)
            check_patterns(name, config, None if folder else layers)
            settle_order(config, layers)
        if folder is not None:
            load_weights(wrapped, name, folder)
        elif seed is not None:
            _draw(wrapped, name, seed, gaussian=config.init_lora_weights == "gaussian")
    except (ArgumentError, CheckpointError, Unsupported):
        _take_back(model, wrapped, name, trainable)
        raise
    wrapped.set_adapter(name)
    fuse_layers(wrapped)
    return wrapped, config


def _check_seed(name: str, seed: int | None, config: Any, folder: Path | None) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"adapter {name!r}: seed must be an integer, got {seed!r}")
    if folder is not None:
        raise ArgumentError(f"adapter {name!r}: a saved adapter has its weights; leave out seed={seed}")
    if config.init_lora_weights not in (True, "gaussian") or config.target_parameters:
        raise Unsupported(
            f"adapter {name!r}: seed={seed} needs init_lora_weights=True or 'gaussian' and no target_parameters, got "
            f"{config.init_lora_weights!r} and {config.target_parameters!r}; call torch.manual_seed instead"
        )


def _adapted_layers(wrapped: PeftModel, name: str) -> list[str]:
    """Return the paths of the layers and parameters that an adapter adapts, as they are without wrappers."""
    found = []
    for path, module in tuned_places(wrapped.get_base_model()):
        inner: Any = module
        while isinstance(inner, BaseTunerLayer):
            if name in getattr(inner, "lora_A", ()) or name in getattr(inner, "lora_embedding_A", ()):
                parameter = getattr(inner, "parameter_name", None)
                found.append(f"{path.removesuffix('.base_layer')}.{parameter}" if parameter else path)
            inner = inner.base_layer
    return found


def _draw(wrapped: PeftModel, name: str, seed: int, *, gaussian: bool) -> None:
    """Give A of each layer first weights that depend on the seed and the layer alone; B stays 0."""
    for path, module in tuned_places(wrapped.get_base_model()):
        if name in getattr(module, "lora_embedding_A", ()):
            raise Unsupported(f"adapter {name!r}: seed={seed} has no effect on {path}, an embedding; leave one out")
        down = getattr(module, "lora_A", {})
        if name in down:
            drawn = torch.empty(down[name].weight.shape)
            draw_down(drawn.flatten(1), generator_of(seed, path), gaussian=gaussian)
            copy_into(down[name].weight, drawn)


def _check_trained(wrapped: PeftModel, name: str, before: set[str], config: Any) -> None:
    active = wrapped.active_adapters
    wrapped.set_adapter(name)
    ours = {id(parameter) for _, parameter in named_parameters(wrapped, name)}
    odd = [k for k, p in wrapped.named_parameters() if p.requires_grad and id(p) not in ours and k not in before]
    wrapped.set_adapter(active[0] if len(active) == 1 else active)
    if odd:
        raise Unsupported(
            f"adapter {name!r}: its configuration also trains {odd[0]} ({len(odd)} such parameters), which belong to "
            f"the base model and not to the adapter; leave bias at 'none' (it is {config.bias!r}) and "
            "trainable_token_indices out"
        )


def _take_back(model: nn.Module, wrapped: PeftModel, name: str, trainable: set[str]) -> None:
    if isinstance(model, PeftModel):
        wrapped.delete_adapter(name)
    else:
        wrapped.unload()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in trainable)


def read_config(folder: Path) -> Any:
    """Return the PEFT configuration of a saved adapter.

    Raises:
        CheckpointError: the folder is missing or contains no adapter.
    """
    if not (folder / CONFIG).is_file():
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise CheckpointError(f"no adapter at {folder}: {CONFIG} is missing; found: {present}")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from error
    config.inference_mode = False
    return config


def load_weights(model: PeftModel, name: str, folder: Path) -> None:
    """Copy a saved adapter's weights into adapter `name`; names and shapes are compared before anything is copied.

    Raises:
        CheckpointError: the file is missing or corrupt, or belongs to another model or rank.
    """
    path = folder / WEIGHTS
    check_digests(folder, (WEIGHTS, CONFIG))
    compare_configs(model.peft_config[name], read_config(folder), folder)
    own = get_peft_model_state_dict(model, adapter_name=name)
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    except Exception as error:  # safetensors raises its own type, a bare Exception in older versions
        raise CheckpointError(f"{path} cannot be read ({error}); the file is missing, truncated or corrupt") from error
    for key in sorted(own.keys() | shapes.keys()):
        shape = list(own[key].shape) if key in own else None
        if shape != shapes.get(key):
            raise CheckpointError(
                f"the adapter in {folder} belongs to another model: {key} is {_shape(shapes.get(key))} in the file and "
                f"{_shape(shape)} in this model; load the base model that it was trained on"
            )
    for key, tensor in read_tensors(path).items():
        copy_into(own[key], tensor)


def compare_configs(own: Any, saved: Any, folder: Path) -> None:
    """Refuse weights that were trained with a configuration in which they have another effect.

    Raises:
        CheckpointError: the message names the field that differs.
    """
    for field in _MEANING:
        if getattr(own, field, None) != getattr(saved, field, None):
            raise CheckpointError(
                f"the adapter in {folder} was trained with {field}={getattr(saved, field, None)!r}, this one has "
                f"{getattr(own, field, None)!r}, with which the weights have another effect. Add an adapter from the "
                "folder itself: add_adapter_to_model(name, folder)"
            )


def named_parameters(model: nn.Module, name: str, *, frozen: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters of adapter `name` (or of a full model, name "") under their saved names.

    With `frozen`, also parameters that do not require a gradient: all of an adapter that is not active.
    """
    ours = re.compile(rf"(\.(?:lora_\w+|modules_to_save))\.{re.escape(name)}(?=\.|$)")
    for key, parameter in model.named_parameters():
        if (frozen or parameter.requires_grad) and (not name or ours.search(key)):
            yield (ours.sub(r"\1", key) if name else key), parameter


def weights(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return an adapter's weights (or the full model's trainable ones, name "") under their saved names."""
    if name:
        return dict(get_peft_model_state_dict(model, adapter_name=name))
    return {key: parameter.detach() for key, parameter in named_parameters(model, "")}


def tuned_places(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a module that PEFT has wrapped, with their paths as they are without its wrappers.

    It does not descend into PEFT's own modules: a walk over all modules takes longer than copying an adapter.
    """
    layers: list[tuple[str, nn.Module]] = []

    def walk(part: nn.Module, path: str) -> None:
        inside = _wrapped(part)
        if inside:
            layers.append((path, part))
            walk(part.get_submodule(inside), path)
            return
        for name, child in part._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return layers


def _wrapped(part: nn.Module) -> str:
    """Return the attribute in which a wrapper of PEFT keeps the wrapped module; "" for other modules."""
    if isinstance(part, BaseTunerLayer):
        return "base_layer"
    return "original_module" if isinstance(part, AuxiliaryTrainingWrapper) else ""


def select(model: nn.Module, name: str, trainable: bool = True) -> None:
    """Make adapter `name` the active one, trainable or not; does nothing if it already is."""
    if isinstance(model, PeftModel) and name and model.active_adapters != [name]:
        model.set_adapter(name)
        if not trainable:
            freeze(model, name)


def freeze(model: nn.Module, name: str) -> None:
    """Make the parameters of adapter `name` require no gradient."""
    for _, parameter in list(named_parameters(model, name)):
        parameter.requires_grad_(False)


def without_adapters(model: nn.Module, off: bool) -> AbstractContextManager[None]:
    """Return a context in which adapters are disabled (if `off`); they are enabled again also after an error."""
    return model.disable_adapter() if off and isinstance(model, PeftModel) else nullcontext()


def _shape(shape: list[int] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def fuse_layers(model: nn.Module) -> None:
    """Make PEFT's linear layers of a model compute in one node whenever a call allows it.

    Args:
        model: a model with PEFT's layers; layers that were installed before are not changed.
    """
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = Linear


class Linear(lora.Linear):  # type: ignore[misc]  # peft has no types
    """PEFT's layer with a faster forward. It keeps the name, because callers compare class names."""

    stands_for = lora.Linear
    """The class that it replaces, for callers that compare classes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `[..., fan_out]` for `[..., fan_in]`, as PEFT does."""
        term = None if args or kwargs else _plain_term(self, x)
        if term is None:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        return lora_linear(x, *term)


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    dropout: Callable[[Tensor], Tensor] | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return `x W^T + b + scale * (dropout(x) A^T) B^T`; under autocast all in its dtype.

    Args:
        x: `[..., fan_in]`.
        weight: W, `[fan_out, fan_in]`, frozen.
        bias: b, `[fan_out]`, frozen.
        down: A, `[r, fan_in]`.
        up: B, `[fan_out, r]`.
        scale: `alpha / r`, or PEFT's variant of it.
        dropout: keeps shape and dtype.
        transposed: W is `[fan_in, fan_out]` (GPT-2).
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if transposed:
        weight = weight.t()
    into = None if dropout is None else dropout(x)
    if torch.is_grad_enabled():
        y: Tensor = _Adapted.apply(x, into, weight, bias, down, up, scale)  # type: ignore[no-untyped-call]
        return y
    return _forward(x, into, weight, bias, down, up, scale)[0]


def _forward(
    x: Tensor, into: Tensor | None, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if down.dtype != x.dtype or up.dtype != x.dtype:
        down, up = down.to(x.dtype), up.to(x.dtype)
    rows = _rows(x)
    y = nn.functional.linear(rows, weight, bias)
    hidden = nn.functional.linear(rows if into is None else _rows(into), down).mul_(scale)
    y.addmm_(
        hidden, up.t()
    )  # `scale` was applied to the narrow `hidden`: a factor in a half-precision product is slower
    return y.view(*x.shape[:-1], y.shape[-1]), hidden


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Adapted(torch.autograd.Function):
    """For rows x, after dropout z, with gradient g: dx = g W, dz = s (g B) A, dA = s (g B)^T z, dB = g^T (s z A^T).

    It saves z and s z A^T beside the matrices. Without dropout z is x, and gets the sum of both gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, into: Tensor | None, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        y, hidden = _forward(x, into, weight, bias, down, up, scale)
        ctx.save_for_backward(x if into is None else into, hidden, weight, down, up)
        ctx.scale, ctx.drops = scale, into is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, hidden, weight, wide_down, wide_up = ctx.saved_tensors
        scale, down, up = ctx.scale, wide_down, wide_up
        if down.dtype != z.dtype or up.dtype != z.dtype:
            down, up = down.to(z.dtype), up.to(z.dtype)
        rows, g = _rows(z), _rows(grads[0])
        if torch.is_grad_enabled():  # for a second derivative: the saved tensor has no graph
            hidden = rows @ down.t() * scale
        inner = (g @ up).mul_(scale)
        dx = dz = ddown = dup = None
        if ctx.needs_input_grad[0]:
            dx = g @ weight
        if ctx.needs_input_grad[1]:
            dz = (inner @ down).view(z.shape)
        elif dx is not None and not ctx.drops:
            dx.addmm_(inner, down)
        if ctx.needs_input_grad[4]:
            ddown = (inner.t() @ rows).to(wide_down.dtype)
        if ctx.needs_input_grad[5]:
            dup = (g.t() @ hidden).to(wide_up.dtype)
        return None if dx is None else dx.view(z.shape), dz, None, None, ddown, dup, None


def _plain_term(layer: Any, x: Tensor) -> _Term | None:
    """Return the other arguments of `lora_linear` if PEFT's forward would compute the same now, else None.

    It runs at every call, and reads `_modules` directly: attribute access of a module costs as much as a small product.
    """
    name = layer._active_adapter
    if type(name) is not str:
        if len(name) != 1:
            return None
        name = name[0]
    if layer._disable_adapters or layer.merged_adapters or name in layer.lora_variant:
        return None
    parts = layer._modules
    base, down, up = parts["base_layer"], parts["lora_A"]._modules.get(name), parts["lora_B"]._modules.get(name)
    if down is None or not (_is_product(down) and _is_product(up)) or _has_hooks(base) or not is_at_rest(base):
        return None
    kind, dropout = type(base), parts["lora_dropout"]._modules[name]
    if (kind is not nn.Linear and kind is not Conv1D) or type(dropout) not in _DROPOUTS:
        return None  # quantized, or another adapter inside
    weight, bias, a, b = base._parameters["weight"], base._parameters["bias"], down.weight, up.weight
    if weight.requires_grad or up.bias is not None or (bias is not None and bias.requires_grad):
        return None
    if type(x) is not Tensor or type(weight) not in _PLAIN or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return None  # distributed
    if not _meet(x, weight, a, b) or torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return None  # the node has no functorch rules; compilers fuse by themselves, and cannot trace it
    return weight, bias, a, b, layer.scaling[name], dropout if _acts(dropout) else None, kind is Conv1D


def _is_product(module: nn.Module) -> bool:
    """Return whether a call of the module computes only its product."""
    return type(module) is nn.Linear and "forward" not in module.__dict__ and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _acts(dropout: Any) -> bool:
    return (dropout.training and getattr(dropout, "p", 0)) or _has_hooks(dropout)


def _meet(x: Tensor, *others: Tensor) -> bool:
    """Return whether all have one dtype, or get it by autocast, which does not convert float64."""
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype in _CAST and all(other.dtype in _CAST for other in others)
    return all(other.dtype == x.dtype for other in others)
