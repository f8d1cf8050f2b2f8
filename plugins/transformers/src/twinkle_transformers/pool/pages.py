"""The tensors of a paged adapter: in host memory, or in a file that is removed with the page."""

import os
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from twinkle.errors import CheckpointError, OutputError
from twinkle_transformers.memory import dense_stride, host_copy, host_empty, in_memory_order
from twinkle_transformers.pool.tenants import Tenant

BLANK = torch.full((), torch.nan)
"""Placeholder of paged weights: NaN, so that using them by mistake shows in every result."""


@dataclass(slots=True, eq=False)
class _Place:
    """Origin of a tensor: the functions that `put` it back, its device and its strides."""

    tensor: Tensor
    put: list[Callable[[Tensor | None], None]]
    device: torch.device = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        tensor = self.tensor
        self.device, self.shape, self.dtype = tensor.device, tuple(tensor.shape), tensor.dtype
        self.stride = dense_stride(tensor)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def places(tenant: Tenant) -> dict[str, _Place]:
    """Return an adapter's tensors by name: weights, pending gradient, and tensors in the state of its optimizer."""
    tensors: dict[str, _Place] = {"weights": _Place(tenant.flat.detach(), [partial(_put_weights, tenant)])}
    if tenant.flat.grad is not None:
        tensors["gradient"] = _Place(tenant.flat.grad, [partial(_put_gradient, tenant)])
    seen: dict[int, _Place] = {}
    for name, held, key in _state_of(tenant):
        tensor = held[key]
        if id(tensor) in seen:
            seen[id(tensor)].put.append(partial(_put_item, held, key))
        else:
            tensors[name] = seen[id(tensor)] = _Place(tensor, [partial(_put_item, held, key)])
    return tensors


def bytes_in(tenant: Tenant, optimizer: int | None = None) -> int:
    """Return the bytes of an adapter that is not paged, including buffers for its next gradients and for samplers.

    Args:
        tenant: the adapter.
        optimizer: bytes of the state of its optimizer, if known.
    """
    optimizer = bytes_of_optimizer(tenant) if optimizer is None else optimizer
    tensors = [tenant.flat, tenant.flat.grad, None if tenant.latest is None else tenant.latest[1].flat]
    if tenant.spare is not None and tenant.flat.grad is None:
        tensors.append(tenant.spare)
    return sum(t.numel() * t.element_size() for t in tensors if t is not None) + optimizer


