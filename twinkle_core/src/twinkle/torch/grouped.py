"""Products of rows that lie group by group, each group with a matrix of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Groups:
    """Groups of rows that lie one after the other.

    Where all have the same length one batched product does them all; its numbers are, bit for bit on a CPU, those of
    each group alone. Otherwise CUDA has a kernel for groups in half precision, and elsewhere each group is a product.

    Attributes:
        start: where the first begins.
        lengths: rows of each, at least 1.
    """

    start: int
    lengths: tuple[int, ...]

    @cached_property
    def stop(self) -> int:
        """Where the last ends."""
        return self.start + sum(self.lengths)

    @cached_property
    def equal(self) -> bool:
        """Whether all have the same length."""
        return min(self.lengths) == max(self.lengths)

    def cut(self, rows: Tensor) -> Tensor:
        """Return the groups' rows `[L, k]` of `[T, k]`."""
        return rows[self.start : self.stop]

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return `[L, m]`, each group's rows `[l, k]` times its matrix.

        Args:
            rows: `[L, k]`.
            matrices: `[n, k, m]`.
        """
        if self.equal:
            return torch.bmm(rows.view(len(self.lengths), -1, rows.shape[1]), matrices).flatten(0, 1)
        if self._has_kernel(rows, matrices):
            return nn.functional.grouped_mm(rows, matrices, offs=self._offsets(rows.device))
        out = rows.new_empty(rows.shape[0], matrices.shape[2])
        for piece, target, matrix in zip(self._split(rows), self._split(out), matrices, strict=True):
            torch.mm(piece, matrix, out=target)
        return out

    def add_products(self, target: Tensor, rows: Tensor, matrices: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times what `multiply` returns to `target` `[L, m]`, in place."""
        if self.equal:
            target.view(len(self.lengths), -1, target.shape[1]).baddbmm_(
                rows.view(len(self.lengths), -1, rows.shape[1]), matrices, alpha=scale
            )
        elif self._has_kernel(rows, matrices):
            target.add_(self.multiply(rows, matrices), alpha=scale)
        else:
            for out, piece, matrix in zip(self._split(target), self._split(rows), matrices, strict=True):
                out.addmm_(piece, matrix, alpha=scale)

    def add_outer(self, targets: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """Add `scale * left^T right` of each group to its target, in place.

        Args:
            targets: `[n, a, b]`, perhaps of a wider dtype than the product.
            left: `[L, a]`.
            right: `[L, b]`.
            scale: factor.
        """
        same = targets.dtype == left.dtype
        if self.equal:
            count = len(self.lengths)
            a, b = left.view(count, -1, left.shape[1]).mT, right.view(count, -1, right.shape[1])
            if same:
                targets.baddbmm_(a, b, alpha=scale)
            else:
                targets.add_(torch.bmm(a, b), alpha=scale)
            return
        if self._has_kernel(left, right):
            targets.add_(nn.functional.grouped_mm(left.t(), right, offs=self._offsets(left.device)), alpha=scale)
            return
        for target, a, b in zip(targets, self._split(left), self._split(right), strict=True):
            if same:
                target.addmm_(a.t(), b, alpha=scale)
            else:
                target.add_(a.t() @ b, alpha=scale)

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        return torch.split_with_sizes(rows, self.lengths)

    def _has_kernel(self, *factors: Tensor) -> bool:
        return all(
            factor.is_cuda and factor.dtype == torch.bfloat16 and not any(s % 8 for s in factor.stride() if s != 1)
            for factor in factors
        )

    def _offsets(self, device: torch.device) -> Tensor:
        found = self._moved.get(device)
        if found is None:
            found = torch.tensor(self.lengths, device=device).cumsum(0).to(torch.int32)
            self._moved[device] = found
        return found

    @cached_property
    def _moved(self) -> dict[torch.device, Tensor]:
        return {}


def runs(values: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield the first and one past the last index of each run of equal values."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            yield start, index
            start = index
