"""Memory: what is free, what a forward keeps, and host buffers of millions of numbers."""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import ArgumentError

LIMIT = "TWINKLE_MEMORY_LIMIT"
"""Environment variable that limits the host memory that this process plans its passes for."""

_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BUFFER = 1 << 20
"""Size in bytes of buffers that are returned to the system when freed; see `give_back_at_once`."""
_M_MMAP_THRESHOLD = -3


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes available for tensors on `device`, including the allocator's cache; None if unknown."""
    if device.type == "cpu":
        return free_host_bytes()
    backend = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    free, _ = backend.mem_get_info(device)  # type: ignore[union-attr]
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)  # type: ignore[union-attr]
    return int(free + cached)


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory available to this process; None if unknown.

    The minimum of the kernel's `MemAvailable`, the limits of control groups of this process (for example of a
    container), and `TWINKLE_MEMORY_LIMIT` minus the process's resident memory.
    """
    limits = []
    if (available := _field(root / "proc/meminfo", "MemAvailable:")) is not None:
        limits.append(available * 1024)
    for mount, limit, used, cached in _CGROUPS:
        for folder in _groups(root, mount):
            bound, taken = _number(folder / limit), _number(folder / used)
            if bound is not None and taken is not None:
                limits.append(max(0, bound - taken + (_field(folder / "memory.stat", cached) or 0)))
    if (own := own_limit()) is not None:
        limits.append(max(0, own - (resident_bytes(root) or 0)))
    return min(limits, default=None)


def own_limit() -> int | None:
    """Return the bytes in `TWINKLE_MEMORY_LIMIT`; None if it is not set.

    Raises:
        ArgumentError: it is not a size.
    """
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text)
    if match is None or (match[3] and not match[2]):
        raise ArgumentError(f"{LIMIT} must be a size such as 4GB, 3.5GiB or 4000000000, got {text!r}")
    unit = _UNITS[match[2]] if not match[3] else 1024 ** (1 + "KMGT".index(match[2]))
    return int(float(match[1]) * unit)


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Return the resident memory of this process in bytes; None if unknown."""
    kilobytes = _field(root / "proc/self/status", "VmRSS:")
    return None if kilobytes is None else kilobytes * 1024


def give_back_host_memory() -> None:
    """Return memory that the C library (glibc) has cached to the system.

    torch's buffers on a CPU come from the C library, and its cache counts as used memory.
    """
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def give_back_at_once() -> None:
    """Make the C library (glibc) return freed buffers of 1 MiB and more to the system immediately.

    By default glibc keeps freed buffers of up to 32 MiB in a heap, whose fragmentation can make a process several times
    as large as its tensors, so that estimates of their size are useless. In return the first use of each buffer is
    slower, so this is done only when memory is short.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _BUFFER)
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
    except OSError:
        return None


def _groups(root: Path, mount: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process, from the outermost visible one."""
    base = root / mount
    yield base
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in kinds.split(",") if mount.endswith("memory") else number == "0":
            folder = base
            for name in Path(path.lstrip("/")).parts:
                folder /= name
                yield folder


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a forward saves for its backward: `fixed + per_token * tokens + per_pair * tokens * width`.

    Attributes:
        fixed: independent of the batch, such as weights in autocast's dtype.
        per_token: activations.
        per_pair: attention weights and masks; `width` is the length of the padded rows.
    """

    fixed: float
    per_token: float
    per_pair: float

    def of(self, tokens: int, width: int) -> int:
        """Return the bytes for `tokens` positions (padding included) in rows of `width`."""
        return int(self.fixed + tokens * (self.per_token + self.per_pair * width))


def measure(forward: Callable[[int], object], own: Iterable[Tensor], unit: int) -> Footprint:
    """Fit a footprint to three forwards of one row each.

    Args:
        forward: runs a row of a given number of tokens with gradients.
        own: parameters and buffers, which are not counted.
        unit: width of the first row; the others are two and three times as wide.
    """
    kept = {_plain(tensor).untyped_storage().data_ptr() for tensor in own}
    one, two, three = (saved_bytes(forward, unit * times, kept) for times in (1, 2, 3))
    per_pair = max(0.0, (three - 2 * two + one) / (2 * unit * unit))
    per_token = max(0.0, (three - one) / (2 * unit) - 4 * unit * per_pair)
    return Footprint(max(0.0, one - unit * (per_token + per_pair * unit)), per_token, per_pair)


def saved_bytes(forward: Callable[[int], object], tokens: int, kept: set[int]) -> int:
    """Return the bytes of the storages that `forward(tokens)` saves for its backward, those at `kept` excepted."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> None:
        storage = _plain(tensor).untyped_storage()
        if storage.data_ptr() not in kept:
            storages[storage.data_ptr()] = storage  # kept alive: a reused address would hide a storage

    def unpack(_: None) -> Tensor:
        raise RuntimeError("a forward that only measures has no backward")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        forward(tokens)
    return sum(storage.nbytes() for storage in storages.values())


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of this process's part of it."""
    part = _plain(tensor)
    return part.numel() * part.element_size()


def _plain(tensor: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split()) and words[0] == name), None)


_HUGE = 4 << 20
"""Size in bytes above which numpy uses huge pages; below, torch's allocator is equally fast."""


def host_empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return an uninitialized dense tensor in host memory.

    torch allocates small pages, whose first use costs several times as much as copying into them.
    """
    size = prod(shape) * dtype.itemsize
    if pinned or size < _HUGE:
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=pinned)
    raw = torch.from_numpy(np.empty(size, np.uint8))
    return raw.view(dtype).as_strided(shape, stride)


def host_zeros(count: int) -> Tensor:
    """Return float32 zeros `[count]` in host memory; pages are allocated at their first use."""
    return torch.from_numpy(np.zeros(count, np.float32))


def host_copy(tensor: Tensor, *, pinned: bool = False) -> Tensor:
    """Return a copy in host memory; strides of a dense tensor are kept.

    A copy from another device to pinned memory is asynchronous: synchronize the device before reading it.
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
    """Return a view `[n]` of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
