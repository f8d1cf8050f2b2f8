"""Low-rank terms of many adapters in one pass over one base model.

The rows of a pass lie in one stream `[T, ...]`, those of one operation next to each other and those of adapters with
one layout next to each other. Each base product is then one product of the whole stream; the adapters' terms are
grouped products of its parts. Gradients go straight into one buffer an operation, `[n, P]`, and never into a parameter,
so that what an operation adds is known before any adapter has it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from twinkle_torch.layout import Entry, Layout
from twinkle_transformers.lowrank.grouped import Groups, runs

Mask = Callable[[str, int, torch.dtype], Tensor]
"""Returns the dropout factors `[L, features]` of a place, by its name, the number of features and the dtype."""


@dataclass(slots=True)
class AdapterGroup:
    """Operations of adapters with one layout, which lie next to each other in the stream.

    Attributes:
        layout: where the matrices lie in a buffer.
        groups: where each operation's rows lie.
        weights: `[n, P]`, in the dtype of the products.
        grads: float32 (float64 for float64 weights) `[n, P]`, what the operations add; None without training.
        dropout: factors on what goes into A; None is no dropout.
    """

    layout: Layout
    groups: Groups
    weights: Tensor
    grads: Tensor | None = None
    dropout: Mask | None = None


@dataclass(slots=True)
class Routing:
    """Which part of a pass's stream belongs to which adapter.

    Attributes:
        adapter_groups: in the order of the stream; rows that are in none of them see the base model alone.
        total: rows of the stream.
        trained: rows at its beginning that a gradient flows through; 0 for a pass without training.
    """

    adapter_groups: Sequence[AdapterGroup]
    total: int
    trained: int = 0
    anchor: Tensor | None = field(default=None)
    """A leaf that wants a gradient, so that the graph begins with the first adapter and not with the embedding."""

    def __post_init__(self) -> None:
        if self.trained and self.anchor is None:
            self.anchor = torch.zeros((), requires_grad=True)

    def at(self, name: str) -> list[tuple[AdapterGroup, Entry]]:
        """Return the adapter groups that adapt this place."""
        return [(c, entry) for c in self.adapter_groups if (entry := c.layout.entries.get(name)) is not None]


def stack(weights: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the buffers `[P]` of several operations as one `[n, P]`; a single one of this dtype is not copied.

    Args:
        weights: of one layout.
        dtype: of the products.
        out: memory to use, `[n, P]` of this dtype.
    """
    if len(weights) == 1 and weights[0].dtype == dtype:
        return weights[0].detach()[None]
    if out is None:
        out = torch.empty(len(weights), weights[0].numel(), dtype=dtype, device=weights[0].device)
    torch._foreach_copy_(list(out.unbind()), [w.detach() for w in weights])
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, name: str, *, transposed: bool = False
) -> Tensor:
    """Return `x W^T + b` with the low-rank term of each row's own adapter.

    Args:
        x: `[..., fan_in]` whose leading dimensions hold the rows of the stream.
        weight: `[fan_out, fan_in]`, frozen.
        bias: `[fan_out]`, frozen.
        routing: of the pass.
        name: of the place.
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
    """Return what goes into A: the adapter group's rows, after dropout."""
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
"""First row, and one past the last, of each sequence."""


def excerpt(routing: Routing, spans: Spans) -> Routing:
    """Return the routing of some rows of a stream, put one after the other.

    Weights and gradients are views of the buffers of the whole, so that what an operation adds lands in its own.

    Args:
        routing: of the whole stream.
        spans: ascending and apart.
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
    """Return the rows of the stream, from `start` to `stop`, that lie in the spans."""
    inside = [(max(a, start), min(b, stop)) for a, b in spans]
    return torch.cat([torch.arange(a, b) for a, b in inside if a < b])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The dropout factors of some rows of an adapter_group."""

    mask: Mask
    rows: Tensor

    def __call__(self, name: str, features: int, dtype: torch.dtype) -> Tensor:
        whole = self.mask(name, features, dtype)
        return whole[self.rows.to(whole.device)]
