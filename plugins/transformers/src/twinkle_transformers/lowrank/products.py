"""Low-rank terms of many adapters in one pass over one base model.

The rows of a pass form one stream `[T, ...]`: rows of one operation are consecutive, and so are operations of adapters
with one layout. So each base product is one product of the whole stream, and the terms of the adapters are grouped
products of slices. Gradients go to a buffer with one row for each operation, `[n, P]`, and not to a parameter: a failed
operation (a NaN, say) can be dropped before it reaches its adapter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.layout import Entry, Layout

Mask = Callable[[str, int, torch.dtype], Tensor]
"""Returns the dropout factors `[L, features]` of a layer, given its name, the number of features and the dtype."""


@dataclass(slots=True)
class AdapterGroup:
    """Consecutive operations of a stream whose adapters have one layout, so that their terms are grouped products.

    Attributes:
        layout: offsets of the matrices in a vector.
        groups: rows of each operation.
        weights: `[n, P]`, in the dtype of the products.
        grads: float32 (float64 for float64 weights) `[n, P]`, gradients of the operations; None without training.
        dropout: factors on the input of A; None without dropout.
    """

    layout: Layout
    groups: Groups
    weights: Tensor
    grads: Tensor | None = None
    dropout: Mask | None = None


@dataclass(slots=True)
class Routing:
    """Assignment of the rows of a stream to adapters.

    Attributes:
        adapter_groups: in stream order; rows outside of them use the base model alone.
        total: number of rows of the stream.
        trained: number of rows at the beginning that gradients flow through; 0 for a pass without training.
    """

    adapter_groups: Sequence[AdapterGroup]
    total: int
    trained: int = 0
    anchor: Tensor | None = field(default=None)
    """A leaf that requires a gradient, so that the graph begins at the first adapter: the stream requires none."""

    def __post_init__(self) -> None:
        if self.trained and self.anchor is None:
            self.anchor = torch.zeros((), requires_grad=True)

    def at(self, name: str) -> list[tuple[AdapterGroup, Entry]]:
        """Return the adapter groups with matrices at a layer."""
        return [(c, entry) for c in self.adapter_groups if (entry := c.layout.entries.get(name)) is not None]


def stack(weights: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the weights `[P]` of several operations as one tensor `[n, P]`; a single one of this dtype is not copied.

    Args:
        weights: weights of one layout.
        dtype: dtype of the products.
        out: buffer to use, `[n, P]` of this dtype.
    """
    if len(weights) == 1 and weights[0].dtype == dtype:
        return weights[0].detach()[None]
    if out is None:
        out = torch.empty(len(weights), weights[0].numel(), dtype=dtype, device=weights[0].device)
    # One fused copy, which also casts to the dtype of the products, instead of a kernel per adapter.
    torch._foreach_copy_(list(out.unbind()), [w.detach() for w in weights])
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, name: str, *, transposed: bool = False
) -> Tensor:
    """Return `x W^T + b` with the low-rank term of each row's own adapter.

    Args:
        x: `[..., fan_in]`; the leading dimensions are the rows of the stream.
        weight: `[fan_out, fan_in]`, frozen.
        bias: `[fan_out]`, frozen.
        routing: routing of the pass.
        name: name of the layer.
        transposed: the weight is `[fan_in, fan_out]` (GPT-2).
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    terms = routing.at(name)
    if routing.trained and torch.is_grad_enabled():
        out: Tensor = _Linear.apply(x, routing.anchor, weight, bias, routing, terms, name, transposed)  # type: ignore[no-untyped-call]
        return out
    return _forward(x, weight, bias, terms, name, transposed)[0]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, terms: list[tuple[AdapterGroup, Entry]], name: str, transposed: bool
) -> tuple[Tensor, list[Tensor]]:
    # One product with the frozen weight serves all adapters; each group then adds its term to its rows in place.
    y = nn.functional.linear(x, weight.t() if transposed else weight, bias)
    rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    inner = []
    for adapter_group, entry in terms:
        into = _into(adapter_group, entry, rows, name)
        hidden = adapter_group.groups.multiply(into, entry.down_of(adapter_group.weights).mT)
        adapter_group.groups.add_products(
            adapter_group.groups.cut(out), hidden, entry.up_of(adapter_group.weights), entry.scale
        )
        inner.append(hidden)
    return y, inner


def _into(adapter_group: AdapterGroup, entry: Entry, rows: Tensor, name: str) -> Tensor:
    """Return the input of A: the adapter group's rows, after dropout.

    The mask is a function of counters and computed again in the backward, which is cheaper than keeping it.
    """
    cut = adapter_group.groups.cut(rows)
    return cut if adapter_group.dropout is None else cut * adapter_group.dropout(name, entry.fan_in, cut.dtype)


class _Linear(torch.autograd.Function):
    """A frozen linear layer and the low-rank terms on it.

    For rows x with gradient g of y = x W^T + s (x A^T) B^T: dx = g W + s (g B) A, dA = s (g B)^T x, dB = s g^T (x A^T).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing,
        terms: list[tuple[AdapterGroup, Entry]], name: str, transposed: bool,
    ) -> Tensor:  # fmt: skip
        y, inner = _forward(x, weight, bias, terms, name, transposed)
        # `inner` (x A^T) is small, since its width is the rank, and dB needs it; the term itself is not kept.
        ctx.save_for_backward(x if terms else None, weight, *inner)
        ctx.routing, ctx.terms, ctx.name, ctx.transposed, ctx.shape = routing, terms, name, transposed, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *inner = ctx.saved_tensors
        g = grads[0].reshape(-1, grads[0].shape[-1])
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        dx = (
            _back_through(g, weight.t() if ctx.transposed else weight, ctx.routing) if ctx.needs_input_grad[0] else None
        )
        for (adapter_group, entry), hidden in zip(ctx.terms, inner, strict=True):
            if adapter_group.grads is not None:
                _add_term(adapter_group, entry, g, rows, hidden, dx, ctx.name)
        return None if dx is None else dx.view(ctx.shape), *[None] * 7


