"""The linear layers and experts of a model that adapters may adapt, and the forward that replaces their own."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle_torch.numerics import judge
from twinkle_transformers.lowrank import experts
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.lowrank.dispatch import Dispatch
from twinkle_transformers.lowrank.layout import Entry
from twinkle_transformers.lowrank.products import Routing
from twinkle_transformers.segments import body_of, routing_now, routing_of

_FORWARD = nn.Linear.forward
_TOLD = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate", "_is_expert_parallel")
"""Attributes that transformers sets on experts with exchangeable implementations."""
_PREFIX = "base_model.model."
_REFUSED = ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora")
"""Fields that PEFT refuses together with `target_parameters`."""


@dataclass(frozen=True, slots=True)
class Site:
    """A layer that adapters may adapt.

    Attributes:
        name: its path in the Hugging Face module, which is its name in PEFT's files too.
        module: the layer.
        fan_in: input size.
        fan_out: output size.
        transposed: whether the shape of its weight is `[fan_in, fan_out]`.
        head: whether it is the output projection.
        router: whether it routes tokens to experts; only adapters that name it adapt it.
    """

    name: str
    module: nn.Module
    fan_in: int
    fan_out: int
    transposed: bool = False
    head: bool = False
    router: bool = False


def find_sites(model: Any) -> dict[str, Site]:
    """Return the linear layers of a causal language model's text decoder, and its output projection, by name.

    Args:
        model: the Hugging Face module, without a PEFT wrapper.
    """
    head = model.get_output_embeddings()
    inside = {id(module) for module in decoder_of(model).modules()} | {id(head)}
    sites: dict[str, Site] = {}
    for name, module in model.named_modules():
        if id(module) in inside and (site := _site(name, module, module is head)) is not None:
            sites[name] = site
    return sites


def decoder_of(model: Any) -> nn.Module:
    """Return the text decoder of a causal language model; `get_decoder` of some classes is wrong."""
    candidate, head = model.get_decoder(), model.get_output_embeddings()
    known = isinstance(candidate, nn.Module) and candidate not in (model, head)
    decoder: nn.Module = candidate if known else body_of(model)
    return decoder


def install(sites: Iterator[Site] | list[Site], *, head: bool = False) -> None:
    """Replace the forward of these layers, so that it adds the terms of adapters in passes that have some.

    Args:
        sites: the layers.
        head: also the output projection, which otherwise runs after the pass, only on scored positions.

    Raises:
        Unsupported: a layer's forward was already replaced.
    """
    for site in sites:
        replaced = site.module.__dict__.get("forward")
        if replaced is not None and not (isinstance(replaced, partial) and replaced.func is _adapted):
            raise Unsupported(f"the forward of {site.name} was replaced (by a patch or kernel); undo that first")
        if replaced is None and (head or not site.head):
            site.module.__dict__["forward"] = partial(_adapted, site)


def uninstall(sites: Iterator[Site] | list[Site]) -> None:
    """Restore the forward of the layers."""
    for site in sites:
        if isinstance(replaced := site.module.__dict__.get("forward"), partial) and replaced.func is _adapted:
            del site.module.__dict__["forward"]


def check_places(sites: Iterable[Site]) -> None:
    """Refuse layers whose forward was replaced since `install`, which would bypass adapters.

    Raises:
        Unsupported: the message names the layer.
    """
    for site in sites:
        module, replaced = site.module, site.module.__dict__.get("forward")
        ours = (replaced is None and site.head) or (isinstance(replaced, partial) and replaced.func is _adapted)
        if not ours or (isinstance(module, nn.Linear) and not _is_linear(module)):
            raise Unsupported(f"the forward of {site.name} was replaced (by a patch or kernel); adapters need its own")


def is_at_rest(module: nn.Module) -> bool:
    """Return whether a call runs the layer's own forward: not replaced, or no pass with adapters is running."""
    replaced = module.__dict__.get("forward")
    return replaced is None or (isinstance(replaced, partial) and replaced.func is _adapted and routing_now() is None)


