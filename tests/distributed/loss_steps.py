"""One step of each of several losses, of which a rank makes its share: sampled rows in pairs, of uneven lengths."""

from pathlib import Path
from typing import Any

import torch
from grid_worker import adapter, start

from twinkle import DeviceMesh
from twinkle_transformers.model import TransformersModel

LOSSES: dict[str, dict[str, Any]] = {
    "GSPOLoss": {"epsilon": 0.02, "beta": 0.1},
    "CISPOLoss": {"entropy_coef": 0.05},
    "DRGRPOLoss": {"max_completion_length": 12},
    "ReinforceLoss": {"tis_cap": 1.1},
    "DPOLoss": {"beta": 0.5, "sft_weight": 0.2},
    "SimPOLoss": {},
    "GKDLoss": {"beta": 0.3},
    "InfonceLoss": {"include_qq": True},
}
LENGTHS = (5, 9, 12, 7, 16, 4)
SHARES = (slice(0, 2), slice(2, 6))
CASES = [("DDP", loss) for loss in LOSSES] + [("FSDP2", "DRGRPOLoss"), ("FSDP2", "GKDLoss")]
_VOCABULARY = 264
_PAIRS = ("DPOLoss", "SimPOLoss")
_POLICY = ("GSPOLoss", "CISPOLoss", "DRGRPOLoss", "ReinforceLoss")


def arguments(loss: str) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return rows, one of them without a completion where the loss can have such, and what belongs to each."""
    draw, rows, near = torch.Generator().manual_seed(1), [], []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 256, (length,), generator=draw).tolist()
        begin = length - 1 if number == 3 and loss in _POLICY else 2
        rows.append({"input_ids": ids, "labels": [-100] * begin + ids[begin + 1 :] + [-100]})
        near.append((torch.randn(3, length - 1 - begin, generator=draw) * 0.3 - 5.5).tolist())
    if loss == "InfonceLoss":
        return [{**row, "labels": int(number % 2 == 0)} for number, row in enumerate(rows)], {}
    if loss == "GKDLoss":
        tables = [torch.randn(len(row["input_ids"]), _VOCABULARY, generator=draw) for row in rows]
        return rows, {"teacher_logits": tables}
    if loss in _PAIRS:
        return rows, {"ref_logps": [row[0] for row in near]} if loss == "DPOLoss" else {}
    own = {name: [row[at] for row in near] for at, name in enumerate(("old_logps", "ref_logps", "rollout_logps"))}
    return rows, own | {"advantages": [1.0, -0.5, 0.3, -2.0, 0.8, 1.5]}


def loss_step(folder: Path, mesh: DeviceMesh | None, share: slice, loss: str) -> dict[str, Any]:
    """Return the update of one SGD step on a share of the rows, and its metrics; ranks cut theirs in micro-batches."""
    model: Any = TransformersModel(model_id=str(folder / "model"), device_mesh=mesh, mixed_precision="no")
    model.add_adapter_to_model("default", adapter())
    start(model.model, True)
    model.set_loss(loss, **LOSSES[loss])
    model.set_optimizer("SGD", lr=4.0, weight_decay=0.0)
    before = {name: tensor.double().clone() for name, tensor in model.get_state_dict().items()}
    rows, given = arguments(loss)
    whole = mesh is None or loss == "InfonceLoss"
    how = {"task": "embedding" if loss == "InfonceLoss" else "causal_lm", "micro_batch_size": None if whole else 2}
    model.forward_backward(inputs=rows[share], **how, **{name: value[share] for name, value in given.items()})
    model.clip_grad_and_step(max_grad_norm=0)
    after = model.get_state_dict()
    update = {name: (before[name] - tensor.double()).flatten().tolist() for name, tensor in after.items()}
    return {"update": update, "metrics": model.calculate_metric(is_training=True)}
