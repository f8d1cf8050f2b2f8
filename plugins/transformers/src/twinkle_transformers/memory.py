"""How much memory a pass may still take, and how much of it a forward keeps for its backward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_CGROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors on `device` may still take, the allocator's cache included; None if unknown."""
    if device.type == "cpu":
        return free_host_bytes()
    backend = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    free, _ = backend.mem_get_info(device)  # type: ignore[union-attr]
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)  # type: ignore[union-attr]
    return int(free + cached)


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return what the kernel calls available, or less where a container's limit is nearer; None if it says neither."""
    found = []
    if (available := _field(root / "proc/meminfo", "MemAvailable:")) is not None:
        found.append(available * 1024)
    for limit, used, stat, cache in _CGROUPS:
        if (bound := _number(root / limit)) is None:
            continue
        if (taken := _number(root / used)) is not None:
            found.append(max(0, bound - taken + (_field(root / stat, cache) or 0)))
    return min(found, default=None)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a forward keeps for its backward: `fixed + per_token * tokens + per_pair * tokens * width`.

    Attributes:
        fixed: whatever the batch, such as weights in autocast's dtype.
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
        forward: runs a row of so many tokens with gradients.
        own: parameters and buffers, which are there anyway.
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
            storages[storage.data_ptr()] = storage  # held: an address that is used again would hide what it held

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
    """Return the part of a distributed tensor that is here."""
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
