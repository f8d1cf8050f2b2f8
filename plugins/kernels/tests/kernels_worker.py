"""One of two ranks: trains in every way with kernels and without, and writes the losses and what is saved."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import twinkle
from twinkle import DeviceMesh, Platform
from twinkle.kernel import kernelize, unkernelize
from twinkle_transformers.model import TransformersModel

FOLDER = Path(sys.argv[1])
LENGTHS = (9, 14, 5, 11)


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 250, (length,), generator=draw).tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": [*row[1:], -100]} for row in ids]


def trained(when: str, lora: bool, name: str) -> dict[str, Any]:
    """Make three steps, kernelized before the model is sharded, after it, or never; undo, and make one more."""
    mesh = DeviceMesh.from_sizes(fsdp_size=Platform.get_world_size())
    model = TransformersModel(
        model_id=str(FOLDER / "model"), device_mesh=mesh, mixed_precision="no", gradient_checkpointing=True
    )
    if when == "before":
        kernelize(model)
    if lora:
        torch.manual_seed(0)
        model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    model.set_optimizer("AdamW", lr=1e-2)
    losses, own = [], rows()[mesh.get_slice(len(LENGTHS))]
    for step in range(4):
        if when == "after" and step == 1:
            kernelize(model)
        if step == 3:
            replaced = sum("forward" in vars(part) for part in model.model.modules())
            unkernelize(model)
        model.forward_backward(inputs=own, micro_batch_size=1)
        model.clip_grad_and_step(max_grad_norm=1.0)
        losses.append(model.calculate_metric(is_training=True)["loss"])
    model.save(name, output_dir=str(FOLDER))
    twinkle_file = "adapter_model.safetensors" if lora else "model.safetensors"
    saved = load_file(FOLDER / name / twinkle_file)
    left = sum("forward" in vars(part) for part in model.model.modules())
    sums = {key: float(value.double().abs().sum()) for key, value in saved.items()}
    return {"losses": losses, "replaced": replaced, "left": left, "saved": sums}


twinkle.initialize(mode="local", nproc_per_node=Platform.get_world_size(), global_device_mesh=None, lazy_collect=False)
found = {
    f"{kind}-{when}": trained(when, kind == "lora", f"{kind}-{when}")
    for kind in ("lora", "full")
    for when in ("never", "before", "after")
}
(FOLDER / f"{Platform.get_rank()}.json").write_text(json.dumps(found))
