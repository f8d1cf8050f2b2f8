"""One of two ranks: calls made by one alone, models of one rank, meshes in odd order, norms that are no numbers."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from grid_worker import rows
from two_ranks_worker import build, main, meshes, own, scenario

import twinkle
from twinkle import DeviceMesh, Platform
from twinkle.data_format import LossOutput
from twinkle.errors import NonFiniteError, RankError, Unsupported
from twinkle_transformers.parallel import sum_over_ranks

TEXTS = [{"input_ids": row["input_ids"], "labels": int(index % 2 == 0)} for index, row in enumerate(rows()[:8])]
CALLS: dict[str, Callable[[Any], Any]] = {
    "get_state_dict": lambda model: model.get_state_dict(),
    "forward": lambda model: model.forward(inputs=rows()[:2]),
    "backward": lambda model: model.backward(),
}


@scenario
def one_alone(folder: Path) -> dict[str, Any]:
    """The first rank makes a call of its own on a sharded model."""
    mesh = meshes()["FSDP2"]
    seen: dict[str, Any] = {}
    for name, call in CALLS.items():
        model = build(folder, mesh, gradient_checkpointing=False)
        model.forward(inputs=own(mesh, rows()))
        model.calculate_loss()
        try:
            if twinkle.is_master():
                call(model)
            else:
                model.forward_backward(inputs=own(mesh, rows()))
        except RankError as error:
            seen[name] = str(error)
    return seen


@scenario
def nan_on_one(folder: Path) -> dict[str, Any]:
    """The first rank's loss is NaN; all ranks catch the error and make the step with other rows."""
    mesh = meshes()["FSDP2"]
    seen: dict[str, Any] = {}

    def broken(inputs: Any, outputs: Any) -> LossOutput:
        return LossOutput(outputs["logps"].sum() * (float("nan") if twinkle.is_master() else 1.0), 1.0)

    for name, last in (("both", rows()[:2]), ("the other has none", [])):
        model = build(folder, mesh)
        model.set_loss(broken)
        try:
            model.forward_backward(inputs=rows()[:2] if twinkle.is_master() else last)
        except NonFiniteError as error:
            seen[f"{name}: message"], seen[f"{name}: rows"] = str(error), len(error.inputs or [])
        model.set_loss("CrossEntropyLoss")
        model.forward_backward(inputs=own(mesh, rows()))
        seen[f"{name}: norm"] = model.clip_grad_norm(0.0)
    return seen


@scenario
def nan_in_a_shard(folder: Path) -> dict[str, Any]:
    """The last rank's shards hold a NaN."""
    model = build(folder, meshes()["FSDP2"])
    mine = torch.tensor(float("nan") if Platform.get_rank() else 1.0)
    return {str(kind): math.isnan(model.parallel.combine_norms(mine, kind)) for kind in (2.0, float("inf"))}


@scenario
def odd_order(folder: Path) -> dict[str, Any]:
    """Shard a model over ranks in descending order."""
    try:
        build(folder, DeviceMesh(mesh=np.array([1, 0]), mesh_dim_names=("fsdp",), device_type="cpu"))
    except Unsupported as error:
        return {"message": str(error)}
    return {}


@scenario
def groups(folder: Path) -> dict[str, Any]:
    """Return norms of contrastive losses: over both ranks, within groups, and of a model that one rank has alone."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        for batch in (True, False):
            model = build(folder, mesh)
            model.set_loss("InfonceLoss", temperature=1.0, hard_negatives=None, use_batch=batch)
            model.forward_backward(inputs=own(mesh, [*TEXTS, *TEXTS[:4]]), task="embedding")
            seen[f"{name} {'batch' if batch else 'groups'}"] = model.clip_grad_norm(0.0)
    if twinkle.is_master():
        model = build(folder, DeviceMesh(mesh=np.array([0]), mesh_dim_names=("dp",), device_type="cpu"))
        model.set_loss("InfonceLoss", temperature=1.0)
        model.forward_backward(inputs=[*TEXTS, *TEXTS[:4]], task="embedding")
        seen["alone"] = model.clip_grad_norm(0.0)
    return seen


@scenario
def buffers(folder: Path) -> dict[str, Any]:
    """Count the buffers that travel at one time."""
    travelling, most = 0, 0
    reduce = dist.all_reduce

    class Counted:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            nonlocal travelling
            travelling -= 1
            self.work.wait()

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal travelling, most
        travelling += 1
        most = max(most, travelling)
        return Counted(reduce(*args, **kwargs))

    dist.all_reduce = counted
    tensors = [torch.full((4,), float(number)) for number in range(9)]
    sum_over_ranks(tensors, bucket_bytes=32)
    dist.all_reduce = reduce
    return {"most": most, "sums": [float(tensor.sum()) for tensor in tensors]}


if __name__ == "__main__":
    main(*sys.argv[1:])
