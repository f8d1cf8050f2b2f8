"""DPOMetric and GKDMetric against loops over their definitions; forms of arguments, what is left out, refusals."""

import math
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import ArgumentError
from twinkle_metrics.distillation import GKDMetric
from twinkle_metrics.preference import DPOMetric

KEYS = {
    "logps/chosen", "logps/rejected", "logps/ref_chosen", "logps/ref_rejected", "rewards/chosen", "rewards/rejected",
    "rewards/margins", "rewards/accuracies",
}  # fmt: skip


def batch() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return four pairs of which the third trains nothing."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (8, 5), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    labels[:, 0], labels[4:6] = 1, -100
    logps, ref = (-3 * torch.rand(labels.shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return {"labels": labels}, logps, ref


def by_hand(labels: Any, logps: Any, ref: Any, weights: Any, beta: float) -> dict[str, float]:
    found: dict[str, list[float]] = {key: [] for key in KEYS}
    for pair in (0, 1, 3):
        rewards = []
        for part, row in (("chosen", 2 * pair), ("rejected", 2 * pair + 1)):
            places = [t for t in range(5) if labels[row, t] != -100]
            own, other = (sum(float(weights[row, t] * values[row, t]) for t in places) for values in (logps, ref))
            rewards.append(beta * (own - other))
            found[f"logps/{part}"].append(own)
            found[f"logps/ref_{part}"].append(other)
            found[f"rewards/{part}"].append(rewards[-1])
        found["rewards/margins"].append(rewards[0] - rewards[1])
        found["rewards/accuracies"].append(float(rewards[0] > rewards[1]))
    return {key: sum(values) / len(values) for key, values in found.items()}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "loss_scale"])
def test_the_numbers_of_pairs_are_their_definitions_however_they_come(weighted: bool) -> None:
    inputs, logps, ref = batch()
    weights = torch.ones_like(ref)
    if weighted:
        weights = inputs["loss_scale"] = torch.rand(ref.shape, generator=torch.Generator().manual_seed(1)).double()
    mask = inputs["labels"] != -100
    sums = (ref * weights * mask).sum(1)
    forms: list[dict[str, Any]] = [
        {"ref_logps": ref},
        {"ref_outputs": {"logps": ref, "loss": 1.0}},
        {"ref_logps": [row[kept].tolist() for row, kept in zip(ref, mask, strict=True)]},
        {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2].tolist()},
    ]
    wanted = by_hand(inputs["labels"], logps, ref, weights, beta=0.3)
    for form in forms:
        metric = DPOMetric(beta=0.3)
        metric.accumulate(inputs, {"logps": logps}, step=1, lr=[0.1], **form)  # type: ignore[arg-type]
        values = metric.calculate()
        assert set(values) == KEYS
        assert values == pytest.approx(wanted, rel=1e-12)
        assert all(type(value) is float for value in values.values())


def test_without_a_reference_there_are_log_probabilities_alone() -> None:
    inputs, logps, _ = batch()
    metric = DPOMetric()
    metric.accumulate(inputs, {"logps": logps})  # type: ignore[arg-type]
    assert set(metric.calculate()) == {"logps/chosen", "logps/rejected"}


def test_passes_that_have_no_pairs_for_it_are_left_out_and_odd_rows_refused() -> None:
    inputs, logps, ref = batch()
    metric = DPOMetric()
    metric.accumulate({"labels": torch.tensor([1, 0])}, {"embeddings": torch.ones(2, 3)})
    metric.accumulate({"labels": torch.full((2, 5), -100)}, {"logps": logps[:2]}, ref_logps=ref[:2])
    assert metric.calculate() == {}
    with pytest.raises(ArgumentError, match="DPOMetric: the batch has 3 rows, which are not pairs"):
        metric.accumulate({"labels": inputs["labels"][:3]}, {"logps": logps[:3]})
    sums = {"ref_chosen_logps": [0.0] * 2, "ref_rejected_logps": [0.0]}
    with pytest.raises(
        ArgumentError, match=r"DPOMetric: ref_chosen_logps .* have \[2, 1\] numbers, the batch has 2 pairs"
    ):
        metric.accumulate({"labels": inputs["labels"][:4]}, {"logps": logps[:4]}, **sums)
    with pytest.raises(ArgumentError, match="DPOMetric: beta=0; it is a finite number above 0"):
        registry().build("DPOMetric", "metric", beta=0)


def test_agreement_with_a_teacher_is_counted_at_trained_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (3, 4), generator=draw)
    labels[:, -1] = labels[1, 0] = -100
    student, teacher = (torch.randn((3, 4, 9), generator=draw) for _ in range(2))
    student[:, ::2] = teacher[:, ::2]
    best = teacher.log_softmax(-1).topk(2, dim=-1)
    agreed, mass = [], []
    for row in range(3):
        for place in (t for t in range(4) if labels[row, t] != -100):
            powers = [math.exp(value) for value in teacher[row, place].tolist()]
            mass.append(sum(sorted(powers)[-2:]) / sum(powers))
            agreed.append(teacher[row, place].tolist().index(max(teacher[row, place].tolist()))
                          == student[row, place].tolist().index(max(student[row, place].tolist())))  # fmt: skip
    assert 0 < sum(agreed) < len(agreed)
    wanted = {"teacher_agreement": sum(agreed) / len(agreed), "teacher_mass": sum(mass) / len(mass)}
    flipped = [table.flip(-1) for table in (best.values, best.indices)]  # any order of the k tokens
    lists = [[table[kept] for table, kept in zip(part, labels != -100, strict=True)] for part in best]
    for logprobs, tokens in (best, flipped, lists):
        metric = GKDMetric()
        outputs: Any = {"predictions": student.argmax(-1)}
        metric.accumulate({"labels": labels}, outputs, teacher_topk_logprobs=logprobs, teacher_topk_indices=tokens)
        assert metric.calculate() == pytest.approx(wanted, rel=1e-6)


def test_passes_without_a_teacher_are_left_out() -> None:
    metric = GKDMetric()
    outputs: Any = {"predictions": torch.ones(1, 3).long()}
    metric.accumulate({"labels": torch.ones(1, 3).long()}, outputs)
    top = {"teacher_topk_logprobs": torch.zeros(1, 3, 1), "teacher_topk_indices": torch.ones(1, 3, 1).long()}
    metric.accumulate({"labels": torch.full((1, 3), -100)}, outputs, **top)
    metric.accumulate({"labels": torch.ones(1, 3).long()}, {"logps": torch.zeros(1, 3)}, **top)
    assert metric.calculate() == {}
    with pytest.raises(ArgumentError, match="GKDMetric: teacher_topk_logprobs have the shape"):
        metric.accumulate({"labels": torch.ones(1, 4).long()}, {"predictions": torch.ones(1, 4).long()}, **top)
