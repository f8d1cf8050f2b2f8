"""Low-rank terms of many adapters on the experts of one base model, in one pass.

The counterpart of `lowrank.products` for layers of experts, where each token is routed to a few of many matrices.
"""

from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle_transformers.lowrank.dispatch import Dispatch
from twinkle_transformers.lowrank.grouped import has_kernel
from twinkle_transformers.lowrank.layout import Entry
from twinkle_transformers.lowrank.products import AdapterGroup, Routing


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dispatch: Dispatch,
    routing: Routing,
    name: str,
    *,
    transposed: bool = False,
    shared: bool = False,
) -> Tensor:
    """Return `x W_e^T + b_e` of each pair's expert e, with the low-rank term of its token's own adapter.

    Args:
        x: `[T k, fan_in]`, in the order of `dispatch`.
        weight: `[experts, fan_out, fan_in]`, frozen.
        bias: `[experts, fan_out]`, frozen.
        dispatch: the pairs of tokens and experts.
        routing: routing of the pass.
        name: name of the parameter.
        transposed: the weight is `[experts, fan_in, fan_out]` (GPT-OSS).
        shared: x is `[T, fan_in]`, the same for all experts of a token.

    Returns:
        `[T k, fan_out]`, in the order of the pairs.

    Raises:
        Unsupported: an adapter has dropout.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not transposed:
        weight = weight.mT
    terms = routing.at(name)
    for adapter_group, _ in terms:
        if adapter_group.dropout is not None:
            raise Unsupported(f"lora_dropout must be 0 for adapters on experts ({name}), as in PEFT")
    if routing.trained and torch.is_grad_enabled():
        out: Tensor = _Experts.apply(x, routing.anchor, weight, bias, dispatch, terms, shared)  # type: ignore[no-untyped-call]
        return out
    with torch.no_grad():
        return _forward(x, weight, bias, dispatch, terms, shared)[0]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dispatch: Dispatch,
    terms: list[tuple[AdapterGroup, Entry]],
    shared: bool,
) -> tuple[Tensor, list[Tensor]]:
    rows = x.index_select(0, dispatch.tokens) if shared else x
    y = _multiply(rows, weight, bias, dispatch)
    inner = []
    for adapter_group, entry in terms:
        pieces = dispatch.pieces(adapter_group)
        hidden = pieces.collect(rows, entry.down_of(adapter_group.weights))
        pieces.add_products(y, hidden, entry.up_of(adapter_group.weights), entry.scale)
        inner.append(hidden)
    return y, inner


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, dispatch: Dispatch) -> Tensor:
    if has_kernel(rows, weight):
        y = nn.functional.grouped_mm(rows, weight, offs=dispatch.ends)
        return y if bias is None else y.add_(bias[dispatch.experts_of_pairs])
    y = rows.new_empty(len(rows), weight.shape[2])
    for expert, start, length in dispatch.slices:
        out, own_rows = y.narrow(0, start, length), rows.narrow(0, start, length)
        if bias is None:
            torch.mm(own_rows, weight[expert], out=out)
        else:
            torch.addmm(bias[expert], own_rows, weight[expert], out=out)
    return y


class _Experts(torch.autograd.Function):
    """Frozen linear layers of experts and the low-rank terms on them; the formulas are those of `lowrank`, per pair."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, dispatch: Dispatch,
        terms: list[tuple[AdapterGroup, Entry]], shared: bool,
    ) -> Tensor:  # fmt: skip
        y, inner = _forward(x, weight, bias, dispatch, terms, shared)
        ctx.save_for_backward(x if terms else None, weight, *inner)
        ctx.dispatch, ctx.terms, ctx.shared = dispatch, terms, shared
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *inner = ctx.saved_tensors
        dispatch: Dispatch = ctx.dispatch
        g = grads[0].contiguous()
        dx = _back_through(g, weight, dispatch) if ctx.needs_input_grad[0] else None
        rows = x
        if ctx.shared and x is not None:
            rows = x.index_select(0, dispatch.tokens)
        for (adapter_group, entry), hidden in zip(ctx.terms, inner, strict=True):
            if adapter_group.grads is not None:
                _add_term(adapter_group, entry, dispatch, g, rows, hidden, dx)
        if dx is not None and ctx.shared:
            dx = dispatch.sum(dx)
        return dx, *[None] * 6


def _back_through(g: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """Return the gradient of the rows through the base weights: 0 for rows that are not trained."""
    back = weight.mT
    if not has_kernel(g, back):
        dx = (
            g.new_zeros(len(g), back.shape[2])
            if dispatch.trained_places is not None
            else g.new_empty(len(g), back.shape[2])
        )
        for expert, start, length in dispatch.trained:
            torch.mm(g.narrow(0, start, length), back[expert], out=dx.narrow(0, start, length))
        return dx
    places = dispatch.trained_places
    if places is None:
        return nn.functional.grouped_mm(g, back, offs=dispatch.ends)
    some = nn.functional.grouped_mm(g.index_select(0, places), back, offs=dispatch.trained_ends)
    return g.new_zeros(len(g), back.shape[2]).index_copy_(0, places, some)


def _add_term(
    adapter_group: AdapterGroup,
    entry: Entry,
    dispatch: Dispatch,
    g: Tensor,
    rows: Tensor,
    hidden: Tensor,
    dx: Tensor | None,
) -> None:
    pieces, weights, totals = dispatch.pieces(adapter_group), adapter_group.weights, adapter_group.grads
    assert totals is not None
    inner = pieces.collect(g, entry.up_of(weights)).mul_(entry.scale)
    pieces.outer(entry.up_of(totals), hidden, g, entry.scale)
    pieces.outer(entry.down_of(totals), inner, rows)
    if dx is not None:
        pieces.add_products(dx, inner, entry.down_of(weights))
