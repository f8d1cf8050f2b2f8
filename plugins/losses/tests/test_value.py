"""ValueLoss: against the papers' formula one token at a time, however rows are cut, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twinkle.errors import ArgumentError, DataError
from twinkle.loss import ValueLoss

DRAW = torch.Generator().manual_seed(4)
LABELS = torch.tensor([[5, 6, -100, 7], [-100, -100, -100, -100], [-100, 3, 4, -100]])
VALUES = torch.randn(3, 4, 1, generator=DRAW, dtype=torch.float64)
OLD: list[list[float]] = [[0.3, -1.0, 0.2], [], [0.5, 2.0]]
RETURNS: list[list[float]] = [[1.0, -0.5, 0.0], [], [1.5, 0.1]]
WEIGHTS = torch.tensor([[1.0, 0.5, 0.0, 2.0], [1.0] * 4, [0.0, 1.0, 3.0, 1.0]])


def by_hand(clip: float | None, coef: float, weighted: bool) -> tuple[float, int, dict[str, float]]:
    """Return sum, count and metrics, one token at a time."""
    total, count, numbers = 0.0, 0, {"value_error": 0.0, "value_clip_ratio": 0.0}
    for row in range(3):
        trained = [t for t in range(4) if LABELS[row, t] != -100]
        for t, old, goal in zip(trained, OLD[row], RETURNS[row], strict=True):
            value = float(VALUES[row, t, 0])
            term = plain = (value - goal) ** 2
            if clip is not None:
                near = min(max(value, old - clip), old + clip)
                term = max(plain, (near - goal) ** 2)
                numbers["value_clip_ratio"] += (near - goal) ** 2 > plain
            numbers["value_error"] += plain
            total += coef * term * (float(WEIGHTS[row, t]) if weighted else 1.0)
            count += 1
    if clip is None:
        del numbers["value_clip_ratio"]
    return total, count, numbers


def batch(rows: slice = slice(None), weighted: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs = {"labels": LABELS[rows]} | ({"loss_scale": WEIGHTS[rows]} if weighted else {})
    return inputs, {"logits": VALUES[rows].clone().requires_grad_(True)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("clip", "coef"), [(0.2, 1.0), (1.5, 0.5), (None, 2.0)])
def test_the_sum_is_that_of_each_token_by_itself(clip: float | None, coef: float, weighted: bool) -> None:
    found = ValueLoss(clip=clip, coef=coef)(*batch(weighted=weighted), returns=RETURNS, old_values=OLD)
    total, count, numbers = by_hand(clip, coef, weighted)
    assert float(found.loss_sum.detach()) == pytest.approx(total, rel=1e-12)
    assert found.denominator == count == 5
    assert found.metrics == pytest.approx(numbers, rel=1e-12)
    parts = [
        ValueLoss(clip=clip, coef=coef)(
            *batch(slice(r, r + 1), weighted), returns=RETURNS[r : r + 1], old_values=OLD[r : r + 1]
        )
        for r in range(3)
    ]
    assert sum(float(part.loss_sum.detach()) for part in parts) == pytest.approx(total, rel=1e-12)
    assert sum(part.denominator for part in parts) == 5


def test_a_value_that_has_moved_too_far_towards_its_goal_has_no_gradient() -> None:
    inputs, outputs = {"labels": torch.tensor([[3, 4, 5]])}, {"logits": torch.tensor([[[0.9], [0.9], [0.05]]])}
    outputs["logits"].requires_grad_(True)
    ValueLoss(clip=0.2)(inputs, outputs, returns=[[1.0, 0.0, 1.0]], old_values=[[0.0, 0.0, 0.0]]).loss_sum.backward()
    gradient = outputs["logits"].grad
    assert gradient is not None
    assert gradient.flatten().tolist() == pytest.approx([0.0, 1.8, -1.9])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"old_values": OLD}, "returns are missing"),
        ({"returns": RETURNS}, "old_values are missing.*or set clip=None"),
        ({"returns": RETURNS[:2], "old_values": OLD}, "returns has 2 entries, the batch has 3 rows"),
        ({"returns": [[1.0], [], [1.0, 2.0]], "old_values": OLD}, "returns of row 0 has 1 numbers"),
        ({"returns": [[1.0, math.nan, 0.0], [], [1.5, 0.1]], "old_values": OLD}, "returns of row 0 holds nan"),
        ({"returns": RETURNS, "old_values": [*OLD[:2], [0.5, math.inf]]}, "old_values of row 2 holds inf"),
    ],
)
def test_what_does_not_fit_the_rows_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        ValueLoss()(*batch(), **arguments)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_value_where_nothing_is_trained_is_never_read(junk: float) -> None:
    values = VALUES.masked_fill((LABELS == -100)[..., None], junk).requires_grad_()
    found = ValueLoss()({"labels": LABELS}, {"logits": values}, returns=RETURNS, old_values=OLD)
    wanted = ValueLoss()({"labels": LABELS}, {"logits": VALUES}, returns=RETURNS, old_values=OLD)
    assert (float(found.loss_sum.detach()), found.metrics) == (float(wanted.loss_sum), wanted.metrics)
    gradient = torch.autograd.grad(found.loss_sum, values)[0]
    assert not gradient[LABELS == -100].any()
    assert bool(torch.isfinite(gradient).all())


def test_a_model_without_one_value_a_token_is_refused() -> None:
    with pytest.raises(DataError, match=r"logits are \[3, 4, 2\].*num_labels=1"):
        ValueLoss(clip=None)({"labels": LABELS}, {"logits": torch.zeros(3, 4, 2)}, returns=RETURNS)
    for option in ({"clip": 0.0}, {"coef": -1.0}):
        with pytest.raises(ArgumentError, match=next(iter(option))):
            ValueLoss(**option)
