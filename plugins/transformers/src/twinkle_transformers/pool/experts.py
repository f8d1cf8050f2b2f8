"""Layers of experts of a model where adapters may act, and what runs there instead of the layer's own forward."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle_transformers.lowrank import experts
from twinkle_transformers.lowrank.dispatch import Dispatch
from twinkle_transformers.lowrank.products import Routing
from twinkle_transformers.segments import routing_now

_TOLD = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate", "_is_expert_parallel")
"""What transformers writes on experts that it can run by more than one implementation."""


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """A parameter that holds one matrix an expert, which adapters may adapt.

    Attributes:
        name: its path in the Hugging Face module, which is its name in PEFT's `target_parameters` too.
        module: the layer of experts.
        block: what holds it and calls it.
        experts: number of experts.
        fan_in: size of what goes into an expert's product.
        fan_out: size of what comes out.
        transposed: whether it lies as `[experts, fan_in, fan_out]`.
        later: names of the module's other such parameters that come after it, which PEFT wraps around it.
    """

    name: str
    module: nn.Module
    block: nn.Module
    experts: int
    fan_in: int
    fan_out: int
    transposed: bool
    later: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        """Its name within the module."""
        return self.name.rpartition(".")[2]

    @property
    def path(self) -> str:
        """Name of the module."""
        return self.name.rpartition(".")[0]


def find_expert_sites(model: Any) -> dict[str, ExpertSite]:
    """Return the parameters of experts of a causal language model's text decoder, by name.

    Those are found that transformers can run by more than one implementation (Qwen-MoE, GPT-OSS, DeepSeek, Mixtral,
    ...), in floating point; experts that are ordinary linear layers are sites of their own.

    Args:
        model: the Hugging Face module, without a PEFT wrapper.
    """
    inside = {id(module) for module in model.get_decoder().modules()}
    found: dict[str, ExpertSite] = {}
    for path, module in model.named_modules():
        if id(module) in inside and all(hasattr(module, told) for told in _TOLD):
            block = model.get_submodule(path.rpartition(".")[0])
            found |= {site.name: site for site in _sites(path, module, block)}
    return found


def install_experts(sites: Iterable[ExpertSite]) -> None:
    """Let passes with adapters go through these layers; other passes see them as they were.

    Raises:
        Unsupported: a layer's forward was replaced by something else already, or its experts lie on several devices.
    """
    for site in {site.path: site for site in sites}.values():
        _check(site)
        every = {other.parameter: other for other in _sites(site.path, site.module, site.block)}
        site.module.__dict__["forward"] = partial(_adapted, site.module, every)


def uninstall_experts(sites: Iterable[ExpertSite]) -> None:
    """Give the layers their own forward back."""
    for site in sites:
        if _is_ours(site.module.__dict__.get("forward")):
            del site.module.__dict__["forward"]


def _check(site: ExpertSite) -> None:
    for path, module in ((site.path, site.module), (site.path.rpartition(".")[0], site.block)):
        replaced = module.__dict__.get("forward")
        if replaced is not None and not _is_ours(replaced):
            raise Unsupported(f"the forward of {path} was replaced (by a patch or kernel); undo that first")
    if site.module._is_expert_parallel:
        raise Unsupported(f"the experts of {site.path} lie on several devices; adapters need all of them on one")


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _adapted


def _sites(path: str, module: Any, block: nn.Module) -> list[ExpertSite]:
    wanted = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    there = [name for name, value in module.named_parameters(recurse=False) if name in wanted and _is_stack(value)]
    if len(there) < len(wanted):
        return []
    sites = []
    for number, name in enumerate(there):
        count, first, second = getattr(module, name).shape
        fan_in, fan_out = (first, second) if module.is_transposed else (second, first)
        later = tuple(f"{path}.{other}" for other in there[number + 1 :])
        sites.append(ExpertSite(f"{path}.{name}", module, block, count, fan_in, fan_out, module.is_transposed, later))
    return sites


def _is_stack(parameter: Tensor) -> bool:
    return parameter.ndim == 3 and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _adapted(
    module: Any, sites: dict[str, ExpertSite], hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    routing = routing_now()
    if routing is None or not any(routing.at(site.name) for site in sites.values()):
        plain: Tensor = type(module).forward(module, hidden_states, top_k_index, top_k_weights)
        return plain
    up, down = sites["gate_up_proj" if module.has_gate else "up_proj"], sites["down_proj"]
    dispatch = Dispatch(top_k_index, up.experts, routing)
    inner = _product(up, hidden_states, dispatch, routing, shared=True)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _product(down, inner, dispatch, routing)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    weights = _trained_only(top_k_weights, routing).reshape(-1).index_select(0, dispatch.order)
    return dispatch.sum(out * weights[:, None]).to(hidden_states.dtype)


def _product(site: ExpertSite, x: Tensor, dispatch: Dispatch, routing: Routing, shared: bool = False) -> Tensor:
    module, name = site.module, site.parameter
    return experts.linear(
        x,
        getattr(module, name),
        getattr(module, f"{name}_bias") if module.has_bias else None,
        dispatch,
        routing,
        site.name,
        transposed=site.transposed,
        shared=shared,
    )


def _trained_only(weights: Tensor, routing: Routing) -> Tensor:
    """Return the weights `[T, k]` of the experts; a gradient flows only into those of rows that are trained."""
    if routing.trained == routing.total or not weights.requires_grad:
        return weights
    return torch.cat([weights[: routing.trained], weights[routing.trained :].detach()])
