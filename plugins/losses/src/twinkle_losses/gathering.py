"""The rows of all data ranks in one tensor, with exact gradients."""

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor


def ranks_of(process_group: Any) -> int:
    """Return the number of ranks of a group; None is the world, which without torch.distributed is this process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return int(dist.get_world_size(process_group))


def gather_rows(rows: "Tensor", process_group: Any = None) -> tuple["Tensor", int]:
    """Concatenate the rows of all ranks, in rank order; collective.

    Each rank must use the result in its own share of one loss. The gradient of a rank's rows is then the sum over all
    ranks of the gradients of their shares: what one process with all rows would compute.

    Args:
        rows: `[n, H]`; n may differ from rank to rank.
        process_group: None is the world.

    Returns:
        `[sum n, H]` with graph, and the index at which this rank's rows begin.
    """
    if ranks_of(process_group) == 1:
        return rows, 0
    import torch.distributed as dist

    own = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.zeros_like(own) for _ in range(ranks_of(process_group))]
    dist.all_gather(counts, own, group=process_group)
    sizes = [int(count) for count in counts]
    start = sum(sizes[: dist.get_rank(process_group)])
    return _GatherRows.apply(rows, sizes, start, process_group), start  # type: ignore[no-untyped-call]


class _GatherRows(torch.autograd.Function):
    """All rows forward; backward, the sum over ranks of the gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: "Tensor", sizes: list[int], start: int, group: Any) -> "Tensor":
        import torch.distributed as dist

        ctx.own, ctx.group = slice(start, start + len(rows)), group
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: "Tensor") -> tuple["Tensor | None", ...]:
        import torch.distributed as dist

        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.own], None, None, None
