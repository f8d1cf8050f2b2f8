"""Device groups: named sets of devices that components are placed on."""

from dataclasses import dataclass

from twinkle.errors import MeshError
from twinkle.mesh.checks import positive


@dataclass
class DeviceGroup:
    """A named set of devices that components are placed on.

    Args:
        name: name of the group, as `remote_group=` gives it.
        ranks: the ranks of the group, or their number (the runtime then assigns the next free ranks).
        device_type: GPU, CUDA (the same), NPU, CPU or MPS, in any case; stored in capitals, CUDA as GPU.
        gpus_per_worker: devices that one worker process sees.
        visible_devices: indices of the machine's devices that the group may use; None means all.

    Raises:
        MeshError: ranks repeat or are negative, or the device type is unknown.
    """

    name: str
    ranks: list[int] | int
    device_type: str
    gpus_per_worker: int = 1
    visible_devices: str | list[int] | None = None

    def __post_init__(self) -> None:
        from twinkle.platform import Platform

        self.device_type = Platform.get(self.device_type).__name__
        if isinstance(self.ranks, int):
            positive(f"device group {self.name!r}: ranks", self.ranks)
        else:
            self.ranks = list(self.ranks)
            if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
                raise MeshError(
                    f"device group {self.name!r}: ranks {self.ranks} must be distinct, from 0 on, at least one"
                )
        positive(f"device group {self.name!r}: gpus_per_worker", self.gpus_per_worker)
        if self.world_size % self.gpus_per_worker:
            raise MeshError(
                f"device group {self.name!r}: {self.world_size} ranks do not divide into workers of "
                f"gpus_per_worker={self.gpus_per_worker}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)
