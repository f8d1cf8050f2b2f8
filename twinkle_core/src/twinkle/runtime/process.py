"""The local runtime: every component lives in this process, which may be one of several ranks under torchrun."""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle.errors import MeshError, SettingsError
from twinkle.logging import get_logger
from twinkle.mesh import DeviceGroup, DeviceMesh
from twinkle.platform import Platform
from twinkle.runtime.base import Runtime, RuntimeOptions
from twinkle.runtime.reporting import has_failed, report_errors

if TYPE_CHECKING:
    from datetime import timedelta


STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun's agent sets for each process that it starts."""


@functools.cache
def end_with_torchrun(interval: float = 1.0, patience: float = 600.0) -> None:
    """Watch torchrun's agent, if it is the parent of this process, and stop this process when the agent has died.

    The rank gets SIGTERM first, upon which a recipe saves a checkpoint, and SIGKILL later if it still runs. torchrun
    stops its ranks itself unless it is killed by SIGKILL.

    Args:
        interval: seconds between checks.
        patience: seconds from SIGTERM to SIGKILL.
    """
    if STARTED_BY_TORCHRUN in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(), interval, patience), daemon=True).start()


def _watch(parent: int, interval: float, patience: float) -> None:
    while os.getppid() == parent:
        time.sleep(interval)
    get_logger(__name__).error("torchrun (process %d), which started this rank, is gone; the rank stops too", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience)
    os.kill(os.getpid(), signal.SIGKILL)


MAX_RANKS = 64


def placement_text(runtime: str, mesh: DeviceMesh, groups: Sequence[DeviceGroup]) -> str:
    """Return the placement of this process, of every rank in the mesh, and of the device groups."""
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


TIMEOUT = "TWINKLE_DIST_TIMEOUT_SECONDS"
_LAST_TENSORS = 0.2
"""Seconds that threads of gloo have at the end of the process; they need microseconds if a core is free."""


class LocalRuntime(Runtime):
    """Builds and calls components in this process. Every process runs the same script, on its own part of the data.

    Under torchrun `initialize` joins the processes: on CUDA with NCCL for tensors on the device and gloo for those on
    the CPU, otherwise with gloo. `TWINKLE_DIST_TIMEOUT_SECONDS` limits how long they wait for each other. torchrun's
    summary shows an error that ends a rank. The process group is destroyed at the end of the process, unless the
    process ends with an error.
    """

    def __init__(self) -> None:
        self._owns_process_group = False
        self._stop_reporting: Callable[[], None] | None = None

    def initialize(self, options: RuntimeOptions) -> None:
        """Check the mesh against `WORLD_SIZE`, join the other processes if there are any, and seed generators.

        From then on torchrun's summary shows uncaught errors, and this process ends soon after torchrun if torchrun
        is killed.

        Raises:
            MeshError: the ranks of the mesh are not those of the processes.
            SettingsError: `TWINKLE_DIST_TIMEOUT_SECONDS` is not a number of seconds.
        """
        from twinkle.platform import seed_everything

        world_size = Platform.get_world_size()
        grouped = world_size > 1 or "RANK" in os.environ  # torchrun with one process: a group of one
        if grouped and self._stop_reporting is None:
            self._stop_reporting = report_errors()
        end_with_torchrun()
        mesh = options.global_device_mesh or DeviceMesh.from_sizes(dp_size=world_size)
        _check_ranks(mesh, world_size)
        if grouped:
            self._join()
        seed_everything(options.seed, options.full_determinism)
        self.mesh = mesh
        self.options = options

    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Return None: everything is built in this process."""

    def placement(self, groups: Sequence[DeviceGroup] = ()) -> str:
        """Return the place of each rank in the mesh, and the ranks of the groups."""
        mesh = self.mesh or DeviceMesh.from_sizes(dp_size=Platform.get_world_size())
        return placement_text("local", mesh, groups or self.options.groups)

    def shutdown(self) -> None:
        """Leave the process group, if this runtime joined it, and stop reporting errors to torchrun."""
        if self._stop_reporting is not None:
            self._stop_reporting()
            self._stop_reporting = None
        if not self._owns_process_group:
            return
        import atexit

        import torch.distributed as dist

        self._owns_process_group = False
        atexit.unregister(self._leave)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> None:
        import atexit

        import torch.distributed as dist

        if dist.is_initialized():
            return
        if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise MeshError(
                f"the environment says that several processes train together (WORLD_SIZE={Platform.get_world_size()}), "
                f"but {', '.join(missing)} is not set; start the script with torchrun, which sets all of it"
            )
        platform = Platform.get()
        platform.set_local_device()
        dist.init_process_group(_backend(platform), timeout=_timeout())
        self._owns_process_group = True
        atexit.register(self._leave)

    def _leave(self) -> None:
        """Leave the process group at the end of the process: gloo aborts a process that ends while its threads work.

        After an error the group is kept: leaving would wait for pending operations, while the other ranks wait for us.
        """
        if not has_failed():
            self.shutdown()
            # Models keep groups alive, and a thread of a group may still have to release the tensors of the last
            # message. It needs the interpreter for that; if the interpreter is gone, it aborts the process (SIGABRT).
            time.sleep(_LAST_TENSORS)


def _backend(platform: type[Platform]) -> str:
    """Return the backend of `torch.distributed` for tensors on the device, and that for tensors on the CPU."""
    own = platform.device_backend()
    return own if own == "gloo" else f"cpu:gloo,{platform.device_prefix()}:{own}"


def _timeout() -> "timedelta | None":
    """Return how long ranks wait for each other, or None for torch's default."""
    from datetime import timedelta

    text = os.environ.get(TIMEOUT, "").strip()
    if not text:
        return None
    try:
        timeout = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        timeout = timedelta(0)
    if timeout <= timedelta(0):
        raise SettingsError(f"{TIMEOUT} is {text!r}; give the seconds that ranks wait for each other, such as 1800")
    return timeout


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
