"""Places adapters on the device, in host memory or on disk; those idle longest are paged out first."""

import os
import shutil
import tempfile
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock, local
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from twinkle.engine import AdapterBytes
from twinkle.errors import ArgumentError, CapacityError, CheckpointError, OutputError, TrainingStateError
from twinkle.logging import get_logger
from twinkle_transformers.memory import (
    dense_stride,
    free_bytes,
    free_host_bytes,
    host_copy,
    host_empty,
    in_memory_order,
)
from twinkle_transformers.pool.tenants import Tenant

BLANK = torch.full((), torch.nan)
"""Placeholder of paged weights: NaN, so that using them by mistake shows in every result."""
DEVICE_SHARE, HOST_SHARE = 0.4, 0.25
"""Default limits of adapters, as shares of the memory that is free when the pool is created."""


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


class Paging:
    """Moves idle adapters off the device and back.

    The cost of using an adapter does not depend on the number of adapters. Adapters that a call uses stay on the device
    until the call ends (`together`); outside of a call, only the adapter used last is safe.

    Args:
        device: device of the model.
        adapter_memory: maximum number of bytes of adapters on the device; by default 40 % of the free memory. Trained
            adapters reserve memory for gradients and, under an optimizer with betas, for two moments.
        host_memory: maximum number of bytes of paged adapters in host memory, beyond which they go to disk; by default
            25 % of the free memory.

    Raises:
        ArgumentError: a limit is not a number of bytes.
    """

    def __init__(self, device: torch.device, adapter_memory: int | None = None, host_memory: int | None = None) -> None:
        for name, value in (("adapter_memory", adapter_memory), ("host_memory", host_memory)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ArgumentError(
                    f"{name} must be a number of bytes (an integer of at least 0) or None, got {value!r}"
                )
        self.limit = _default(free_bytes(device), DEVICE_SHARE) if adapter_memory is None else adapter_memory
        self.host_limit = _default(free_host_bytes(), HOST_SHARE) if host_memory is None else host_memory
        self._here: OrderedDict[Tenant, int] = OrderedDict()
        self._host: OrderedDict[Tenant, Page] = OrderedDict()
        self._disk: dict[Tenant, Page] = {}
        self._unborn: dict[Tenant, Callable[[], Tensor]] = {}
        self._optimizers: dict[Tenant, tuple[tuple[int, int], int]] = {}
        self._used = self._host_used = 0
        self._held: dict[Tenant, int] = {}
        self._thread = _Calls()
        self._folder: Path | None = None
        self._lock = RLock()  # a sampler may take versions during a training call

    @property
    def used(self) -> int:
        """Bytes that adapters take on the device."""
        return self._used

    @contextmanager
    def together(self) -> Iterator[None]:
        """Keep adapters that are used inside the context on the device until it ends."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1
            if not self._thread.depth:
                with self._lock:
                    self._end()

    def make_room(self, name: str, size: int) -> None:
        """Page out idle adapters until the device has room for `size` more bytes.

        Raises:
            CapacityError: adapters in use leave less room.
        """
        if self.limit is None or self._used + size <= self.limit:
            return
        held = sum(self._here[tenant] for tenant in self._held if tenant in self._here)
        if held + size > self.limit:
            raise CapacityError(
                f"adapter {name!r} needs {size:,} bytes on the device, where adapters may take {self.limit:,} "
                f"(adapter_memory){self._holders(held)}; use fewer at once, or raise adapter_memory"
            )
        if not self._evict(self.limit - size):
            raise CapacityError(
                f"adapter {name!r} needs {size:,} bytes on the device; adapters take {self._used:,} of {self.limit:,} "
                "(adapter_memory), and the idle ones cannot be paged out: see the log"
            )

    def take(self, tenant: Tenant, draw: Callable[[], Tensor]) -> None:
        """Register a new adapter; it takes no memory until its first use, when `draw` creates its weights.

        Raises:
            CapacityError: it is larger than the limit.
        """
        size = tenant.flat.numel() * tenant.flat.element_size()
        if self.limit is not None and size > self.limit:
            self.make_room(tenant.name, size)
        with self._lock:
            self._unborn[tenant] = draw

    def use(self, tenant: Tenant, *, trained: bool = False) -> None:
        """Move an adapter to the device if it is elsewhere, and record its use.

        Args:
            tenant: the adapter.
            trained: also reserve memory for its gradients and moments.

        Raises:
            CapacityError: the device has no room for it.
            CheckpointError: its file was changed or removed.
        """
        with self._lock:
            self._use(tenant, trained)

    def _use(self, tenant: Tenant, trained: bool) -> None:
        if tenant in self._unborn:
            self.make_room(tenant.name, tenant.flat.numel() * tenant.flat.element_size())
            tenant.flat.data = self._unborn[tenant]()
            del self._unborn[tenant]
            self._here[tenant] = 0
        elif (page := self._page_of(tenant)) is not None:
            self.make_room(tenant.name, page.bytes)
            page.back()
            self._forget_page(tenant)
            self._here[tenant] = 0
        elif tenant not in self._here:
            raise TrainingStateError(f"the adapter {tenant.name!r} was removed")
        if self._thread.depth and tenant not in self._thread.held:
            self._thread.held.append(tenant)
            self._hold(tenant)
        self._count(tenant)
        if trained and (size := _still_to_come(tenant)):
            self._protect(tenant, size)
            self._here[tenant] += size
            self._used += size
        elif self.limit is not None and self._used > self.limit:
            self._evict(self.limit, tenant)

    def page(self, tenant: Tenant, to: Literal["device", "host", "disk"], folder: Path | None = None) -> None:
        """Move an adapter; see `Engine.page`.

        Raises:
            ArgumentError: `to` is unknown, or `folder` is given without "disk".
            TrainingStateError: a running call uses the adapter.
            CapacityError: the device has no room for it.
            OutputError: the file cannot be written; the adapter is not moved.
        """
        if to not in ("device", "host", "disk"):
            raise ArgumentError(f"page: to must be 'device', 'host' or 'disk', got {to!r}")
        if folder is not None and to != "disk":
            raise ArgumentError(f"page: folder= requires to='disk', got {to!r}")
        if to == "device":
            self.use(tenant)
        elif tenant not in self._unborn:
            with self._lock:
                self._page(tenant, to, folder)

    def _page(self, tenant: Tenant, to: str, folder: Path | None) -> None:
        if tenant in self._held:
            raise TrainingStateError(f"cannot page adapter {tenant.name!r}: a call uses it; page it after that call")
        if to == "disk" and (folder is not None or tenant not in self._disk):
            self._to_disk(tenant, self._own_folder() if folder is None else _made(Path(folder)))
        elif to == "host" and tenant in self._disk:
            page = self._disk[tenant]
            page.load()
            del self._disk[tenant]
            self._host[tenant] = page
            self._host_used += page.bytes
        elif to == "host" and tenant in self._here:
            self._to_host(tenant)
        self._spill()

    def forget(self, tenant: Tenant) -> None:
        """Free an adapter's memory and remove its file, even if other objects still refer to the adapter."""
        with self._lock:
            self._forget(tenant)

    def _forget(self, tenant: Tenant) -> None:
        if (page := self._page_of(tenant)) is not None:
            page.erase()
            self._forget_page(tenant)
        elif tenant in self._here:
            erase(tenant)
        self._unborn.pop(tenant, None)
        self._used -= self._here.pop(tenant, 0)
        self._optimizers.pop(tenant, None)
        self._held.pop(tenant, None)
        tenant.group.drop_passes()
        if tenant.group.optimizer is not None:
            tenant.group.optimizer.state.clear()
        tenant.flat.grad = tenant.spare = tenant.latest = None
        tenant.flat.data = tenant.flat.data.new_empty(0)
        for view in tenant.matrices.values():
            view.grad = None
            view.data = view.data.new_empty(0)

    def bytes_of(self, tenant: Tenant) -> AdapterBytes:
        """Return how much memory an adapter takes, and where."""
        if tenant in self._host:
            return AdapterBytes(host=self._host[tenant].bytes)
        if tenant in self._disk:
            return AdapterBytes(disk=self._disk[tenant].bytes)
        if tenant in self._unborn:
            return AdapterBytes()
        return AdapterBytes(device=bytes_in(tenant))

    def _end(self) -> None:
        """Update the sizes of adapters that finished calls have used, and page out what exceeds the limit."""
        for tenant in self._thread.held:
            self._release(tenant)
            if tenant in self._here:
                self._count(tenant)
        self._thread.held.clear()
        self._evict(self.limit)

    def _hold(self, tenant: Tenant) -> None:
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def _release(self, tenant: Tenant) -> None:
        if (left := self._held.pop(tenant, 1) - 1) > 0:
            self._held[tenant] = left

    def _page_of(self, tenant: Tenant) -> Page | None:
        return self._host.get(tenant) or self._disk.get(tenant)

    def _forget_page(self, tenant: Tenant) -> None:
        if (page := self._host.pop(tenant, None)) is not None:
            self._host_used -= page.bytes
        self._disk.pop(tenant, None)

    def _count(self, tenant: Tenant) -> None:
        """Update the size of an adapter, and mark it as used last."""
        optimizer = tenant.group.optimizer
        key = (id(optimizer), 0 if optimizer is None else len(optimizer.state))
        known = self._optimizers.get(tenant)
        if known is None or known[0] != key:
            known = self._optimizers[tenant] = key, bytes_of_optimizer(tenant)
        size = bytes_in(tenant, known[1])
        self._used += size - self._here[tenant]
        self._here[tenant] = size
        self._here.move_to_end(tenant)

    def _protect(self, tenant: Tenant, size: int) -> None:
        """Make room without paging out the adapter itself."""
        self._hold(tenant)
        try:
            self.make_room(tenant.name, size)
        finally:
            self._release(tenant)

    def _evict(self, most: int | None, keep: Tenant | None = None) -> bool:
        """Page out the adapters idle longest until all take at most `most` bytes; return whether that was reached."""
        if most is None or self._used <= most:
            return True
        victims, left = [], self._used - most
        for tenant, size in self._here.items():
            if tenant not in self._held and tenant is not keep:
                victims.append(tenant)
                left -= size
                if left <= 0:
                    break
        try:
            for tenant in victims:
                self._to_host(tenant)
            self._spill()
        except (OutputError, MemoryError, RuntimeError) as error:
            get_logger().warning("idle adapters cannot be paged out: %s", error)
        return self._used <= most

    def _to_host(self, tenant: Tenant) -> None:
        if self.host_limit is not None and self._here[tenant] > self.host_limit:
            self._to_disk(tenant, self._own_folder())
            return
        page = Page(tenant)
        self._used -= self._here.pop(tenant)
        self._host[tenant] = page
        self._host_used += page.bytes

    def _to_disk(self, tenant: Tenant, folder: Path) -> None:
        page = self._page_of(tenant)
        if page is None:
            page = Page(tenant, folder)
            self._used -= self._here.pop(tenant)
        elif page.file is None or page.file.parent != folder:
            page.write(folder)
        self._forget_page(tenant)
        self._disk[tenant] = page

    def _spill(self) -> None:
        """Write the adapters that are longest in host memory to disk, until the rest is within the limit."""
        while self.host_limit is not None and self._host_used > self.host_limit:
            self._to_disk(next(iter(self._host)), self._own_folder())

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="twinkle-adapters-"))
            weakref.finalize(self, _remove, self._folder, os.getpid())
        return self._folder

    def _holders(self, held: int) -> str:
        if not held:
            return ""
        most = sorted((t for t in self._held if t in self._here), key=self._here.__getitem__, reverse=True)
        names = ", ".join(f"{tenant.name!r} {self._here[tenant]:,}" for tenant in most[:4])
        more = f" and {len(most) - 4} more" if len(most) > 4 else ""
        return f"; adapters in use hold {held:,} of it: {names}{more}"


class _Calls(local):
    """The adapters that calls of one thread are using."""

    def __init__(self) -> None:
        self.depth = 0
        self.held: list[Tenant] = []


def _still_to_come(tenant: Tenant) -> int:
    """Return the bytes of gradients and moments that training will allocate."""
    optimizer = tenant.group.optimizer
    copies = int(tenant.flat.grad is None and tenant.spare is None)
    if optimizer is not None and not optimizer.state and "betas" in optimizer.defaults:
        copies += 2
    return copies * tenant.flat.numel() * tenant.flat.element_size()


def _default(free: int | None, share: float) -> int | None:
    return None if free is None else int(share * free)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"page: cannot create {folder}: {error.strerror or error}") from error
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # finalizers run in forked children too
        shutil.rmtree(folder, ignore_errors=True)
