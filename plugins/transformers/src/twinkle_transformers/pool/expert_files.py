"""Adapters on experts in PEFT's words: which parameters a configuration means, and how files name and order them."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.torch.layout import Entry
from twinkle_transformers.pool.experts import ExpertSite

_PREFIX = "base_model.model."
_REFUSED = ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora")
"""Fields that PEFT refuses where `target_parameters` are given."""


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


def to_peft(
    site: ExpertSite, entry: Entry, flat: Tensor, adapted: Collection[str], rank: int | None = None
) -> dict[str, Tensor]:
    """Return the matrices of one parameter as PEFT's files have them.

    PEFT puts one wrapper around the other where several parameters of a module are adapted, the last parameter's
    outermost, so that the names depend on what else is adapted. `adapter_config.json` needs the names of all adapted
    parameters (or endings that mean the same ones) as `target_parameters`, and `lora_dropout` 0.

    Args:
        site: the parameter.
        entry: where its matrices lie.
        flat: buffer `[P]` of the adapter.
        adapted: names of all places that the adapter adapts.
        rank: rows of each matrix to write, where the entry has more; None is all.

    Returns:
        A as `[E r, fan_in]` with the rows of an expert together, B as `[fan_out, r E]` with the columns of a rank
        together; both contiguous copies.
    """
    down, up = (matrix[:, :rank].detach() for matrix in (entry.down_of(flat), entry.up_of(flat)))
    a, b = _keys(site, adapted)
    return {
        a: down.reshape(-1, site.fan_in).clone(),
        b: up.permute(2, 1, 0).reshape(site.fan_out, -1).clone(),
    }


def from_peft(
    site: ExpertSite, entry: Entry, tensors: Mapping[str, Tensor], flat: Tensor, adapted: Collection[str]
) -> None:
    """Write the matrices of one parameter from PEFT's tensors into a buffer; rows that the file lacks become 0.

    Args:
        site: the parameter.
        entry: where its matrices lie.
        tensors: by PEFT's name.
        flat: buffer `[P]` of the adapter.
        adapted: names of all places that the adapter adapts.

    Raises:
        CheckpointError: a matrix is missing or has another shape; the buffer is as it was.
    """
    a, b = _keys(site, adapted)
    for key in (a, b):
        if key not in tensors:
            near = get_close_matches(key, tensors, 1, 0)
            raise CheckpointError(f"the adapter has no {key}" + (f"; the nearest is {near[0]}" if near else ""))
    down, up = tensors[a], tensors[b]
    rank = down.shape[0] // site.experts
    wanted = (site.experts * rank, site.fan_in), (site.fan_out, site.experts * rank)
    if (tuple(down.shape), tuple(up.shape)) != wanted or not 0 < rank <= entry.rank:
        raise CheckpointError(
            f"{a} is {list(down.shape)} and {b} {list(up.shape)}; for {site.experts} experts and a rank r of at most "
            f"{entry.rank} they must be [{site.experts} r, {site.fan_in}] and [{site.fan_out}, {site.experts} r]"
        )
    with torch.no_grad():
        mine_down, mine_up = entry.down_of(flat), entry.up_of(flat)
        mine_down[:, rank:], mine_up[:, rank:] = 0, 0
        mine_down[:, :rank] = down.reshape(site.experts, rank, site.fan_in).to(flat)
        mine_up[:, :rank] = up.reshape(site.fan_out, rank, site.experts).permute(2, 1, 0).to(flat)


def _keys(site: ExpertSite, adapted: Collection[str]) -> tuple[str, str]:
    inner = ".base_layer" * sum(other in adapted for other in site.later)
    return tuple(f"{_PREFIX}{site.path}{inner}.lora_{which}.weight" for which in "AB")  # type: ignore[return-value]


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
