"""Whether a model can carry the adapters of a pool, measured when the pool is created.

A model whose rows cannot hold several sequences runs each sequence by itself, which is slower.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle.logging import get_logger
from twinkle_torch.numerics import Evidence, evaluating, judge, probe_tokens, turned_off
from twinkle_torch.segments import Segments
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.pool.stream import Stream
from twinkle_transformers.segments import Scope, is_routed, routing_now
from twinkle_transformers.sites import Site, decoder_of, uninstall

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LENGTHS = (5, 4)


def check_model_kind(backbone: Backbone) -> None:
    """Refuse a model without an output projection, on several devices, or with quantized weights.

    Raises:
        Unsupported: the message has the reason.
    """
    model = backbone.model
    if (reason := _reason(model)) is not None:
        raise Unsupported(f"{type(model).__name__} cannot carry the adapters of a pool: {reason}")


def _reason(model: Any) -> str | None:
    if model.get_output_embeddings() is None:
        return "it has no output projection over a vocabulary; TransformersModel trains it"
    if len({p.device for p in model.parameters()}) > 1:
        return "its weights are on several devices"
    for name, module in decoder_of(model).named_modules():
        if "Linear" in type(module).__name__ and (dtype := _packed(module)) is not None:
            return f"{name} is quantised ({type(module).__name__} with weights of {dtype}); load it in bfloat16"
    return None


def _packed(module: nn.Module) -> torch.dtype | None:
    weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return next((w.dtype for w in weights if w.dtype not in _FLOATS), None)


@torch.no_grad()
def drop_partial_sites(backbone: Backbone, sites: Mapping[str, Site], alone: bool) -> dict[str, Site]:
    """Return the sites that see every token of a pass; others, such as experts that are linear layers, are uninstalled.

    Args:
        backbone: the model.
        sites: installed sites.
        alone: whether each sequence runs through the model by itself.
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
        "%s: adapters cannot adapt %s, which see only some tokens of a pass", type(backbone.model).__name__,
        ", ".join(sorted(kinds)),
    )  # fmt: skip
    return kept


def measure_adapters(
    backbone: Backbone, body: Callable[[Stream], Tensor], sites: Mapping[str, Site], dtype: torch.dtype
) -> Evidence:
    """Compare one pass of three adapters with three passes of one adapter, and change each adapter in turn.

    The comparison measures the error of sharing a pass; the changes show whether an adapter affects rows of another.

    Args:
        backbone: the model with installed `sites`.
        body: computes the output of a stream, `[T, ...]`.
        sites: layers that adapters may adapt.
        dtype: dtype of the low-rank products.
    """
    device = backbone.model.device
    layout = Layout.of((name, Shape(2, s.fan_in, s.fan_out, 1.0)) for name, s in sites.items() if not s.head)
    ids = torch.tensor([probe_tokens(sum(_ADAPTED), backbone.model.config.get_text_config().vocab_size)], device=device)
    bounds = Segments.of(_ADAPTED, device).bounds

    def stream(lengths: tuple[int, ...], first: int, weights: Tensor) -> Stream:
        total = sum(lengths)
        segments = Segments.of(lengths, device)
        routing = Routing([AdapterGroup(layout, Groups(0, lengths), weights)], total)
        return Stream(ids[:, first : first + total], segments.positions[None], segments, routing, [])

    def together(weights: Tensor) -> Tensor:
        return body(stream(_ADAPTED, 0, weights))

    def apart(weights: Tensor) -> Tensor:
        parts = enumerate(bounds)
        return torch.cat([body(stream((end - start,), start, weights[i : i + 1])) for i, (start, end) in parts])

    weights, others = (_random_adapters(layout, seed, dtype).to(device) for seed in (1, 2))
    changes = []
    for number in range(len(_ADAPTED)):
        changed = weights.clone()
        changed[number] = others[number]
        changes.append((changed, [row for i, b in enumerate(bounds) if i != number for row in range(*b)]))
    return judge("fused", together, apart, weights, changes, routed=is_routed(backbone.model))


_ADAPTED = (5, 3, 5)


def _random_adapters(layout: Layout, seed: int, dtype: torch.dtype) -> Tensor:
    """Return three random adapters `[3, P]`, with terms about as large as after a short training."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(len(_ADAPTED), layout.size)
    for entry in layout.entries.values():
        entry.down_of(flat).normal_(0.0, entry.fan_in**-0.5, generator=generator)
        entry.up_of(flat).normal_(0.0, 0.02, generator=generator)
    return flat.to(dtype)


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
    """Return a name without indices: the same module of another layer or expert behaves alike."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


_TOKENS, _SAME = 7, 4
"""Length of two rows that show whether tokens attend to later ones, and number of tokens that the rows share."""


def needs_separate_sequences(backbone: Backbone) -> bool:
    """Return whether each sequence must run through a model by itself, which is slower; log the reason.

    Raises:
        Unsupported: even that is wrong, for example because tokens attend to later ones.
    """
    name = type(backbone.model).__name__
    off = turned_off("fused")
    if off is None and backbone.segmenter.check() is None:
        if mixers := backbone.segmenter.mixers:
            get_logger().info(
                "%s: %s sees sequences of one length at a time, which is slower than one call for all", name,
                ", ".join(mixers),
            )  # fmt: skip
        return False
    if (wrong := _against(backbone)) is not None:
        raise Unsupported(f"{name} cannot carry the adapters of a pool: {wrong}")
    get_logger().warning(
        "%s: adapters do not share passes: %s. Each sequence runs through the model by itself: the results are the "
        "same, and short rows take longer", name, backbone.segmenter.reason if off is None else off.reason,
    )  # fmt: skip
    return True


def run_each_sequence(call: Callable[[Mapping[str, Tensor]], Tensor], stream: Stream) -> Tensor:
    """Return the output of a model for a stream, `[T, ...]`, computed one sequence at a time.

    Args:
        call: takes `input_ids` `[1, t]` and returns `[t, ...]`.
        stream: a stream without shared prefixes.
    """
    scope = Scope(stream.segments, None, stream.routing)
    outputs = []
    for number, (start, stop) in enumerate(stream.segments.bounds):
        with scope.only((number,)):
            outputs.append(call({"input_ids": stream.ids[:, start:stop]}))
    return torch.cat(outputs)


def _against(backbone: Backbone) -> str | None:
    """Return why the output of a model for a single row is not that of a causal language model; None if it is."""
    model: Any = backbone.model
    vocabulary = model.config.get_text_config().vocab_size
    one, two = (probe_tokens(_TOKENS, vocabulary, changed=changed) for changed in (False, True))
    ids, other = (torch.tensor([row], device=model.device) for row in (one, [*one[:_SAME], *two[_SAME:]]))

    def logits(ids: Tensor) -> Tensor:
        output: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return output

    with evaluating(model):
        evidence = judge("causal order", logits, logits, ids, [(other, range(_SAME))], routed=is_routed(model))
    if evidence.exact:
        return None
    if evidence.method == "structure":
        return f"it does not run on tokens alone ({evidence.reason})"
    return f"its tokens see those that come after them: {evidence.reason}"
