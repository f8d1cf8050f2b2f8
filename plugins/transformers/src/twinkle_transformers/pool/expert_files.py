"""Adapters on experts in PEFT's words: which parameters a configuration means, and how files name and order them."""

import copy
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle_torch.layout import Entry
from twinkle_transformers.pool.experts import ExpertSite

_PREFIX = "base_model.model."
_REFUSED = ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora")
"""Fields that PEFT refuses where `target_parameters` are given."""


def as_peft_reads(config: LoraConfig, model: Any) -> LoraConfig:
    """Return a copy of a configuration as PEFT takes it for this model.

    Where transformers 5 holds experts as parameters that were linear layers before (Qwen-MoE, DeepSeek, Mixtral, ...),
    newer PEFT turns `gate_proj`, `up_proj` and `down_proj` (Mixtral: `w1`, `w3` and `w2`) in `target_modules` into
    `target_parameters`, with twice the rank where two became one, and "all-linear" into those, the router and the other
    linear layers. Linear layers that still have such a name (shared experts, dense layers) are not adapted then, in any
    spelling, so that PEFT cannot load files with adapters on them. Older PEFT leaves the configuration as it is.

    Raises:
        ArgumentError: PEFT refuses it: only one of two layers that became one is a target.
    """
    config = copy.deepcopy(config)
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return config
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError as error:
        raise ArgumentError(f"PEFT refuses the targets for {type(model).__name__}: {error}") from error
    return config


def match_experts(name: str, config: LoraConfig, sites: Mapping[str, ExpertSite], model: Any) -> list[str]:
    """Return the names of the parameters that `target_parameters` mean, in the order of the model.

    As in PEFT a target means each parameter whose name it is, or whose name ends with `.` and it.

    Args:
        name: of the adapter, for errors.
        config: the configuration.
        sites: the parameters that adapters may adapt.
        model: the Hugging Face module.

    Raises:
        ArgumentError: a target matches nothing, or the configuration has what experts cannot have.
        Unsupported: a target matches a parameter that a pool cannot adapt.
    """
    targets = sorted(set(config.target_parameters or ()))
    if not targets:
        return []
    for field in _REFUSED:
        if value := getattr(config, field):
            raise ArgumentError(
                f"adapter {name!r}: {field}={value!r} with target_parameters; PEFT has no such adapters"
            )
    for target in targets:
        _check_target(name, target, sites, model)
    return [key for key in sites if any(_means(target, key) for target in targets)]


def expert_views(
    site: ExpertSite, entry: Entry, flat: Tensor, adapted: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield A `[experts r, fan_in]` and B `[fan_out, r experts]` of one parameter as views of `flat`, by PEFT's name.

    In A the rows of an expert lie together, in B the columns of a rank. PEFT puts one wrapper around the other where
    several parameters of a module are adapted, the last parameter's outermost, so that the names depend on what else is
    adapted. `adapter_config.json` needs the names of all adapted parameters (or endings that mean the same ones) as
    `target_parameters`, and no dropout.

    Args:
        site: the parameter.
        entry: where its matrices lie.
        flat: buffer `[P]` of the adapter.
        adapted: names of all places that the adapter adapts.
    """
    path = f"{_PREFIX}{site.path}{'.base_layer' * sum(other in adapted for other in site.later)}"
    yield f"{path}.lora_A.weight", entry.down_of(flat).view(-1, entry.fan_in)
    yield f"{path}.lora_B.weight", entry.up_of(flat).transpose(0, 1).view(-1, entry.fan_out).t()


def to_peft(site: ExpertSite, entry: Entry, flat: Tensor, adapted: Collection[str]) -> dict[str, Tensor]:
    """Return contiguous copies of what `expert_views` yields, as PEFT's files have them."""
    views = expert_views(site, entry, flat.detach(), adapted)
    return {key: view.clone(memory_format=torch.contiguous_format) for key, view in views}


def from_peft(
    site: ExpertSite, entry: Entry, tensors: Mapping[str, Tensor], flat: Tensor, adapted: Collection[str]
) -> None:
    """Copy one parameter's matrices out of PEFT's tensors into a buffer.

    Args:
        site: the parameter.
        entry: where its matrices lie.
        tensors: by PEFT's name.
        flat: buffer `[P]` of the adapter.
        adapted: names of all places that the adapter adapts.

    Raises:
        CheckpointError: a matrix is missing or has another shape; the buffer is as it was.
    """
    views = dict(expert_views(site, entry, flat.detach(), adapted))
    for key, view in views.items():
        if key not in tensors:
            near = get_close_matches(key, tensors, 1, 0)
            raise CheckpointError(f"the adapter has no {key}" + (f"; the nearest is {near[0]}" if near else ""))
        if tensors[key].shape != view.shape:
            raise CheckpointError(
                f"{key} is {list(tensors[key].shape)} in the file and {list(view.shape)} here, for {site.experts} "
                f"experts and rank {entry.rank}"
            )
    for key, view in views.items():
        view.copy_(tensors[key])


def _means(target: str, key: str) -> bool:
    return key == target or key.endswith(f".{target}")


def _check_target(name: str, target: str, sites: Mapping[str, ExpertSite], model: Any) -> None:
    others = [key for key, _ in model.named_parameters() if _means(target, key) and key not in sites]
    if others:
        raise Unsupported(
            f"adapter {name!r}: target_parameters={target!r} means {others[0]}; a pool adapts parameters of experts "
            f"alone{_examples(sites)}"
        )
    if not any(_means(target, key) for key in sites):
        raise ArgumentError(
            f"adapter {name!r}: target_parameters={target!r} matches no parameter of {type(model).__name__}"
            f"{_examples(sites)}"
        )


def _examples(sites: Mapping[str, ExpertSite]) -> str:
    ends = sorted({".".join(key.rsplit(".", 2)[-2:]) for key in sites})
    return f", such as {' and '.join(ends)}" if ends else "; this model has none that adapters can adapt"