def _adapted(site: Site, x: Tensor) -> Tensor:
    routing = routing_of(x.numel() // site.fan_in)
    module: Any = site.module
    part = routing is not None and x.numel() != routing.total * site.fan_in
    if routing is None or (part and not routing.at(site.name)):
        plain: Tensor = type(module).forward(module, x)
        return plain
    if part:
        raise Unsupported(
            f"{site.name} sees {x.numel() // site.fan_in} rows of a pass that has {routing.total} tokens; adapters on "
            "it are not supported"
        )
    return lowrank.linear(x, module.weight, module.bias, routing, site.name, transposed=site.transposed)


def _site(name: str, module: nn.Module, head: bool) -> Site | None:
    router = any("router" in part for part in name.split(".")) or name.endswith(".gate")
    if isinstance(module, nn.Linear) and _is_linear(module):
        return Site(name, module, module.in_features, module.out_features, head=head, router=router)
    if isinstance(module, Conv1D):
        weight: Tensor = module.weight
        return Site(name, module, weight.shape[0], weight.shape[1], transposed=True, head=head)
    return None


def _is_linear(module: nn.Linear) -> bool:
    """Return whether a layer computes `x W^T + b`; subclasses such as routers and quantized layers may not."""
    if type(module).forward is _FORWARD:
        return True
    if not module.weight.is_floating_point():
        return False
    x = torch.linspace(-1.0, 1.0, 2 * module.in_features, device=module.weight.device).view(2, -1)

    def own(x: Tensor) -> Tensor:
        y: Tensor = type(module).forward(module, x)
        return y

    def plain(x: Tensor) -> Tensor:
        return nn.functional.linear(x, module.weight, module.bias)

    return judge("linear", own, plain, x.to(module.weight.dtype)).exact


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """A parameter with one matrix for each expert, which adapters may adapt.

    Attributes:
        name: its path in the Hugging Face module, which is its name in PEFT's `target_parameters` too.
        module: the layer of experts.
        block: the module that contains and calls it.
        experts: number of experts.
        fan_in: input size of an expert's product.
        fan_out: output size of an expert's product.
        transposed: whether its shape is `[experts, fan_in, fan_out]`.
        later: names of later parameters of this kind in the module, whose PEFT wrappers enclose this one's.
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

    Only floating-point experts with exchangeable implementations in transformers are returned (Qwen-MoE, GPT-OSS,
    DeepSeek, Mixtral, ...); experts that are ordinary linear layers are found by `find_sites`.

    Args:
        model: the Hugging Face module, without a PEFT wrapper.
    """
    inside = {id(module) for module in model.get_decoder().modules()}
    sites: dict[str, ExpertSite] = {}
    for path, module in model.named_modules():
        if id(module) in inside and all(hasattr(module, attribute) for attribute in _TOLD):
            block = model.get_submodule(path.rpartition(".")[0])
            sites |= {site.name: site for site in _expert_sites(path, module, block)}
    return sites


def install_experts(sites: Iterable[ExpertSite]) -> None:
    """Replace the forward of these layers, so that it adds the terms of adapters in passes that have some.

    Raises:
        Unsupported: a layer's forward was already replaced, or its experts are on several devices.
    """
    for site in {site.path: site for site in sites}.values():
        _check_experts(site)
        every = {other.parameter: other for other in _expert_sites(site.path, site.module, site.block)}
        site.module.__dict__["forward"] = partial(_adapted_experts, site.module, every)


def uninstall_experts(sites: Iterable[ExpertSite]) -> None:
    """Restore the forward of the layers."""
    for site in sites:
        if _is_ours(site.module.__dict__.get("forward")):
            del site.module.__dict__["forward"]


def _check_experts(site: ExpertSite) -> None:
    for path, module in ((site.path, site.module), (site.path.rpartition(".")[0], site.block)):
        replaced = module.__dict__.get("forward")
        if replaced is not None and not _is_ours(replaced):
            raise Unsupported(f"the forward of {path} was replaced (by a patch or kernel); undo that first")
    if site.module._is_expert_parallel:
        raise Unsupported(f"the experts of {site.path} are on several devices; adapters need all of them on one")


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _adapted_experts


def _expert_sites(path: str, module: Any, block: nn.Module) -> list[ExpertSite]:
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


def _adapted_experts(
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
    """Return the weights `[T, k]` of the experts; gradients flow only to those of trained rows."""
    if routing.trained == routing.total or not weights.requires_grad:
        return weights
    return torch.cat([weights[: routing.trained], weights[routing.trained :].detach()])


def as_peft_reads(config: LoraConfig, model: Any) -> LoraConfig:
    """Return a copy of a configuration as PEFT converts it for this model.

    Where transformers 5 holds experts as parameters that were linear layers before (Qwen-MoE, DeepSeek, Mixtral, ...),
    newer PEFT converts `gate_proj`, `up_proj` and `down_proj` (Mixtral: `w1`, `w3` and `w2`) in `target_modules` to
    `target_parameters`, with twice the rank where two were joined, and "all-linear" to these, the router and the other
    linear layers. PEFT then adapts no linear layer that still has such a name (shared experts, dense layers), so it
    cannot load files with adapters on them. Older PEFT leaves the configuration unchanged.

    Raises:
        ArgumentError: PEFT refuses it because only one of two joined layers is a target.
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

    As in PEFT, a target matches each parameter with this name, or whose name ends with `.` and this name.

    Args:
        name: of the adapter, for errors.
        config: the configuration.
        sites: the parameters that adapters may adapt.
        model: the Hugging Face module.

    Raises:
        ArgumentError: a target matches nothing, or PEFT does not allow a field for experts.
        Unsupported: a target matches a parameter that a pool cannot adapt.
    """
    targets = sorted(set(config.target_parameters or ()))
    if not targets:
        return []
    for field in _REFUSED:
        if value := getattr(config, field):
            raise ArgumentError(
                f"adapter {name!r}: PEFT does not support {field}={value!r} together with target_parameters"
            )
    for target in targets:
        _check_target(name, target, sites, model)
    return [key for key in sites if any(_means(target, key) for target in targets)]


def expert_views(
    site: ExpertSite, entry: Entry, flat: Tensor, adapted: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield A `[experts r, fan_in]` and B `[fan_out, r experts]` of one parameter as views of `flat`, by PEFT's name.

    In A the rows of an expert are contiguous, in B the columns of a rank. PEFT nests the wrappers of several adapted
    parameters of a module, the last parameter's outermost, so the names depend on the other adapted parameters.
    `adapter_config.json` needs the names of all adapted parameters (or endings that mean the same ones) as
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
