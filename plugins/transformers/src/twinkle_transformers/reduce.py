"""Sums of many tensors over ranks, in few messages."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 16 << 20
"""Above 32 MiB the host's allocator asks the kernel for fresh pages each time, which takes longer than the message."""


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor], group: Any = None, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace each tensor by its sum over the ranks of `group`.

    Tensors of one dtype are copied into flat buffers of at most `bucket_bytes` (one tensor may be larger), so that
    hundreds of small gradients cost one message; while one buffer travels the next is filled.

    Args:
        tensors: contiguous or not, on one device; the same shapes and dtypes in the same order on every rank.
        group: process group; None is the world.
        bucket_bytes: size of a buffer.
    """
    waiting: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    for bucket in _buckets(tensors, bucket_bytes):
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
        waiting.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
        if len(waiting) > 1:  # all buffers at once would be a second copy of a model's gradients
            _take_back(*waiting.popleft())
    while waiting:
        _take_back(*waiting.popleft())


def _take_back(work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
    """Wait for a buffer and copy it to where it came from."""
    work.wait()
    parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterable[list[Tensor]]:
    order = sorted(tensors, key=lambda tensor: str(tensor.dtype))  # stable: the same order on every rank
    for _, same in groupby(order, key=lambda tensor: tensor.dtype):
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket
