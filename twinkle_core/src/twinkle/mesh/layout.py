"""The device mesh: a grid of ranks, and what follows from the position of a rank in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle._arguments import explains_calls
from twinkle.errors import MeshError
from twinkle.mesh.checks import known, mismatch, positive, product, ranges

if TYPE_CHECKING:
    import numpy as np


@dataclass(eq=False)
class DeviceMesh:
    """A grid of ranks with one named axis for each parallel dimension.

    A dimension that the mesh does not have counts as size 1. Expert dimensions (`ep`, `etp`, `ep_fsdp`) are not axes:
    they divide the ranks of one pipeline stage independently of the axes. `ulysses` is not an axis either:
    `ulysses_size` neighbouring data ranks share one part of the batch and split its sequences.

    Args:
        mesh: int array of distinct ranks, one axis a dimension.
        mesh_dim_names: the names of the axes, out of fsdp, pp, dp, cp, tp.
        ep_size: ranks over which experts are divided.
        etp_size: tensor parallelism inside an expert.
        ep_fsdp_size: ranks over which each expert's parameters are sharded.
        vpp_size: virtual pipeline stages on each rank.
        ulysses_size: ranks that share a sequence.
        sequence_parallel: whether tensor-parallel ranks also divide the sequence between layers (Megatron).
        device_type: `cuda`, `cpu`, ...; None means the device of this machine.

    Raises:
        MeshError: axes and names do not fit, or sizes do not divide; the message shows the arithmetic.
    """

    mesh: "np.ndarray[Any, Any]"
    mesh_dim_names: tuple[str, ...]
    ep_size: int | None = None
    etp_size: int | None = None
    ep_fsdp_size: int | None = None
    vpp_size: int | None = None
    ulysses_size: int | None = None
    sequence_parallel: bool = False
    device_type: str | None = None
    _groups: dict[tuple[str, ...], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        import numpy as np

        self.mesh = np.asarray(self.mesh)
        self.mesh_dim_names = tuple(self.mesh_dim_names)
        for name in self.mesh_dim_names:
            known(name)
        if self.mesh.ndim != len(self.mesh_dim_names) or len(set(self.mesh_dim_names)) != self.mesh.ndim:
            raise MeshError(
                f"the mesh has {self.mesh.ndim} axes (shape {self.mesh.shape}) but mesh_dim_names is "
                f"{self.mesh_dim_names}; give one distinct name for each axis"
            )
        if self.mesh.size == 0 or self.mesh.dtype.kind not in "iu" or len(np.unique(self.mesh)) != self.mesh.size:
            raise MeshError(f"a mesh holds distinct ranks as integers, at least one; found {self.mesh.tolist()}")
        if self.mesh.min() < 0:
            raise MeshError(f"ranks are from 0 on; the mesh holds {int(self.mesh.min())}")
        if self.device_type is not None:
            from twinkle.platform import Platform

            self.device_type = Platform.get(self.device_type).device_prefix()
        self._check_sizes()

    @staticmethod
    @explains_calls
    def from_sizes(
        *,
        world_size: int = 1,
        dp_size: int = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        ulysses_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int | None = 1,
        ep_fsdp_size: int | None = None,
        vpp_size: int | None = None,
        device_type: str | None = None,
        sequence_parallel: bool = False,
    ) -> "DeviceMesh":
        """Lay ranks 0, 1, 2, ... out in the order fsdp, pp, dp, cp, tp (tp varies fastest).

        Args:
            world_size: number of ranks; left at 1 it is the product of the sizes.
            dp_size: data-parallel size; the other sizes are absent dimensions where None.
            fsdp_size: ranks over which parameters are sharded; they take different data too.
            tp_size: tensor parallelism.
            pp_size: pipeline stages.
            ulysses_size: see the class; so are the sizes below.
            cp_size: ranks that share a context.
            ep_size: expert parallelism.
            etp_size: tensor parallelism inside an expert.
            ep_fsdp_size: sharding of each expert.
            vpp_size: virtual pipeline stages.
            device_type: torch's device type.
            sequence_parallel: divide the sequence between layers.

        Raises:
            MeshError: a size is not a positive number, or they do not multiply to `world_size`.
        """
        import numpy as np

        given = {"fsdp": fsdp_size, "pp": pp_size, "dp": dp_size, "cp": cp_size, "tp": tp_size}
        sizes = {name: positive(f"{name}_size", size) for name, size in given.items() if size is not None}
        positive("world_size", world_size)
        total = math.prod(sizes.values())
        if world_size not in (1, total):
            raise MeshError(mismatch(sizes, total, world_size))
        return DeviceMesh(
            mesh=np.arange(total).reshape(tuple(sizes.values())),
            mesh_dim_names=tuple(sizes),
            ep_size=ep_size,
            etp_size=etp_size,
            ep_fsdp_size=ep_fsdp_size,
            vpp_size=vpp_size,
            ulysses_size=ulysses_size,
            sequence_parallel=sequence_parallel,
            device_type=device_type,
        )

    # Sizes

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.mesh.size)

    @property
    def is_single_process(self) -> bool:
        """Whether there is only one rank."""
        return self.world_size == 1

    @property
    def order(self) -> str:
        """The order of dimensions in Megatron's names, inner to outer."""
        return "tp-cp-ep-dp-pp"

    def has_dim(self, dim_name: str) -> bool:
        """Return whether the mesh has this axis."""
        return known(dim_name) in self.mesh_dim_names

    def get_dim_size(self, dim_name: str) -> int:
        """Return the size of a dimension; 1 if the mesh does not have it."""
        return int(self.mesh.shape[self.mesh_dim_names.index(dim_name)]) if self.has_dim(dim_name) else 1

    @property
    def dp_world_size(self) -> int:
        """Size of dimension `dp`."""
        return self.get_dim_size("dp")

    @property
    def fsdp_world_size(self) -> int:
        """Size of dimension `fsdp`."""
        return self.get_dim_size("fsdp")

    @property
    def tp_world_size(self) -> int:
        """Size of dimension `tp`."""
        return self.get_dim_size("tp")

    @property
    def pp_world_size(self) -> int:
        """Size of dimension `pp`."""
        return self.get_dim_size("pp")

    @property
    def cp_world_size(self) -> int:
        """Size of dimension `cp`."""
        return self.get_dim_size("cp")

    @property
    def ep_world_size(self) -> int:
        """Ranks over which experts are divided."""
        return self.ep_size or 1

    @property
    def etp_world_size(self) -> int:
        """Tensor parallelism inside an expert."""
        return self.etp_size or 1

    @property
    def data_world_size(self) -> int:
        """Number of parts that a batch is divided into: dp · fsdp // ulysses."""
        return self.dp_world_size * self.fsdp_world_size // (self.ulysses_size or 1)

    # This process's place

    @property
    def dp_rank(self) -> int | None:
        """Index of this process along `dp`; None if the mesh does not have the dimension."""
        return self._index("dp") if self.has_dim("dp") else None

    @property
    def fsdp_rank(self) -> int | None:
        """Index of this process along `fsdp`; None if the mesh does not have the dimension."""
        return self._index("fsdp") if self.has_dim("fsdp") else None

    @property
    def tp_rank(self) -> int | None:
        """Index of this process along `tp`; None if the mesh does not have the dimension."""
        return self._index("tp") if self.has_dim("tp") else None

    @property
    def pp_rank(self) -> int | None:
        """Index of this process along `pp`: its pipeline stage; None if the mesh does not have the dimension."""
        return self._index("pp") if self.has_dim("pp") else None

    @property
    def cp_rank(self) -> int | None:
        """Index of this process along `cp`; None if the mesh does not have the dimension."""
        return self._index("cp") if self.has_dim("cp") else None

    @property
    def ep_rank(self) -> int | None:
        """Index of this process among the ranks that divide the experts; None without `ep_size`.

        `etp` varies faster than `ep`.
        """
        if self.ep_size is None:
            return None
        return self._place_in_stage() // self.etp_world_size % self.ep_world_size

    @property
    def data_rank(self) -> int:
        """Which part of a batch this process gets."""
        return self.get_data_rank_from_global_rank(_own_rank())

    def get_data_rank_from_global_rank(self, global_rank: int) -> int:
        """Return which part of a batch a rank gets: (dp_rank · fsdp_size + fsdp_rank) // ulysses."""
        position = self._index("dp", global_rank) * self.fsdp_world_size + self._index("fsdp", global_rank)
        return position // (self.ulysses_size or 1)

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """Return the part of `total_length` rows that data rank `rank` (by default this process's) gets.

        The parts follow each other and differ by at most one row; the first ranks get one more.
        """
        if total_length < 0:
            raise MeshError(f"total_length is {total_length}; it must not be negative")
        parts = self.data_world_size
        part = self.data_rank if rank is None else rank
        if not 0 <= part < parts:
            raise MeshError(f"data rank {part} is not among the {parts} data ranks (0 to {parts - 1}) of {self}")
        each, rest = divmod(total_length, parts)
        start = part * each + min(part, rest)
        return slice(start, start + each + (part < rest))

    # Sets of ranks

    def get_rank_groups(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Return all sets of ranks that differ in `dims` only; with no such axis in the mesh, each rank alone."""
        axes = [self.mesh_dim_names.index(name) for name in self._dims(dims)]
        rest = [axis for axis in range(self.mesh.ndim) if axis not in axes]
        size = math.prod(self.mesh.shape[axis] for axis in axes)
        groups: list[list[int]] = self.mesh.transpose([*rest, *axes]).reshape(-1, size).tolist()
        return groups

    def get_tp_ranks(self) -> list[int]:
        """Return the ranks that differ from this process in `tp` only."""
        own = _own_rank()
        self._coordinates(own)
        return next(group for group in self.get_rank_groups("tp") if own in group)

    def get_tp_last_ranks(self) -> list[int]:
        """Return the last rank of every tensor-parallel group, ascending."""
        return self._select("tp", -1)

    def is_tp_last_rank(self, rank: int | None = None) -> bool:
        """Return whether `rank` (by default this process) is the last of its tensor-parallel group."""
        return self._index("tp", rank) == self.tp_world_size - 1

    def get_pp_stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks of one pipeline stage, ascending."""
        if not 0 <= stage < self.pp_world_size:
            raise MeshError(f"pipeline stage {stage} does not exist; there are {self.pp_world_size}, counted from 0")
        return self._select("pp", stage)

    def get_pp_first_ranks(self) -> list[int]:
        """Return the ranks of the first pipeline stage."""
        return self._select("pp", 0)

    def get_pp_last_ranks(self) -> list[int]:
        """Return the ranks of the last pipeline stage."""
        return self._select("pp", -1)

    def is_pp_first_rank(self, rank: int | None = None) -> bool:
        """Return whether `rank` (by default this process) is in the first pipeline stage."""
        return self._index("pp", rank) == 0

    def is_pp_last_rank(self, rank: int | None = None) -> bool:
        """Return whether `rank` (by default this process) is in the last pipeline stage."""
        return self._index("pp", rank) == self.pp_world_size - 1

    def get_collect_ranks(self) -> list[int]:
        """Return one rank for each data rank, in order of data ranks: of the last stage, the first that has it."""
        chosen: dict[int, int] = {}
        for rank in self.get_pp_last_ranks():
            chosen.setdefault(self.get_data_rank_from_global_rank(rank), rank)
        return [chosen[part] for part in sorted(chosen)]

    # torch.distributed

    def to_torch_device_mesh(self) -> Any:
        """Return the `torch.distributed.device_mesh.DeviceMesh` of the same ranks and names.

        Raises:
            MeshError: `torch.distributed` is not initialised.
        """
        from twinkle.mesh.process_groups import torch_device_mesh

        return torch_device_mesh(self)

    def create_process_group(self, dims: str | Sequence[str]) -> Any:
        """Make the process groups along `dims` and return this process's; every process must call it, in one order.

        Raises:
            MeshError: a dimension is unknown, or `torch.distributed` is not initialised.
        """
        from twinkle.mesh.process_groups import new_group

        return new_group(self.get_rank_groups(dims), _own_rank())

    def get_dim_group(self, dims: str | Sequence[str]) -> Any:
        """Return this process's group along `dims`; the first call creates it."""
        names = self._dims(dims)
        if names not in self._groups:
            self._groups[names] = self.create_process_group(names)
        return self._groups[names]

    # Text and pickling

    def __str__(self) -> str:
        """Return the arithmetic: `fsdp 4 x dp 2 = 8`."""
        return product(dict(zip(self.mesh_dim_names, self.mesh.shape, strict=True)), self.world_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}  # process groups belong to one process

    def _key(self) -> tuple[Any, ...]:
        sizes = (self.ep_size, self.etp_size, self.ep_fsdp_size, self.vpp_size, self.ulysses_size)
        layout = (self.mesh.shape, tuple(self.mesh.ravel().tolist()), self.mesh_dim_names)
        return (*layout, *sizes, self.sequence_parallel, self.device_type)

    def _check_sizes(self) -> None:
        for name in ("ep_size", "etp_size", "ep_fsdp_size", "vpp_size", "ulysses_size"):
            if (size := getattr(self, name)) is not None:
                positive(name, size)
        replicas = self.dp_world_size * self.fsdp_world_size
        if replicas % (self.ulysses_size or 1):
            raise MeshError(
                f"ulysses_size {self.ulysses_size} does not divide the data ranks "
                f"(dp {self.dp_world_size} x fsdp {self.fsdp_world_size} = {replicas})"
            )
        stage = self.world_size // self.pp_world_size
        experts = {"ep": self.ep_world_size, "etp": self.etp_world_size, "ep_fsdp": self.ep_fsdp_size or 1}
        need = experts["ep"] * experts["etp"] * experts["ep_fsdp"]
        if stage % need:
            raise MeshError(f"{product(experts, need)} does not divide the {stage} ranks of a pipeline stage ({self})")

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        coordinates = (self.mesh == rank).nonzero()
        if len(coordinates[0]) == 0:
            raise MeshError(f"rank {rank} is not in the mesh {self} of ranks {ranges(self.mesh.ravel().tolist())}")
        return tuple(int(axis[0]) for axis in coordinates)

    def _index(self, dim: str, rank: int | None = None) -> int:
        place = self._coordinates(_own_rank() if rank is None else rank)
        return place[self.mesh_dim_names.index(dim)] if self.has_dim(dim) else 0

    def _place_in_stage(self) -> int:
        return self._select("pp", self._index("pp")).index(_own_rank())

    def _select(self, dim: str, index: int) -> list[int]:
        chosen = self.mesh.take(index, axis=self.mesh_dim_names.index(dim)) if self.has_dim(dim) else self.mesh
        return sorted(chosen.ravel().tolist())

    def _dims(self, dims: str | Sequence[str]) -> tuple[str, ...]:
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        wanted = {known(name) for name in names}
        return tuple(name for name in self.mesh_dim_names if name in wanted)


def _own_rank() -> int:
    from twinkle.platform import Platform

    return Platform.get_rank()
