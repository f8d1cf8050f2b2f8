"""Memory of the host for buffers of millions of numbers: in huge pages, or pinned where a device reads it."""

from math import prod

import numpy as np
import torch
from torch import Tensor

_HUGE = 4 << 20
"""Bytes from which numpy asks for huge pages; below, torch's own allocator is as good."""


def host_empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return a dense tensor of any content in host memory.

    torch's own memory comes in small pages, whose first touch costs several times what copying into them costs.
    """
    size = prod(shape) * dtype.itemsize
    if pinned or size < _HUGE:
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=pinned)
    raw = torch.from_numpy(np.empty(size, np.uint8))
    return raw.view(dtype).as_strided(shape, stride)


def host_zeros(count: int) -> Tensor:
    """Return float32 zeros `[count]` in host memory that costs nothing before it is touched."""
    return torch.from_numpy(np.zeros(count, np.float32))


def host_copy(tensor: Tensor, *, pinned: bool = False) -> Tensor:
    """Return a copy in host memory, which a dense tensor's strides survive.

    From another device to pinned memory it is only queued: wait for the device before it is read.
    """
    tensor = tensor.detach()
    copy = host_empty(tuple(tensor.shape), dense_stride(tensor), tensor.dtype, pinned=pinned)
    return copy.copy_(tensor, non_blocking=pinned)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps: the tensor's own if it has none."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's numbers as they lie in memory, `[n]`, not copied."""
    return tensor.as_strided((tensor.numel(),), (1,))
