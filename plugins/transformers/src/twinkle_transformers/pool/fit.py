"""Whether a model can carry a pool of adapters: found out when the pool is made, and not at its first pass."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle.logging import get_logger
from twinkle.torch.lowrank import Routing
from twinkle.torch.segments import Segments
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.segments import Scope, routing_now
from twinkle_transformers.sites import Site, decoder_of, uninstall

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LENGTHS = (5, 4)


def check_kind(backbone: Backbone) -> None:
    """Refuse a model that is no decoder with a head, or whose weights are not plain numbers.

    Raises:
        Unsupported: it names the model and says why.
    """
    model = backbone.model
    if (reason := _reason(model)) is not None:
        raise Unsupported(f"{type(model).__name__} cannot carry the adapters of a pool: {reason}")


def _reason(model: Any) -> str | None:
    if model.get_output_embeddings() is None:
        return "it has no output projection over a vocabulary; TransformersModel trains it"
    if len({p.device for p in model.parameters()}) > 1:
        return "its weights lie on several devices"
    for name, module in decoder_of(model).named_modules():
        if "Linear" in type(module).__name__ and (dtype := _packed(module)) is not None:
            return f"{name} is quantised ({type(module).__name__} with weights of {dtype}); load it in bfloat16"
    return None


def _packed(module: nn.Module) -> torch.dtype | None:
    weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return next((w.dtype for w in weights if w.dtype not in _FLOATS), None)


@torch.no_grad()
def drop_partial(backbone: Backbone, sites: Mapping[str, Site], alone: bool) -> dict[str, Site]:
    """Return the sites that see every token of a pass; the others (experts that are linear layers, say) are let go.

    Args:
        backbone: the model.
        sites: installed.
        alone: whether each sequence goes through the model alone.
    """
    odd: set[str] = set()
    hooks = [site.module.register_forward_pre_hook(partial(_note, site, odd)) for site in sites.values()]
    try:
        _probe(backbone, alone)
    finally:
        for hook in hooks:
            hook.remove()
    if not odd:
        return dict(sites)
    kinds = {_kind(name) for name in odd}
    kept = {name: site for name, site in sites.items() if _kind(name) not in kinds}
    uninstall([site for name, site in sites.items() if name not in kept])
    get_logger().warning(
        "%s: adapters cannot be on %s, which see only some tokens of a pass", type(backbone.model).__name__,
        ", ".join(sorted(kinds)),
    )  # fmt: skip
    return kept


def _probe(backbone: Backbone, alone: bool) -> None:
    model = backbone.model
    segments = Segments.of((sum(_LENGTHS),) if alone else _LENGTHS, model.device)
    routing = Routing([], segments.total)
    ids = 1 + torch.arange(segments.total, device=model.device)[None] % (model.config.get_text_config().vocab_size - 1)
    given = {"input_ids": ids}
    if not alone and "position_ids" in backbone.inputs:
        given["position_ids"] = segments.positions[None]
    with Scope(segments, None, routing) if alone else backbone.segmenter.within(segments, routing):
        backbone.body(**given, use_cache=False)


def _note(site: Site, odd: set[str], module: nn.Module, given: tuple[Tensor, ...]) -> None:
    routing = routing_now()
    if routing is not None and given and given[0].numel() != routing.total * site.fan_in:
        odd.add(site.name)


def _kind(name: str) -> str:
    """Return a name without its numbers: what is odd in one layer, or one expert, is odd in all."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
