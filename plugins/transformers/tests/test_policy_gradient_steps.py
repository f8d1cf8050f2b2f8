"""Policy gradients through the model: one update for a batch, its micro-batches, and steps that accumulate them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

ALL = {"beta": 0.1, "entropy_coef": 0.05, "tis_cap": 1.1}
LENGTHS = (5, 9, 12, 7, 16, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def sampled() -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return rows of uneven length, one without a completion, and what belongs to each."""
    draw, rows, near = torch.Generator().manual_seed(1), [], []
    for length in LENGTHS:
        ids = torch.randint(0, 256, (length,), generator=draw).tolist()
        start = length if length == 7 else length // 3 + 1
        rows.append({"input_ids": ids, "labels": [-100] * (start - 1) + ids[start:] + [-100]})
        near.append((torch.randn(3, length - start, generator=draw) * 0.3 - 5.5).tolist())
    names = ("old_logps", "ref_logps", "rollout_logps")
    arguments = {name: [of_row[k] for of_row in near] for k, name in enumerate(names)}
    return rows, arguments | {"advantages": [1.0, -0.5, 0.3, -2.0, 0.8, 1.5]}


def updated(folder: Path, loss: str, options: dict[str, Any], parts: list[slice], micro: int | None) -> Any:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.set_loss(loss, **options)
    model.set_optimizer("SGD", lr=16.0, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    rows, arguments = sampled()
    for part in parts:
        share = {name: value[part] for name, value in arguments.items()}
        model.forward_backward(inputs=rows[part], micro_batch_size=micro, **share)
        model.clip_grad_and_step(max_grad_norm=0, gradient_accumulation_steps=len(parts))
    moved = {name: p.detach() - before[name] for name, p in model.model.named_parameters()}
    return moved, model.calculate_metric(is_training=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("GSPOLoss", ALL | {"epsilon": 0.5}),
        ("DAPOLoss", {"tis_cap": 1.1}),
        ("DRGRPOLoss", ALL | {"max_completion_length": 12}),
        ("ReinforceLoss", ALL | {"importance_ratio": True}),
    ],
    ids=["mean of sequences", "mean of tokens", "constant", "sum of a sequence"],
)
def test_the_update_is_that_of_one_batch_however_it_is_cut(folder: Path, loss: str, options: dict[str, Any]) -> None:
    wanted, numbers = updated(folder, loss, options, [slice(0, 6)], None)
    size = sum(float(change.square().sum()) for change in wanted.values()) ** 0.5
    assert size > 0
    for parts, micro in (
        ([slice(0, 6)], 4),
        ([slice(0, 1), slice(1, 6)], 2),
        ([slice(0, 3), slice(3, 4), slice(4, 6)], 1),
    ):
        found, seen = updated(folder, loss, options, parts, micro)
        off = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5
        assert off < 1e-5 * size, (parts, micro)
        for name in ("loss", "approx_kl", "rollout_kl", "tis_clip_ratio"):
            assert seen[name] == pytest.approx(numbers[name], rel=1e-4, abs=1e-6), (name, parts, micro)
