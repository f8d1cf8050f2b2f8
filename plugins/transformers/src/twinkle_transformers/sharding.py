"""Tensors that lie in shards on several ranks (torch's `DTensor`) beside those that are whole on each."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; changes to it are changes to the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on this rank; collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        full: Tensor = tensor.full_tensor()
    return full


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor`, whole on every rank, on the device and in the shards of `other`, which has its shape."""
    if not isinstance(other, DTensor):
        return tensor.to(other.device)
    device = local(other).device
    return distribute_tensor(tensor.to(device), other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def copy_into(target: Tensor, tensor: Tensor) -> None:
    """Copy `tensor`, whole on every rank, into `target`."""
    local(target).copy_(local(placed_like(tensor, target)))
