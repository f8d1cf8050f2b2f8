"""A script that uses the patch from a hub, as published ones do; what happens is written as one line of JSON."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import moe4
import torch
from torch import nn

from twinkle.model import TransformersModel
from twinkle.patch import applied_patches, undo_patch
from twinkle.testing import tiny_model

PATCH = sys.argv[1]


class Both(nn.Module):
    """A feed-forward layer of a Llama with a mixture of experts of transformers 4 in it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inside, self.block, self.outside = nn.Linear(size, moe4.SIZE), moe4.Layer(), nn.Linear(moe4.SIZE, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.inside(x) * 0
        inside[..., 0] = 9.0
        return self.outside(self.block(inside))


def refusal() -> str:
    try:
        model.apply_patch(PATCH)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


model = TransformersModel(model_id=str(tiny_model("tiny")), mixed_precision="no")
both = Both(64)
model.model.model.layers[0].mlp = both
moe4.starve([both.block], (0, 3))
before = refusal()
subprocess.run([sys.executable, "-m", "twinkle.cli", "plugins", "add", PATCH, "--yes"], check=True, capture_output=True)
refused = refusal()
known = importlib.metadata.version
importlib.metadata.version = lambda name: "4.57.1" if name == "transformers" else known(name)
model.apply_patch(PATCH)
for expert in both.block.mlp.experts:
    expert.calls.clear()
model.forward_only(inputs=[{"input_ids": [5, 6, 7, 8]}])
calls = [expert.calls for expert in both.block.mlp.experts]
by = applied_patches(model.model)[0].patch
undo_patch(model.model, PATCH)
after = [patch.patch for patch in applied_patches()]
sys.stdout.write(json.dumps({"before": before, "refused": refused, "calls": calls, "by": by, "after": after}) + "\n")
