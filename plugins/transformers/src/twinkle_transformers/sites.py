"""The layers of a model that adapters may adapt, and the forward that replaces their own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from twinkle.errors import Unsupported
from twinkle_torch.numerics import judge
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.segments import body_of, routing_now, routing_of

_FORWARD = nn.Linear.forward


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
