"""How a model's parameters are distributed over data ranks: whole on each (DDP), or in shards (FSDP2)."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle.logging import get_logger
from twinkle.mesh import DeviceMesh
from twinkle.mesh.ranks import Ranks, group_of
from twinkle.platform import Platform
from twinkle_registry import nearest
from twinkle_transformers.backbone import Backbone

BUCKET_BYTES = 16 << 20
"""Size of a buffer. Above 32 MiB the C library allocates fresh pages each time, which takes longer than the message."""


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor], group: Any = None, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace each tensor by its sum over the ranks of `group`.

    Tensors of one dtype are copied to flat buffers of at most `bucket_bytes` (one tensor may be larger), so that
    hundreds of small gradients need one message; a buffer is filled while the one before it is sent.

    Args:
        tensors: contiguous or not, on one device; the same shapes and dtypes in the same order on every rank.
        group: process group; None is the world.
        bucket_bytes: maximum size of a buffer.
    """
    waiting: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    for bucket in _buckets(tensors, bucket_bytes):
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
        waiting.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
        if len(waiting) > 1:  # all buffers at once would be a second copy of a model's gradients
            _take_back(*waiting.popleft())
    while waiting:
        _take_back(*waiting.popleft())


def _take_back(work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
    """Wait for a buffer and copy it back to its tensors."""
    work.wait()
    parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterable[list[Tensor]]:
    order = sorted(tensors, key=lambda tensor: str(tensor.dtype))  # stable: the same order on every rank
    for _, same in groupby(order, key=lambda tensor: tensor.dtype):
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it shares memory with the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on this rank; collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        full: Tensor = tensor.full_tensor()
    return full


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor`, which every rank has whole, with the device and sharding of `other` of the same shape."""
    if not isinstance(other, DTensor):
        return tensor.to(other.device)
    device = local(other).device
    return distribute_tensor(tensor.to(device), other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def copy_into(target: Tensor, tensor: Tensor) -> None:
    """Copy `tensor`, which every rank has whole, into `target`."""
    local(target).copy_(local(placed_like(tensor, target)))


_RUN = "twinkle_run"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DDP = {"bucket_cap_mb": BUCKET_BYTES >> 20}
# Options of torch's wrapper that a sum at the step does not need.
_DDP_WITHOUT_EFFECT = ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph")
_FSDP = {
    "reshard_after_forward": True,
    "cpu_offload": False,
    "reduce_dtype": "float32",
    "transformer_cls_names_to_wrap": None,
}
T = TypeVar("T")


class Replicated:
    """Every rank holds the whole model. Gradients are summed over ranks once, at the step.

    Attributes:
        ranks: the data ranks.
        in_lockstep: whether every rank must make the same number of passes.
    """

    in_lockstep = False

    def __init__(self, ranks: Ranks, options: Mapping[str, Any] | None = None) -> None:
        self.ranks = ranks
        self.options = _checked("ddp_config", options, {**_DDP, **dict.fromkeys(_DDP_WITHOUT_EFFECT)})

    def place(self, model: Any, blocks: Sequence[str], dtype: torch.dtype | None) -> None:
        """Broadcast the trainable weights of the first rank.

        Args:
            model: the causal language model.
            blocks: class names of its layers.
            dtype: dtype in which sharded parameters are gathered; None is their own.
        """
        if not self.ranks.alone:
            self.ranks.agree("sending the first rank's weights")
            with torch.no_grad():
                _broadcast((p for p in model.parameters() if p.requires_grad), self.ranks)

    def run(self, model: Any, call: Callable[[], T]) -> T:
        """Run a pass that uses the parameters of `model`."""
        return call()

    def settle(self) -> None:
        """Restore the distribution of parameters between passes, before they are read or changed."""

    def any_rank(self, wish: bool) -> bool:
        """Return whether `wish` is true on any rank."""
        return bool(self.ranks.agree("recomputation", wish).any())

    def idle_passes(self, call: str, passes: int) -> int:
        """Return how many passes without rows this rank must add so that ranks in lockstep make equally many.

        Args:
            call: name of the method; ranks in lockstep that are at different calls raise an error.
            passes: number of passes with rows.
        """
        return 0

    def all_usable(self, usable: bool) -> bool:
        """Return whether a pass is counted; ranks in lockstep count a pass only if all of them can."""
        return usable

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over ranks; a missing gradient on some rank counts as zero."""
        if self.ranks.alone:
            return
        own = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.ranks.control)
        for parameter, somewhere in zip(parameters, own.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        sum_over_ranks(grads, self.ranks.group, int(self.options["bucket_cap_mb"]) << 20)

    def summed_gradients(self, names: Mapping[str, nn.Parameter], summed: bool) -> dict[str, Tensor]:
        """Return pending gradients over all ranks without changing this rank's; collective.

        Args:
            names: parameters by name.
            summed: whether the ranks' gradients were summed already.
        """
        if summed or self.ranks.alone:
            return {name: p.grad for name, p in names.items() if p.grad is not None}
        copies = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in names.items()}
        sum_over_ranks(list(copies.values()), self.ranks.group)
        return copies

    def combine_norms(self, norm: Tensor, norm_type: float) -> Tensor:
        """Return the norm of a gradient, given the norm of this rank's part."""
        return norm


class Sharded(Replicated):
    """Each rank holds a part of every parameter (FSDP2); with `dp` too, each group of `fsdp` ranks holds a copy.

    The backward of each pass sums gradients over ranks and keeps this rank's part.
    """

    in_lockstep = True

    def __init__(self, ranks: Ranks, mesh: DeviceMesh, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(ranks)
        self.options = _checked("fsdp_config", options, _FSDP)
        if self.options["reduce_dtype"] not in _DTYPES:
            raise ArgumentError(f"fsdp_config: reduce_dtype is {self.options['reduce_dtype']!r}, not {list(_DTYPES)}")
        self.mesh = _torch_mesh(mesh)
        self._shards = self.mesh.get_group(self.mesh.ndim - 1)
        self._units: list[FSDPModule] = []

    def place(self, model: Any, blocks: Sequence[str], dtype: torch.dtype | None) -> None:
        """Shard the model layer by layer; layers on the meta device first get the weights of the first rank."""
        reduce = None if dtype is None else _DTYPES[self.options["reduce_dtype"]]
        offload: OffloadPolicy = OffloadPolicy()
        if self.options["cpu_offload"]:
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        settings = {
            "mesh": self.mesh,
            "reshard_after_forward": self.options["reshard_after_forward"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce),
            "offload_policy": offload,
        }
        lacking = self.ranks.gather("sharding the model", any(p.is_meta for p in model.parameters()))
        for module in [*self._blocks(model, blocks), model]:
            if any(lacking):
                self._fill(module)
            fully_shard(module, **settings)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)  # losses are sums; their denominator is known at the step
            unit.set_force_sum_reduction_for_comms(True)
        setattr(model, _RUN, lambda call: call())
        register_fsdp_forward_method(model, _RUN)

    def run(self, model: Any, call: Callable[[], T]) -> T:
        """Run a pass while the parameters outside the layers (embeddings, norm, head) are gathered."""
        try:
            return getattr(model, _RUN)(call)  # type: ignore[no-any-return]
        finally:
            if not torch.is_grad_enabled():
                self.settle()

    def settle(self) -> None:
        """Free parameters that a pass without backward left gathered, since they would hide an update."""
        if not self.options["reshard_after_forward"]:
            for unit in self._units:
                unit.reshard()

    def idle_passes(self, call: str, passes: int) -> int:
        """Return how many passes without rows this rank must add."""
        return int(self.ranks.agree(call, passes).max()) - passes

    def all_usable(self, usable: bool) -> bool:
        """Return whether the pass is usable on every rank."""
        return bool(self.ranks.agree("losses are finite", usable).all())

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: every backward summed them."""

    def summed_gradients(self, names: Mapping[str, nn.Parameter], summed: bool) -> dict[str, Tensor]:
        """Return pending gradients, in shards."""
        return {name: p.grad for name, p in names.items() if p.grad is not None}

    def combine_norms(self, norm: Tensor, norm_type: float) -> Tensor:
        """Combine the norms of the shards."""
        norm = norm.to(local_device(), torch.float64)
        norms = [torch.empty_like(norm) for _ in range(self._shards.size())]
        dist.all_gather(norms, norm, group=self._shards)  # not all_reduce with MAX: gloo's may lose a NaN
        joint: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return joint

    def _blocks(self, model: Any, names: Sequence[str]) -> list[nn.Module]:
        asked = self.options["transformer_cls_names_to_wrap"]
        asked = [asked] if isinstance(asked, str) else asked
        wanted = set(asked or names)
        inside = [module for module in model.modules() if module is not model]
        there = {type(module).__name__ for module in inside}
        if asked and (lacking := sorted(wanted - there)):
            raise ArgumentError(
                f"fsdp_config: transformer_cls_names_to_wrap: {type(model).__name__} has no module of class "
                f"{lacking[0]!r}; nearest: {', '.join(nearest(lacking[0], there))}"
            )
        blocks = [module for module in inside if type(module).__name__ in wanted]
        if not blocks:
            lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
            blocks = list(max(lists, key=len, default=[]))
            get_logger().warning(
                "%s has no module called %s; it is sharded by its %d %s",
                type(model).__name__, sorted(wanted), len(blocks), type(blocks[0]).__name__ if blocks else "parts",
            )  # fmt: skip
        _check_ties(model, blocks)
        return blocks[::-1]  # inner blocks are sharded first

    def _fill(self, module: nn.Module) -> None:
        """Allocate parameters and buffers on the meta device, and broadcast all values from the first rank."""
        device = local_device()
        # By id, so that tied parameters stay tied; the old tensors stay alive meanwhile, so that ids stay unique.
        filled: dict[int, tuple[Tensor, Any]] = {}
        for part in module.modules():
            for store in (part._parameters, part._buffers):
                for name, tensor in list(store.items()):
                    if tensor is None or isinstance(tensor, DTensor):
                        continue
                    if id(tensor) not in filled:
                        filled[id(tensor)] = tensor, _on_device(tensor, device)
                    store[name] = filled[id(tensor)][1]
        with torch.no_grad():
            _broadcast([real for _, real in filled.values()], self.ranks)


def parallel_of(
    mesh: DeviceMesh | None, ddp_config: Mapping[str, Any] | None, fsdp_config: Mapping[str, Any] | None
) -> Replicated:
    """Return how a model is distributed over the ranks of a mesh: sharded if it has the dimension `fsdp`.

    Raises:
        ArgumentError: an option is unknown, or for the other way.
        Unsupported: the mesh has dimensions other than dp and fsdp.
    """
    ranks = Ranks.of(mesh)
    if mesh is not None and mesh.has_dim("fsdp") and dist.is_initialized():
        if ddp_config:
            raise ArgumentError(f"ddp_config={dict(ddp_config)} is for meshes without fsdp; this one is {mesh}")
        return Sharded(ranks, mesh, fsdp_config)
    if fsdp_config:
        raise ArgumentError(
            f"fsdp_config={dict(fsdp_config)} shards over the mesh's dimension fsdp, and "
            + (f"{mesh} has none" if mesh is not None else "there is no mesh")
            + "; give DeviceMesh.from_sizes(fsdp_size=...) and start with torchrun"
        )
    return Replicated(ranks, ddp_config)


def load_on_ranks(
    load: Callable[..., tuple[Any, Path | None]], parallel: Replicated, on_first_alone: bool
) -> tuple[Any, Path | None, Backbone]:
    """Load a model on every rank, or only on the first; the others then get the weights when it is sharded.

    Args:
        load: `load_model` with all its arguments.
        parallel: how the parameters will be distributed.
        on_first_alone: whether only the first rank reads the weights.
    """
    ranks = parallel.ranks
    if on_first_alone and not parallel.in_lockstep:
        raise ArgumentError("memory_efficient_init=True needs a mesh with fsdp; elsewhere every rank holds the model")
    if ranks.alone or not on_first_alone:
        model, path = ranks.together("loading the model", load)
        return model, path, Backbone.of(model)
    loaded: list[tuple[Any, Path | None, Backbone]] = []

    def read() -> tuple[torch.dtype, bool]:
        model, path = load()
        loaded.append((model, path, Backbone.of(model)))
        return model.dtype, loaded[0][2].splits

    dtype, splits = ranks.on_first("loading the model", read)
    if not loaded:
        model, path = load(skeleton=dtype)
        loaded.append((model, path, Backbone.of(model, splits)))
    return loaded[0]


def _checked(what: str, given: Mapping[str, Any] | None, known: Mapping[str, Any]) -> dict[str, Any]:
    for name in given or {}:
        if name == "expert_parallel":
            raise Unsupported(f"{what}: expert_parallel is not supported by this backend")
        if name not in known:
            close = nearest(name, known, 1)
            hint = f", nearest: {close[0]!r}" if close else ""
            raise ArgumentError(f"{what}: unknown option {name!r}{hint}; there are {', '.join(known)}")
    return {**known, **(given or {})}


def _check_ties(model: Any, blocks: Sequence[nn.Module]) -> None:
    """Refuse blocks that would separate tied weights."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for block in blocks:
        inside = {id(module) for module in block.modules()}
        for name in {name for parameter in block.parameters() for name in holders[id(parameter)]}:
            if id(model.get_submodule(name.rpartition(".")[0])) not in inside:
                raise Unsupported(
                    f"fsdp_config: transformer_cls_names_to_wrap: {type(block).__name__} would be sharded apart from "
                    f"{name}, which it is tied to; leave {type(block).__name__} out"
                )


def _torch_mesh(mesh: DeviceMesh) -> Any:
    """Return torch's mesh with replicas as the outer and shards as the inner dimension, as FSDP2 requires."""
    device = mesh.device_type or Platform.device_prefix()
    grid = mesh.mesh
    names = mesh.mesh_dim_names
    order = [names.index(name) for name in ("dp", "fsdp") if name in names]
    rest = [axis for axis in range(grid.ndim) if axis not in order]
    grid = grid.transpose([*rest, *order])[(0,) * len(rest)]
    kept = tuple(names[axis] for axis in order)
    if len(kept) == 2 and grid.shape[0] == 1:
        grid, kept = grid[0], kept[1:]
    if any((line[:-1] > line[1:]).any() for axis in range(grid.ndim) for line in _lines(grid, axis)):
        raise Unsupported(  # torch sorts the ranks of a group, so that shards would be on other ranks than in the mesh
            f"the mesh {mesh} has ranks {mesh.mesh.tolist()}; give them in ascending order where the model is sharded"
        )
    if grid.size == dist.get_world_size():
        return TorchDeviceMesh(device, grid.tolist(), mesh_dim_names=kept)
    rank = dist.get_rank()
    lines = [line.tolist() for axis in range(grid.ndim) for line in _lines(grid, axis) if rank in line]
    groups = [group_of(line) for line in lines]
    return TorchDeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0], device, mesh=grid.tolist(), mesh_dim_names=kept
    )


def _lines(grid: Any, axis: int) -> Any:
    """Return all lines of an array along an axis."""
    return grid.swapaxes(axis, -1).reshape(-1, grid.shape[axis])


def _on_device(tensor: Tensor, device: torch.device) -> Any:
    real = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def local_device() -> torch.device:
    """Return this process's device."""
    return torch.device(Platform.get_local_device())


def _broadcast(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    source = dist.get_global_rank(ranks.group, 0) if ranks.group is not None else 0
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=source, group=ranks.group)
