"""LoRA adapters through PEFT: adding, selecting, reading and writing their weights under PEFT's names."""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from torch import nn

from twinkle.digests import check_digests
from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.hub import local_folder
from twinkle_registry import check_keywords
from twinkle_transformers.parallel import copy_into
from twinkle_transformers.training_state import read_tensors
from twinkle_transformers.value_heads import leave_head, peft_task

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_MEANING = ("lora_alpha", "r", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
"""Fields of a configuration that change the output of the same weights."""


def add_adapter(model: nn.Module, name: str, config_or_dir: Any) -> tuple[PeftModel, Any]:
    """Add an adapter to a plain or already wrapped module.

    Args:
        model: the Hugging Face module, or the `PeftModel` around it.
        name: the adapter's name.
        config_or_dir: a `peft.LoraConfig`, a mapping of its fields, or the folder or
            hub id of a saved adapter.

    Returns:
        the `PeftModel` and the adapter's configuration. Adapter weights are float32 for any dtype of the base.

    Raises:
        CheckpointError: the folder contains no adapter, or one for another model; the model is unchanged then.
        Unsupported: the configuration is not LoRA.
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
        if folder is not None:
            load_weights(wrapped, name, folder)
    except (CheckpointError, Unsupported):
        _take_back(model, wrapped, name, trainable)
        raise
    wrapped.set_adapter(name)
    fuse_layers(wrapped)
    return wrapped, config


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
