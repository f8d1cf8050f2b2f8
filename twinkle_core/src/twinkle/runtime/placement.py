"""The table that `twinkle.get_device_placement()` prints."""

from collections.abc import Sequence

from twinkle.mesh import DeviceGroup, DeviceMesh
from twinkle.platform import Platform

MAX_RANKS = 64


def placement_text(runtime: str, mesh: DeviceMesh, groups: Sequence[DeviceGroup]) -> str:
    """Return who is where: this process, the mesh with every rank's place, and the device groups."""
    rank, world = Platform.get_rank(), Platform.get_world_size()
    lines = [f"runtime {runtime}: rank {rank} of {world} on {Platform.get_local_device()}", f"mesh {mesh}"]
    lines += _mesh_table(mesh)
    lines += [f"group {group.name}: {_members(group)} on {group.device_type}" for group in groups]
    return "\n".join(lines)


def _mesh_table(mesh: DeviceMesh) -> list[str]:
    names = ("rank", *mesh.mesh_dim_names, "data")
    widths = [max(len(name), 4) for name in names]
    rows: list[Sequence[object]] = [names]
    for place in _places(mesh.mesh.shape)[:MAX_RANKS]:
        rank = int(mesh.mesh[place])
        rows.append((rank, *place, mesh.get_data_rank_from_global_rank(rank)))
    table = ["  " + "  ".join(f"{cell!s:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if mesh.world_size > MAX_RANKS:
        table.append(f"  ... and {mesh.world_size - MAX_RANKS} more ranks")
    return table


def _places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    from itertools import product

    return list(product(*(range(size) for size in shape)))


def _members(group: DeviceGroup) -> str:
    if isinstance(group.ranks, int):
        return f"{group.ranks} rank{'s' if group.ranks > 1 else ''}"
    return "ranks " + ", ".join(str(rank) for rank in group.ranks)
