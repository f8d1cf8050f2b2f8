"""Two ranks, each expert sharded on its own, and each rank's tokens go to other experts."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import moe4
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import twinkle
from twinkle.patch import apply_patch


def patch() -> type:
    """Return the class in the repository."""
    spec = importlib.util.spec_from_file_location("moe_patch", Path(sys.argv[1]) / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Qwen3MoeTransformers4Patch


def routed(model: torch.nn.Sequential) -> torch.nn.Sequential:
    """Let the sign of a token's first number choose between experts 0, 1 and 2, 3."""
    with torch.no_grad():
        for layer in model:
            layer.mlp.gate.weight[:, 0] = torch.tensor([-1000.0, -1000.0, 1000.0, 1000.0])
            for expert in layer.mlp.experts:
                expert.down.weight[0], expert.down.bias[0] = 0.0, 0.0  # the sign stays from layer to layer
    return model


def tokens(rank: int) -> torch.Tensor:
    """Return the batch of a rank."""
    made = moe4.tokens(seed=rank)
    made[..., 0] *= 1 - 2 * rank
    return made


known = importlib.metadata.version
importlib.metadata.version = lambda name: "4.57.1" if name == "transformers" else known(name)
twinkle.initialize()  # which also leaves the group at the end
rank = dist.get_rank()

whole = routed(moe4.model())
(whole(tokens(0)).pow(2).sum() + whole(tokens(1)).pow(2).sum()).div(2).backward()

model = routed(moe4.model())
for layer in model:
    for expert in layer.mlp.experts:
        fully_shard(expert)
    fully_shard(layer)
fully_shard(model)
apply_patch(model, patch())
model(tokens(rank)).pow(2).sum().backward()

difference = 0.0
for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
    full = mine.grad.full_tensor()
    difference = max(difference, float((full - theirs.grad).abs().max() / (theirs.grad.abs().max() + 1)))
order = [[len(expert.calls) for expert in layer.mlp.experts] for layer in model]
told: list = [None, None]
dist.all_gather_object(told, order)
if rank == 0:
    Path(sys.argv[2]).write_text(json.dumps({"calls": told, "difference": difference}), "utf-8")
