"""The ranks that train one model: exchanges between them, and detection of ranks that make different calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle.errors import MeshError, RankError, Unsupported
from twinkle.mesh import DeviceMesh
from twinkle.platform import Platform

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = 160
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The data ranks of a model; with one rank, every method is a plain call.

    Each exchange begins with the name of the call that makes it. Ranks that are at different calls get a `RankError`
    that names the call of each rank, instead of waiting forever or mixing up their numbers.

    Attributes:
        size: number of ranks.
        index: this one, from 0, in the order of `control`.
        group: process group of tensors on the model's device; None where there is one process.
        control: process group of tensors on the CPU; likewise.
    """

    size: int = 1
    index: int = 0
    group: Any = None
    control: Any = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Ranks":
        """Return the ranks of a mesh whose dimensions are `dp` and `fsdp`; collective.

        Raises:
            MeshError: several processes run without a mesh, or the mesh does not contain this process.
            Unsupported: the mesh has other dimensions.
        """
        import torch.distributed as dist

        world = Platform.get_world_size()
        if mesh is not None and dist.is_initialized() and dist.get_rank() not in mesh.mesh:
            raise MeshError(
                f"this is rank {dist.get_rank()}, and the mesh {mesh} has ranks {mesh.mesh.ravel().tolist()}: build "
                "the model on those alone, or give a mesh of all ranks"
            )
        if mesh is None or mesh.world_size == 1:
            if mesh is None and world > 1:
                raise MeshError(
                    f"{world} processes run, but they do not know of each other; call twinkle.initialize(mode='local') "
                    "first, or give device_mesh="
                )
            if world == 1 or not dist.is_initialized():
                return cls()
            own = group_of([dist.get_rank()])  # a loss or metric would take None for the world
            return cls(1, 0, own, own)
        for name in ("tp", "pp", "cp"):
            if mesh.get_dim_size(name) > 1:
                raise Unsupported(f"the mesh {mesh} has {name}_size > 1; this backend divides by dp and fsdp alone")
        for name in ("ulysses_size", "ep_size"):
            if (getattr(mesh, name) or 1) > 1:
                raise Unsupported(f"the mesh has {name}={getattr(mesh, name)}; this backend divides by dp and fsdp")
        if not dist.is_initialized() or mesh.world_size > world:
            processes = "1 process takes" if world == 1 else f"{world} processes take"
            raise MeshError(
                f"the mesh {mesh} has {mesh.world_size} ranks, but {processes} part: start with "
                f"torchrun --nproc_per_node={mesh.world_size} and call twinkle.initialize(mode='local') first"
            )
        whole = mesh.world_size == world
        group = dist.group.WORLD if whole else group_of(mesh.mesh.ravel().tolist())
        control = group
        if "cpu:gloo" not in dist.get_backend_config(group):  # the script created its process group for GPUs only
            control = group_of(mesh.mesh.ravel().tolist(), backend="gloo")
        return cls(mesh.data_world_size, dist.get_rank(control), group, control)

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes shared files."""
        return self.index == 0

    def agree(self, what: str, *numbers: float) -> "Tensor":
        """Exchange the name of a call, and some numbers, with all ranks.

        Args:
            what: description of the call; its first 160 bytes are compared.
            numbers: any numbers; the same count on every rank.

        Returns:
            float64 `[size, len(numbers)]`: the numbers of all ranks.

        Raises:
            RankError: a rank is at another call, or has left.
        """
        import torch
        import torch.distributed as dist

        own = torch.tensor(numbers, dtype=torch.float64)
        if self.alone:
            return own[None]
        text = what.encode()[:_TEXT].ljust(_TEXT, b"\0")
        sent = torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), own.view(torch.uint8)])
        # The length is the same for every call, so that ranks at different calls can still read each other's message.
        sent = torch.nn.functional.pad(sent, (0, _TEXT + 64 - sent.numel()))
        rows = [torch.empty_like(sent) for _ in range(self.size)]
        self._exchange(what, lambda: dist.all_gather(rows, sent, group=self.control))
        received = torch.stack(rows)
        texts = [bytes(row[:_TEXT].tolist()).rstrip(b"\0").decode(errors="replace") for row in received]
        if len(set(texts)) > 1:
            raise RankError(_apart(texts))
        return received[:, _TEXT : _TEXT + 8 * len(numbers)].contiguous().view(torch.float64)

    def gather(self, what: str, value: T) -> list[T]:
        """Return the value of every rank, in order; values must pickle."""
        if self.alone:
            return [value]
        import torch.distributed as dist

        self.agree(what)
        values: list[Any] = [None] * self.size
        self._exchange(what, lambda: dist.all_gather_object(values, value, group=self.control))
        return values

    def on_first(self, what: str, function: Callable[[], T]) -> T:
        """Run `function` on the first rank and return its result on all; if it raises there, all ranks raise."""
        if self.alone:
            return function()
        result: Any = None
        error: BaseException | None = None
        if self.is_first:
            try:
                result = function()
            except Exception as caught:
                error = caught
        results = self.gather(what, (result, error and _told(error)))
        if error is not None:
            raise error
        result, problem = results[0]
        if problem:
            raise RankError(f"{what} failed on rank 0: {problem}")
        return result  # type: ignore[no-any-return]

    def together(self, what: str, function: Callable[[], T]) -> T:
        """Run `function` on every rank; if it raises on one rank, all ranks raise before they go on."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except Exception as caught:
            error = caught
        problems = [] if self.alone else self.gather(what, error and _told(error))
        if error is not None:
            raise error
        for index, problem in enumerate(problems):
            if problem:
                raise RankError(f"{what} failed on rank {index}: {problem}")
        return result  # type: ignore[no-any-return]

    def _exchange(self, what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise RankError(
                f"{what}: another rank has left or failed ({_short(error)}). If it failed, its own message says why; "
                "if not, the ranks made unequal numbers of calls, for example of steps"
            ) from error


def group_of(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Create a process group by a call of its members only; other ranks need not take part.

    Args:
        ranks: the members, in any order; in the group they are in ascending order.
        backend: by default the world's.
    """
    import torch.distributed as dist

    return dist.new_group(sorted(ranks), backend=backend, use_local_synchronization=True)


def _short(error: Exception) -> str:
    """Return a backend's error message without the source location and the advice in it."""
    return str(error).partition("] ")[2].partition(". This is")[0] or str(error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _apart(texts: Sequence[str]) -> str:
    places = ", ".join(f"rank {index} at {text!r}" for index, text in enumerate(texts))
    return f"the ranks are not at the same call: {places}; every rank must make the same calls in the same order"
