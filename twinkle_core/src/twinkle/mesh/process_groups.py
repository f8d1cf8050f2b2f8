"""The parts of a mesh that need `torch.distributed`: process groups, and torch's own mesh."""

from typing import TYPE_CHECKING, Any

from twinkle.errors import MeshError

if TYPE_CHECKING:
    from twinkle.mesh.layout import DeviceMesh


def torch_device_mesh(mesh: "DeviceMesh") -> Any:
    """Return the `torch.distributed.device_mesh.DeviceMesh` of the same ranks and names."""
    _require_initialized("to_torch_device_mesh()")
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

    from twinkle.platform import Platform

    device = mesh.device_type or Platform.device_prefix()
    return TorchDeviceMesh(device, mesh.mesh.tolist(), mesh_dim_names=mesh.mesh_dim_names)


def new_group(groups: list[list[int]], rank: int) -> Any:
    """Create a process group for each set of ranks, and return the one that contains `rank`."""
    _require_initialized("create_process_group()")
    import torch.distributed as dist

    own = None
    for ranks in groups:
        # Collective: every process must take part in creating every group, also groups that it is not in.
        group = dist.new_group(ranks=ranks)
        own = group if rank in ranks else own
    return own


def _require_initialized(what: str) -> None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            f"{what} needs torch.distributed, which is not initialised; start with torchrun and call "
            "twinkle.initialize(mode='local', global_device_mesh=mesh) first"
        )
