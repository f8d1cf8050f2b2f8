"""Pairs of tokens and experts, sorted by expert and adapter, and products of their rows with one matrix each."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle_transformers.lowrank.grouped import has_kernel
from twinkle_transformers.lowrank.products import AdapterGroup, Routing

_MOST_GROUPS = 1023
"""Maximum number of groups of one grouped product on CUDA."""


@dataclass(frozen=True)
class ExpertPieces:
    """Slices of the pairs (token, expert) of a pass, each of one expert and one operation of an adapter group.

    All pairs of a piece are multiplied with the same low-rank matrix: that of its operation for its expert. If the
    device has a kernel for grouped products, all pieces are one call; else each piece is a product.

    Attributes:
        experts: the expert of each piece.
        operations: index of each piece's operation in the adapter group.
        starts: index of the first pair of each piece.
        lengths: number of pairs of each piece, at least 1.
        total: number of pairs of the pass.
        device: device of the rows.
    """

    experts: tuple[int, ...]
    operations: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    total: int
    device: torch.device

    @cached_property
    def pairs(self) -> int:
        """L: number of pairs of all pieces."""
        return sum(self.lengths)

    def collect(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return `[L, r]`: the rows of each piece times its matrix, transposed.

        Args:
            rows: `[pairs of the pass, m]`.
            matrices: `[operations, experts, r, m]`.
        """
        if has_kernel(rows, matrices.mT):
            return self._grouped(self._take(rows), self._gather(matrices).mT)
        out = rows.new_empty(self.pairs, matrices.shape[2])
        for target, piece, matrix in zip(self._split(out), self._cut(rows), self._each(matrices.mT), strict=True):
            torch.mm(piece, matrix, out=target)
        return out

    def add_products(self, target: Tensor, inner: Tensor, matrices: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times the rows `inner` `[L, r]` of each piece times its matrix to its rows of `target`, in place.

        Args:
            target: `[pairs of the pass, m]`.
            inner: `[L, r]`.
            matrices: `[operations, experts, r, m]`.
            scale: factor.
        """
        if has_kernel(inner, matrices):
            added = self._grouped(inner, self._gather(matrices))
            if self._places is None:
                target.add_(added, alpha=scale)
            else:
                target.index_add_(0, self._places, added, alpha=scale)
            return
        for out, piece, matrix in zip(self._cut(target), self._split(inner), self._each(matrices), strict=True):
            out.addmm_(piece, matrix, alpha=scale)

    def outer(self, targets: Tensor, inner: Tensor, rows: Tensor, scale: float = 1.0) -> None:
        """Add `scale * inner^T rows` of each piece to its target, in place.

        Args:
            targets: `[operations, experts, r, m]`, perhaps of a wider dtype than the product.
            inner: `[L, r]`.
            rows: `[pairs of the pass, m]`.
            scale: factor.
        """
        if has_kernel(inner, rows):
            products = self._grouped_outer(inner, self._take(rows)).to(targets.dtype).mul_(scale)
            targets.index_put_(self._index, products, accumulate=True)
            return
        same = targets.dtype == inner.dtype
        for target, a, b in zip(self._each(targets), self._split(inner), self._cut(rows), strict=True):
            if same:
                target.addmm_(a.t(), b, alpha=scale)
            else:
                target.add_(a.t() @ b, alpha=scale)

    def _cut(self, rows: Tensor) -> Iterator[Tensor]:
        return (rows.narrow(0, start, length) for start, length in zip(self.starts, self.lengths, strict=True))

    def _split(self, inner: Tensor) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(inner, self.lengths)

    def _each(self, matrices: Tensor) -> Iterator[Tensor]:
        by_operation, by_expert, *inner = matrices.stride()
        base = matrices.storage_offset()
        for expert, operation in zip(self.experts, self.operations, strict=True):
            at = base + operation * by_operation + expert * by_expert
            yield matrices.as_strided(matrices.shape[2:], inner, at)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.operations, device=self.device), torch.tensor(self.experts, device=self.device)

    def _gather(self, matrices: Tensor) -> Tensor:
        """Return the matrix of each piece, `[pieces, r, m]`."""
        return matrices[self._index]

    @cached_property
    def _places(self) -> Tensor | None:
        """Indices `[L]` of the pieces' rows among all rows; None if the pieces cover all."""
        if self.pairs == self.total:
            return None
        starts, lengths = torch.tensor(self.starts), torch.tensor(self.lengths)
        before = lengths.cumsum(0) - lengths
        return (torch.arange(self.pairs) + torch.repeat_interleave(starts - before, lengths)).to(self.device)

    def _take(self, rows: Tensor) -> Tensor:
        return rows if self._places is None else rows.index_select(0, self._places)

    @cached_property
    def _calls(self) -> list[tuple[slice, slice, Tensor]]:
        """Slice of pieces, slice of rows, and ends of the pieces' rows, for each call of the kernel."""
        calls, row = [], 0
        for first in range(0, len(self.lengths), _MOST_GROUPS):
            lengths = self.lengths[first : first + _MOST_GROUPS]
            ends = torch.tensor(lengths, device=self.device).cumsum(0).to(torch.int32)
            calls.append((slice(first, first + len(lengths)), slice(row, row := row + sum(lengths)), ends))
        return calls

    def _grouped(self, inner: Tensor, matrices: Tensor) -> Tensor:
        done = [
            nn.functional.grouped_mm(inner[rows], matrices[pieces], offs=ends) for pieces, rows, ends in self._calls
        ]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _grouped_outer(self, left: Tensor, right: Tensor) -> Tensor:
        done = [nn.functional.grouped_mm(left[rows].t(), right[rows], offs=ends) for _, rows, ends in self._calls]
        return done[0] if len(done) == 1 else torch.cat(done)


class Dispatch:
    """The pairs (token, expert) of a layer in one pass, sorted by expert and then by the token's index in the stream.

    So the pairs of an expert are a slice, those of one operation a slice of it, and those of trained rows (the first of
    the stream) its beginning: all products are products of slices, without gathering rows again. On a GPU, creating one
    synchronizes the device once a layer, because the sizes of the slices depend on the tokens.

    Args:
        chosen: integer `[T, k]`, the experts of each token.
        experts: number of experts.
        routing: routing of the pass; T must be its total.

    Attributes:
        width: k.
        order: `[T k]`, index of each pair in the order of `chosen`.
        tokens: `[T k]`, token of each pair.

    Raises:
        Unsupported: the pass has another number of tokens, or an expert index is out of range.
    """

    def __init__(self, chosen: Tensor, experts: int, routing: Routing) -> None:
        if chosen.ndim != 2 or len(chosen) != routing.total:
            raise Unsupported(
                f"a layer of experts sees tokens {list(chosen.shape[:-1])} of a pass of {routing.total}; adapters on "
                "such a layer are not supported"
            )
        self.width = chosen.shape[1]
        self._experts, self._total, self._trained = experts, routing.total, routing.trained
        flat = chosen.reshape(-1)
        self.order = torch.argsort(flat, stable=True)
        self.tokens = self.order // self.width
        self._edges = _edges(routing)
        self._bounds = self._count(flat)
        self._pieces: dict[int, ExpertPieces] = {}

    @cached_property
    def slices(self) -> list[tuple[int, int, int]]:
        """Expert, first pair and number of pairs, of each expert with pairs."""
        return self._slices(self._total)

    @cached_property
    def trained(self) -> list[tuple[int, int, int]]:
        """The same for the pairs of trained rows."""
        return self._slices(self._trained)

    @cached_property
    def ends(self) -> Tensor:
        """int32 `[experts]`, ends of the pairs of each expert."""
        return self._ends(self.slices)

    @cached_property
    def trained_ends(self) -> Tensor:
        """int32 `[experts]`, ends of the pairs of each expert, counting only pairs of trained rows."""
        return self._ends(self.trained)

    @cached_property
    def trained_places(self) -> Tensor | None:
        """Indices of the pairs of trained rows; None if all rows are trained."""
        if self._trained == self._total:
            return None
        return (self.tokens < self._trained).nonzero()[:, 0]

    @cached_property
    def experts_of_pairs(self) -> Tensor:
        """`[T k]`, the expert of each pair."""
        experts, _, lengths = (torch.tensor(column) for column in zip(*self.slices, strict=True))
        return torch.repeat_interleave(experts, lengths).to(self.order.device)

    def pieces(self, adapter_group: AdapterGroup) -> ExpertPieces:
        """Return the pieces of an adapter group: one for each of its operations and each expert that it uses."""
        pieces = self._pieces.get(id(adapter_group))
        if pieces is None:
            pieces = self._pieces[id(adapter_group)] = self._cut(adapter_group)
        return pieces

    def sum(self, pairs: Tensor) -> Tensor:
        """Return `[T, m]`, the sum over each token's experts of `[T k, m]`, added in the order of `chosen`."""
        inverse = self._inverse
        return pairs.index_select(0, inverse).view(self._total, self.width, -1).sum(1)

    @cached_property
    def _inverse(self) -> Tensor:
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return inverse

    def _count(self, flat: Tensor) -> Tensor:
        """Return `[experts, edges]` on the CPU: for each expert, the end of its pairs with tokens before each edge."""
        spans = len(self._edges) - 1
        edges = torch.tensor(self._edges[1:-1], dtype=torch.long, device=flat.device)
        span = torch.bucketize(torch.arange(self._total, device=flat.device), edges, right=True)
        keys = flat * spans + span.repeat_interleave(self.width)
        counts = torch.bincount(keys, minlength=self._experts * spans).cpu()
        if len(counts) > self._experts * spans:
            raise Unsupported(f"tokens are routed to expert {(len(counts) - 1) // spans} of {self._experts}")
        ends = counts.cumsum(0).view(self._experts, spans)
        starts = torch.cat([ends.new_zeros(1), ends[:-1, -1]])
        return torch.cat([starts[:, None], ends], 1)

    def _slices(self, past: int) -> list[tuple[int, int, int]]:
        starts = self._bounds[:, 0].tolist()
        stops = self._bounds[:, self._edges.index(past)].tolist()
        both = enumerate(zip(starts, stops, strict=True))
        return [(expert, start, stop - start) for expert, (start, stop) in both if stop > start]

    def _ends(self, slices: list[tuple[int, int, int]]) -> Tensor:
        lengths = [0] * self._experts
        for expert, _, length in slices:
            lengths[expert] = length
        return torch.tensor(list(accumulate(lengths)), dtype=torch.int32, device=self.order.device)

    def _cut(self, adapter_group: AdapterGroup) -> ExpertPieces:
        borders = [self._edges.index(edge) for edge in _borders(adapter_group)]
        bounds = self._bounds[:, borders]
        lengths = bounds.diff(dim=1)
        experts, operations = lengths.nonzero(as_tuple=True)
        return ExpertPieces(
            tuple(experts.tolist()),
            tuple(operations.tolist()),
            tuple(bounds[experts, operations].tolist()),
            tuple(lengths[experts, operations].tolist()),
            len(self.order),
            self.order.device,
        )


def _borders(adapter_group: AdapterGroup) -> list[int]:
    return list(accumulate(adapter_group.groups.lengths, initial=adapter_group.groups.start))


def _edges(routing: Routing) -> list[int]:
    """Return the ascending boundaries in the stream of operations and of trained rows."""
    edges = {0, routing.trained, routing.total}
    for adapter_group in routing.adapter_groups:
        edges.update(_borders(adapter_group))
    return sorted(edges)