def bytes_of_optimizer(tenant: Tenant) -> int:
    """Return the bytes of the tensors that an adapter's optimizer keeps."""
    tensors = {id(held[key]): held[key] for _, held, key in _state_of(tenant)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def erase(tenant: Tenant) -> None:
    """Overwrite the tensors of an adapter that is not paged with zeros, before their memory is reused by others."""
    with torch.no_grad():
        for tensor in (*(place.tensor for place in places(tenant).values()), tenant.spare):
            if tensor is not None:
                tensor.zero_()


class Page:
    """Holds the tensors of a paged adapter.

    Attributes:
        bytes: size of all tensors.
        file: the file that holds them; None is host memory.
    """

    def __init__(self, tenant: Tenant, folder: Path | None = None) -> None:
        """Move an adapter's tensors to host memory, or to a file in `folder`; an error leaves the adapter unchanged.

        Raises:
            OutputError: the file cannot be written.
        """
        self._tenant = tenant
        self.file: Path | None = None
        self._gone: Callable[[], object] = _nothing
        self._places = places(tenant)
        self.bytes = sum(place.bytes for place in self._places.values())
        device = tenant.flat.device
        copies = {name: host_copy(p.tensor, pinned=_is_cuda(p.device)) for name, p in self._places.items()}
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
        self._host: dict[str, Tensor] = copies
        if folder is not None:
            self.write(folder)
        for place in self._places.values():
            place.tensor = BLANK
            for put in place.put:
                put(None)
        tenant.spare, tenant.latest = None, None

    def write(self, folder: Path) -> None:
        """Move the tensors from host memory to a new file, which is written atomically, but not synced to disk.

        Raises:
            OutputError: the file cannot be written; the tensors are not moved.
        """
        held = self._host if self.file is None else self._read()
        path = (
            folder / f"adapter-{uuid.uuid4().hex}.safetensors"
        )  # names of adapters may differ only by case, which some file systems ignore
        work = path.with_suffix(".tmp")
        try:
            save_file({name: in_memory_order(tensor) for name, tensor in held.items()}, work)
            work.replace(path)
        except Exception as error:  # safetensors raises a type of its own
            work.unlink(missing_ok=True)
            raise OutputError(
                f"adapter {self._tenant.name!r} ({self.bytes:,} bytes) cannot be paged to {folder}: {error}; it is "
                "not moved"
            ) from error
        if self.file is not None:
            self._gone()
        self.file, self._host = path, {}
        self._gone = weakref.finalize(self, _unlink, path, os.getpid())

    def load(self) -> None:
        """Move the tensors from the file to host memory."""
        if self.file is not None:
            self._host = self._read(pinned=_is_cuda(self._places["weights"].device))
            self.drop()

    def back(self) -> None:
        """Move the tensors back to the device; an error leaves the page unchanged."""
        held = self._host if self.file is None else self._read()
        moved = {name: held[name].to(place.device, non_blocking=True) for name, place in self._places.items()}
        for name, place in self._places.items():
            for put in place.put:
                put(moved[name])
        self._tenant.moved()
        self.drop()
        self._host = {}

    def erase(self) -> None:
        """Overwrite the tensors in host memory with zeros, and remove the file."""
        for tensor in self._host.values():
            tensor.zero_()
        self.drop()

    def drop(self) -> None:
        """Remove the file."""
        if self.file is not None:
            self._gone()
            self.file = None

    def _read(self, *, pinned: bool = False) -> dict[str, Tensor]:
        """Return the tensors of the file with their original strides."""
        tensors = {}
        try:
            with safe_open(self.file, framework="pt") as file:
                for name, place in self._places.items():
                    tensor = host_empty(place.shape, place.stride, place.dtype, pinned=pinned)
                    in_memory_order(tensor).copy_(file.get_tensor(name))
                    tensors[name] = tensor
        except Exception as error:  # safetensors raises a type of its own
            raise CheckpointError(
                f"adapter {self._tenant.name!r} was paged to {self.file}, which cannot be read: {error}; put the file "
                "back, or remove the adapter and add it again from a checkpoint"
            ) from error
        return tensors


def _state_of(tenant: Tenant) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, holder and key of each dense tensor in the state of an adapter's optimizer."""
    optimizer = tenant.group.optimizer
    for number, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
        yield from _inside(f"optimizer/{number}", state)


def _inside(path: str, held: Any) -> Iterator[tuple[str, Any, Any]]:
    items = held.items() if isinstance(held, dict) else enumerate(held)
    for key, value in items:
        where = f"{path}/{key}"
        if isinstance(value, Tensor) and value.layout == torch.strided and not isinstance(value, torch.nn.Parameter):
            yield where, held, key
        elif isinstance(value, dict | list):
            yield from _inside(where, value)


def _put_weights(tenant: Tenant, tensor: Tensor | None) -> None:
    if tensor is not None:
        tenant.flat.data = tensor
        return
    tenant.flat.data = BLANK.expand(tenant.flat.shape)
    for view in tenant.matrices.values():
        view.grad = None
        view.data = BLANK.expand(view.shape)


def _put_gradient(tenant: Tenant, tensor: Tensor | None) -> None:
    tenant.flat.grad = tensor


def _put_item(held: Any, key: Any, tensor: Tensor | None) -> None:
    held[key] = tensor


def _nothing() -> None:
    """Do nothing: there is no file to remove."""


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _unlink(path: Path, process: int) -> None:
    if os.getpid() == process:  # finalizers run in forked children too
        path.unlink(missing_ok=True)