def _back_through(g: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """Return `g W`, computed only for trained rows, which are the first of the stream; 0 for the others."""
    if routing.trained == len(g):
        return g @ weight
    dx = g.new_empty(len(g), weight.shape[1])
    torch.mm(g[: routing.trained], weight, out=dx[: routing.trained])
    dx[routing.trained :] = 0
    return dx


def _add_term(
    adapter_group: AdapterGroup, entry: Entry, g: Tensor, rows: Any, hidden: Tensor, dx: Tensor | None, name: str
) -> None:
    groups, weights, totals = adapter_group.groups, adapter_group.weights, adapter_group.grads
    assert totals is not None
    own_grads = groups.cut(g)
    # s (g B) has the width of the rank and is needed for dA and dx; no tensor of the size of a weight is built.
    inner = groups.multiply(own_grads, entry.up_of(weights).mT).mul_(entry.scale)
    groups.add_outer(entry.up_of(totals), hidden, own_grads, entry.scale)
    groups.add_outer(entry.down_of(totals), inner, _into(adapter_group, entry, rows, name))
    if dx is None:
        return
    if adapter_group.dropout is None:
        groups.add_products(groups.cut(dx), inner, entry.down_of(weights))
    else:
        back = groups.multiply(inner, entry.down_of(weights))
        groups.cut(dx).add_(back.mul_(adapter_group.dropout(name, entry.fan_in, back.dtype)))


Spans = Sequence[tuple[int, int]]
"""First row of each sequence, and the row after its last."""


def excerpt(routing: Routing, spans: Spans) -> Routing:
    """Return the routing of selected rows of a stream, for layers that run sequences separately.

    Weights and gradients are views of the original buffers, so that gradients are added to the same operations.

    Args:
        routing: routing of the whole stream.
        spans: the rows, in ascending spans that do not overlap.
    """
    total = sum(stop - start for start, stop in spans)
    trained = sum(_common(span, (0, routing.trained)) for span in spans)
    adapter_groups = [part for adapter_group in routing.adapter_groups for part in _parts(adapter_group, spans)]
    return Routing(adapter_groups, total, trained, routing.anchor if trained else None)


def _common(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _parts(adapter_group: AdapterGroup, spans: Spans) -> Iterator[AdapterGroup]:
    """Yield an adapter group for each run of operations that have rows in the spans."""
    start = adapter_group.groups.start
    owners = list(pairwise(accumulate(adapter_group.groups.lengths, initial=start)))
    counts = [sum(_common(span, owner) for span in spans) for owner in owners]
    at = sum(_common(span, (0, start)) for span in spans)
    for first, last in runs([count > 0 for count in counts]):
        if not counts[first]:
            continue
        lengths = tuple(counts[first:last])
        grads = None if adapter_group.grads is None else adapter_group.grads[first:last]
        dropout = adapter_group.dropout
        if dropout is not None:
            dropout = _Rows(dropout, _places(spans, owners[first][0], owners[last - 1][1]) - start)
        yield AdapterGroup(adapter_group.layout, Groups(at, lengths), adapter_group.weights[first:last], grads, dropout)
        at += sum(lengths)


def _places(spans: Spans, start: int, stop: int) -> Tensor:
    """Return the rows of the stream from `start` to `stop` that are in the spans."""
    inside = [(max(a, start), min(b, stop)) for a, b in spans]
    return torch.cat([torch.arange(a, b) for a, b in inside if a < b])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The dropout factors of some rows of an adapter group."""

    mask: Mask
    rows: Tensor

    def __call__(self, name: str, features: int, dtype: torch.dtype) -> Tensor:
        whole = self.mask(name, features, dtype)
        return whole[self.rows.to(whole.device)]
