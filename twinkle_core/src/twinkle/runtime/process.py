"""The local runtime: everything lives in this process, alone or as one rank of several under torchrun."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import MeshError
from twinkle.mesh import DeviceGroup, DeviceMesh
from twinkle.platform import Platform
from twinkle.runtime.base import Runtime, RuntimeOptions
from twinkle.runtime.placement import placement_text


class LocalRuntime(Runtime):
    """Builds and calls components here. Every process runs the same script, on its own part of the data."""

    def __init__(self) -> None:
        self._owns_process_group = False

    def initialize(self, options: RuntimeOptions) -> None:
        """Check the mesh against `WORLD_SIZE`, join the other processes if there are any, and seed.

        Raises:
            MeshError: the mesh has other ranks than there are processes.
        """
        from twinkle.runtime.seeding import seed_everything

        world_size = Platform.get_world_size()
        mesh = options.global_device_mesh or DeviceMesh.from_sizes(dp_size=world_size)
        _check_ranks(mesh, world_size)
        if world_size > 1 or "RANK" in os.environ:  # torchrun with one process is a group, of one
            self._join()
        seed_everything(options.seed, options.full_determinism)
        self.mesh = mesh
        self.options = options

    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Return None: everything is built here."""

    def placement(self, groups: Sequence[DeviceGroup] = ()) -> str:
        """Return which rank sits where in the mesh, and which ranks the groups have."""
        mesh = self.mesh or DeviceMesh.from_sizes(dp_size=Platform.get_world_size())
        return placement_text("local", mesh, groups or self.options.groups)

    def shutdown(self) -> None:
        """Leave the process group, if this runtime joined it."""
        if not self._owns_process_group:
            return
        import torch.distributed as dist

        self._owns_process_group = False
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            return
        platform = Platform.get()
        platform.set_local_device()
        dist.init_process_group(platform.device_backend())
        self._owns_process_group = True


def _check_ranks(mesh: DeviceMesh, world_size: int) -> None:
    if sorted(mesh.mesh.ravel().tolist()) == list(range(world_size)):
        return
    if mesh.world_size == world_size:
        raise MeshError(
            f"the global mesh holds the ranks {mesh.mesh.ravel().tolist()}; "
            f"it must hold each of 0 to {world_size - 1} once"
        )
    start = f"torchrun --nproc_per_node={mesh.world_size} SCRIPT" if mesh.world_size > 1 else "python SCRIPT"
    processes = "1 process runs" if world_size == 1 else f"{world_size} processes run"
    raise MeshError(
        f"the global mesh has {mesh} ranks, but {processes} (WORLD_SIZE={world_size}): start the script with "
        f"`{start}`, or give a mesh whose sizes multiply to {world_size}"
    )
