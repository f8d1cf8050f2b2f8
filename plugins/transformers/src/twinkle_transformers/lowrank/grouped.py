"""Products of groups of consecutive rows, each group with its own matrix.

A kernel can replace each of the three functions:
`kernelize(model, {"twinkle_transformers.lowrank.grouped.grouped_product": "MyKernel"})`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of rows.

    If all groups have the same length, one batched product computes them all; on a CPU its results are bitwise those of
    each group alone. Otherwise CUDA has a kernel for groups in half precision; elsewhere each group is a product.

    Attributes:
        start: index of the first row of the first group.
        lengths: number of rows of each group, at least 1.
    """

    start: int
    lengths: tuple[int, ...]

    @cached_property
    def stop(self) -> int:
        """Index after the last row of the last group."""
        return self.start + sum(self.lengths)

    @cached_property
    def equal(self) -> bool:
        """Whether all groups have the same length."""
        return min(self.lengths) == max(self.lengths)

    def cut(self, rows: Tensor) -> Tensor:
        """Return the groups' rows `[L, k]` of `[T, k]`."""
        return rows[self.start : self.stop]

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """See `grouped_product`."""
        return grouped_product(self, rows, matrices)

    def add_products(self, target: Tensor, rows: Tensor, matrices: Tensor, scale: float = 1.0) -> None:
        """See `add_grouped_products`."""
        add_grouped_products(self, target, rows, matrices, scale)

    def add_outer(self, targets: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """See `add_grouped_outer`."""
        add_grouped_outer(self, targets, left, right, scale)

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the rows `[l, k]` of each group."""
        return torch.split_with_sizes(rows, self.lengths)

    def offsets(self, device: torch.device) -> Tensor:
        """Return the end of each group, int32 `[n]` on a device."""
        offsets = self._moved.get(device)
        if offsets is None:
            offsets = torch.tensor(self.lengths, device=device).cumsum(0).to(torch.int32)
            self._moved[device] = offsets
        return offsets

    @cached_property
    def _moved(self) -> dict[torch.device, Tensor]:
        return {}


def grouped_product(groups: Groups, rows: Tensor, matrices: Tensor) -> Tensor:
    """Return `[L, m]`, each group's rows `[l, k]` times its matrix.

    Args:
        groups: the groups of rows.
        rows: `[L, k]`.
        matrices: `[n, k, m]`.
    """
    if groups.equal:
        return torch.bmm(rows.view(len(groups.lengths), -1, rows.shape[1]), matrices).flatten(0, 1)
    if has_kernel(rows, matrices):
        return nn.functional.grouped_mm(rows, matrices, offs=groups.offsets(rows.device))
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for piece, target, matrix in zip(groups.split(rows), groups.split(out), matrices, strict=True):
        torch.mm(piece, matrix, out=target)
    return out


def add_grouped_products(groups: Groups, target: Tensor, rows: Tensor, matrices: Tensor, scale: float = 1.0) -> None:
    """Add `scale` times the result of `grouped_product` to `target` `[L, m]`, in place."""
    if groups.equal:
        target.view(len(groups.lengths), -1, target.shape[1]).baddbmm_(
            rows.view(len(groups.lengths), -1, rows.shape[1]), matrices, alpha=scale
        )
    elif has_kernel(rows, matrices):
        target.add_(grouped_product(groups, rows, matrices), alpha=scale)
    else:
        for out, piece, matrix in zip(groups.split(target), groups.split(rows), matrices, strict=True):
            out.addmm_(piece, matrix, alpha=scale)


def add_grouped_outer(groups: Groups, targets: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add `scale * left^T right` of each group to its target, in place.

    Args:
        groups: the groups of rows.
        targets: `[n, a, b]`, possibly of a wider dtype than the product.
        left: `[L, a]`.
        right: `[L, b]`.
        scale: factor.
    """
    same = targets.dtype == left.dtype
    if groups.equal:
        count = len(groups.lengths)
        a, b = left.view(count, -1, left.shape[1]).mT, right.view(count, -1, right.shape[1])
        if same:
            targets.baddbmm_(a, b, alpha=scale)
        else:
            targets.add_(torch.bmm(a, b), alpha=scale)
        return
    if has_kernel(left, right):
        # Rows of the groups are the inner dimension here; the result `[n, a, b]` has a matrix for each group.
        targets.add_(nn.functional.grouped_mm(left.t(), right, offs=groups.offsets(left.device)), alpha=scale)
        return
    for target, a, b in zip(targets, groups.split(left), groups.split(right), strict=True):
        if same:
            target.addmm_(a.t(), b, alpha=scale)
        else:
            target.add_(a.t() @ b, alpha=scale)


def has_kernel(*factors: Tensor) -> bool:
    """Return whether torch has a grouped kernel for these tensors: bfloat16 on CUDA, with aligned rows of 8, 16, ..."""
    return hasattr(nn.functional, "grouped_mm") and all(
        factor.is_cuda
        and factor.dtype == torch.bfloat16
        and factor.shape[-1] % 8 == 0
        and not any(s % 8 for s in factor.stride() if s != 1)
        for factor in factors
    )


def runs(values: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield the first and one past the last index of each run of equal values."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            yield start, index
            start = index
