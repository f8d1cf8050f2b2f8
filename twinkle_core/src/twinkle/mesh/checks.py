"""Checks of the sizes of a mesh, and the arithmetic in their errors."""

from collections.abc import Iterable, Mapping
from typing import Any

from twinkle.errors import MeshError

DIMENSIONS = ("fsdp", "pp", "dp", "cp", "tp")
"""The dimensions of a mesh, outer to inner: ranks that differ in `tp` only are neighbours."""


def known(name: str) -> str:
    """Return `name` if it is a dimension."""
    if name not in DIMENSIONS:
        from twinkle_registry import nearest

        close = nearest(str(name), DIMENSIONS, 1)
        hint = f"; nearest: {close[0]!r}" if close else ""
        raise MeshError(f"a mesh has no dimension {name!r}{hint}; the dimensions are {', '.join(DIMENSIONS)}")
    return name


def positive(name: str, size: Any) -> int:
    """Return `size` if it is a whole number from 1 on."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MeshError(f"{name} is {size!r}; it must be a whole number from 1 on")
    return size


def product(sizes: Mapping[str, int], total: int) -> str:
    """Return `fsdp 4 x dp 2 = 8`."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {total}"


def mismatch(sizes: Mapping[str, int], total: int, world_size: int) -> str:
    """Return a message that says why the sizes do not fit `world_size`, and which sizes would."""
    others = total // sizes["dp"]
    fix = "leave world_size out to have it computed"
    if world_size % others == 0:
        fix = f"set dp_size={world_size // others}, or {fix}"
    return f"{product(sizes, total)}, but world_size is {world_size}: {fix}"


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as `0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
