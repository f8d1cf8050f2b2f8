"""Products of pieces of rows, each with the matrix that one adapter has for one expert."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from twinkle_transformers.lowrank.grouped import has_kernel

_MOST_GROUPS = 1023
"""Groups that one call of the grouped product takes on CUDA."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of the pairs (token, expert) of a pass, each of one expert and one operation of a cohort.

    Where all tensors allow it the products are grouped products; elsewhere each piece is a product.

    Attributes:
        experts: the expert of each piece.
        operations: the operation of each piece, counted within its cohort.
        starts: where each begins among the pairs.
        lengths: pairs of each, at least 1.
        total: pairs of the pass.
        device: of the rows.
    """

    experts: tuple[int, ...]
    operations: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    total: int
    device: torch.device

    @cached_property
    def pairs(self) -> int:
        """L: pairs of all pieces."""
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

    def spread(self, target: Tensor, inner: Tensor, matrices: Tensor, scale: float = 1.0) -> None:
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
        """Places of the pieces' rows `[L]` among all; None where the pieces are all."""
        if self.pairs == self.total:
            return None
        starts, lengths = torch.tensor(self.starts), torch.tensor(self.lengths)
        before = lengths.cumsum(0) - lengths
        return (torch.arange(self.pairs) + torch.repeat_interleave(starts - before, lengths)).to(self.device)

    def _take(self, rows: Tensor) -> Tensor:
        return rows if self._places is None else rows.index_select(0, self._places)

    @cached_property
    def _calls(self) -> list[tuple[slice, slice, Tensor]]:
        """Pieces, rows and where the pieces' rows end, for each call of the kernel."""
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
