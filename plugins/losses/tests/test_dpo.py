"""DPO against a loop over its formulas in plain floats; the forms of the reference, splits, masks, refusals."""

import itertools
import math
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle_losses.dpo import DPOLoss

PAIRS, WIDTH = 4, 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.5, "label_smoothing": 0.1},
    {"loss_type": "hinge", "beta": 0.7},
    {"loss_type": "ipo", "beta": 0.4},
    {"loss_type": "kto_pair", "beta": 0.6},
    {"sft_weight": 0.3},
]


def batch() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 11, (2 * PAIRS, WIDTH), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    labels[:, -1] = -100
    labels[:, 0] = 1
    labels[4] = labels[5] = -100  # a pair that trains nothing
    logps = torch.randn(labels.shape, generator=draw, dtype=torch.float64) - 1
    ref = logps + torch.randn(labels.shape, generator=draw, dtype=torch.float64)
    return {"labels": labels}, logps, ref


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(
    labels: torch.Tensor, logps: torch.Tensor, ref: torch.Tensor, weights: torch.Tensor, beta: float = 0.1,
    label_smoothing: float = 0.0, loss_type: str = "sigmoid", sft_weight: float = 0.0,
) -> tuple[float, int, dict[str, float]]:  # fmt: skip
    total, count = 0.0, 0
    numbers = dict.fromkeys(("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"), 0.0)
    for pair in range(len(labels) // 2):
        ratios = []
        for row in (2 * pair, 2 * pair + 1):
            places = [t for t in range(labels.shape[1]) if labels[row, t] != -100]
            ratios.append([float(weights[row, t] * (logps[row, t] - ref[row, t])) for t in places])
            if row % 2 == 0:
                likelihood = [float(weights[row, t] * logps[row, t]) for t in places]
        if not ratios[0]:
            continue
        c, r = sum(ratios[0]), sum(ratios[1])
        h = c - r
        if loss_type == "sigmoid":
            term = -(1 - label_smoothing) * log_sigmoid(beta * h) - label_smoothing * log_sigmoid(-beta * h)
        elif loss_type == "hinge":
            term = max(0.0, 1 - beta * h)
        elif loss_type == "ipo":
            term = (h - 1 / (2 * beta)) ** 2
        else:
            term = 1 - 1 / (1 + math.exp(-beta * c)) + 1 / (1 + math.exp(-beta * r))
        total += term - sft_weight * sum(likelihood) / len(likelihood)
        count += 1
        for name, value in zip(numbers, (beta * c, beta * r, beta * h, float(h > 0)), strict=True):
            numbers[name] += value
    return total, count, numbers


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "loss_scale"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_its_formula(options: dict[str, Any], weighted: bool) -> None:
    inputs, logps, ref = batch()
    weights = torch.rand(logps.shape, dtype=torch.float64) if weighted else torch.ones_like(logps)
    given = {**inputs, "loss_scale": weights} if weighted else inputs
    result = DPOLoss(**options)(given, {"logps": logps}, ref_logps=ref)  # type: ignore[arg-type]
    total, count, numbers = by_hand(inputs["labels"], logps, ref, weights, **options)
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert result.denominator == count == PAIRS - 1
    assert {name: result.metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-12)
    assert ("nll" in result.metrics) == ("sft_weight" in options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_its_gradient_is_that_of_its_value_and_none_where_nothing_is_trained(options: dict[str, Any]) -> None:
    inputs, logps, ref = batch()

    def value(leaf: torch.Tensor) -> torch.Tensor:
        return DPOLoss(**options)(inputs, {"logps": leaf}, ref_logps=ref).loss_sum  # type: ignore[arg-type]

    leaf = logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (leaf,))
    gradient = torch.autograd.grad(value(leaf), leaf)[0]
    masked = inputs["labels"] == -100
    assert not gradient[masked].any()
    assert bool(gradient[~masked].any())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_split_between_pairs_adds_up(options: dict[str, Any]) -> None:
    inputs, logps, ref = batch()
    loss = DPOLoss(**options)
    whole = loss(inputs, {"logps": logps}, ref_logps=ref)  # type: ignore[arg-type]
    for bounds in ([0, 2, 4, 6, 8], [0, 6, 8], [0, 4, 8]):
        parts = []
        for start, end in itertools.pairwise(bounds):
            some: Any = {"labels": inputs["labels"][start:end]}
            parts.append(loss(some, {"logps": logps[start:end]}, ref_logps=ref[start:end]))
        assert float(sum(part.loss_sum for part in parts)) == pytest.approx(whole.loss_sum.item(), rel=1e-12)
        assert sum(part.denominator for part in parts) == whole.denominator
        for name, value in whole.metrics.items():
            assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-12)


def test_every_form_of_the_reference_gives_the_same() -> None:
    inputs, logps, ref = batch()
    mask = inputs["labels"] != -100
    sums = (ref * mask).sum(1)
    forms: list[dict[str, Any]] = [
        {"ref_logps": ref},
        {"ref_logps": ref.tolist()},
        {"ref_logps": [row[kept].tolist() for row, kept in zip(ref, mask, strict=True)]},
        {"ref_logps": torch.cat([ref, ref], dim=1)},
        {"ref_outputs": {"logps": ref, "num_tokens": 3}},
        {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2]},
        {"ref_chosen_logps": sums[0::2].tolist(), "ref_rejected_logps": sums[1::2, None]},
    ]
    found = [DPOLoss(sft_weight=0.1)(inputs, {"logps": logps}, **form) for form in forms]  # type: ignore[arg-type]
    for output in found[1:]:
        assert output.loss_sum.item() == pytest.approx(found[0].loss_sum.item(), rel=1e-12)
        assert output.metrics == pytest.approx(found[0].metrics, rel=1e-12)


def test_reference_free_is_a_reference_of_zeros() -> None:
    inputs, logps, ref = batch()
    free = DPOLoss(reference_free=True)(inputs, {"logps": logps})  # type: ignore[arg-type]
    zeros = DPOLoss()(inputs, {"logps": logps}, ref_logps=torch.zeros_like(ref))  # type: ignore[arg-type]
    assert free.loss_sum.item() == zeros.loss_sum.item()
    for given in ({"ref_logps": ref}, {"ref_outputs": {"logps": ref}}):  # as published: it is not read
        again = DPOLoss(reference_free=True)(inputs, {"logps": logps}, **given)  # type: ignore[arg-type]
        assert again.loss_sum.item() == zeros.loss_sum.item()


def test_a_model_that_is_its_reference_pays_log_two_for_each_pair() -> None:
    inputs, logps, _ = batch()
    result = DPOLoss()(inputs, {"logps": logps}, ref_logps=logps.clone())  # type: ignore[arg-type]
    assert result.loss_sum.item() == pytest.approx((PAIRS - 1) * math.log(2), rel=1e-12)
    assert result.metrics["rewards/accuracies"] == 0.0


@pytest.mark.parametrize("junk", [-200.0, float("nan"), float("inf")])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_stands_where_nothing_is_trained_is_never_read(junk: float, options: dict[str, Any]) -> None:
    inputs, logps, ref = batch()
    masked = inputs["labels"] == -100
    wanted = DPOLoss(**options)(inputs, {"logps": logps}, ref_logps=ref)  # type: ignore[arg-type]
    leaf = logps.masked_fill(masked, junk).requires_grad_()
    found = DPOLoss(**options)(inputs, {"logps": leaf}, ref_logps=ref.masked_fill(masked, junk))  # type: ignore[arg-type]
    assert found.loss_sum.item() == wanted.loss_sum.item()
    assert found.metrics == wanted.metrics
    assert bool(torch.isfinite(torch.autograd.grad(found.loss_sum, leaf)[0]).all())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_absurd_margins_stay_finite_in_float32(options: dict[str, Any]) -> None:
    inputs: Any = {"labels": torch.tensor([[1, -100], [2, -100]])}
    for sign in (1, -1):
        logps = torch.tensor([[-1e4 * (sign > 0), 0.0], [-1e4 * (sign < 0), 0.0]], requires_grad=True)
        result = DPOLoss(**options)(inputs, {"logps": logps}, ref_logps=torch.zeros(2, 2))
        assert bool(torch.isfinite(result.loss_sum))
        assert bool(torch.isfinite(torch.autograd.grad(result.loss_sum, logps)[0]).all())


def test_no_trained_token_counts_nothing_and_keeps_the_graph() -> None:
    logps = torch.randn(4, 3, requires_grad=True)
    result = DPOLoss(sft_weight=1.0)({"labels": torch.full((4, 3), -100)}, {"logps": logps}, ref_logps=[[]] * 4)
    gradient = torch.autograd.grad(result.loss_sum, logps)[0]
    assert (result.loss_sum.item(), result.denominator) == (0.0, 0)
    assert set(result.metrics.values()) == {0.0}
    assert not gradient.any()


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {}, "DPOLoss: the reference is missing; pass ref_outputs=.*reference_free=True"),
        ({}, {"ref_outputs": {"loss": 1.0}}, r"ref_outputs has no 'logps' \(it is \['loss'\]\)"),
        ({}, {"ref_outputs": [1.0]}, r"ref_outputs has no 'logps' \(it is list\)"),
        ({}, {"ref_chosen_logps": [1.0]}, "the reference came as ref_chosen_logps; pass either"),
        ({}, {"ref_logps": 1, "ref_outputs": {}}, "the reference came as ref_outputs and ref_logps"),
        ({}, {"ref_logps": torch.zeros(8)}, "ref_logps of row 0 has 1 numbers"),
        ({}, {"ref_logps": torch.zeros(8, 1)}, "ref_logps of row 0 has 1 numbers"),
        ({}, {"ref_logps": torch.zeros(4, 6)}, "ref_logps has 4 entries, the batch has 8 rows"),
        (
            {},
            {"ref_chosen_logps": [1.0] * 8, "ref_rejected_logps": [1.0] * 4},
            r"ref_chosen_logps has the shape \[8\], the batch has 4 pairs",
        ),
        ({}, {"ref_chosen_logps": [1.0] * 4, "ref_rejected_logps": ["x"] * 4}, "ref_rejected_logps are not numbers"),
        ({}, {"ref_logps": torch.full((8, 6), math.nan)}, "ref_logps of row 0 holds nan at a trained token"),
        ({}, {"ref_logps": torch.full((8, 6), -math.inf)}, "ref_logps of row 0 holds -inf at a trained token"),
        (
            {},
            {"ref_chosen_logps": [1.0] * 4, "ref_rejected_logps": [1.0, math.inf, 1.0, 1.0]},
            "ref_rejected_logps of pair 1 is inf; leave the pair out",
        ),
    ],
)
def test_a_reference_that_is_missing_or_does_not_fit_is_refused(options: Any, arguments: Any, message: str) -> None:
    inputs, logps, _ = batch()
    with pytest.raises(ArgumentError, match=message):
        DPOLoss(**options)(inputs, {"logps": logps}, **arguments)  # type: ignore[arg-type]


def test_the_reference_of_a_pair_that_trains_nothing_may_be_no_number() -> None:
    inputs, logps, _ = batch()
    leaf = logps.clone().requires_grad_()
    sums: Any = {"ref_chosen_logps": [1.0, 1.0, math.nan, 1.0], "ref_rejected_logps": [1.0, 1.0, -math.inf, 1.0]}
    found = DPOLoss()(inputs, {"logps": leaf}, **sums)  # type: ignore[arg-type]
    assert math.isfinite(found.loss_sum.item())
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert bool(torch.isfinite(torch.autograd.grad(found.loss_sum, leaf)[0]).all())


def test_rows_that_are_no_pairs_are_refused() -> None:
    inputs, logps, ref = batch()
    odd: Any = {"labels": inputs["labels"][:3]}
    with pytest.raises(ArgumentError, match="the batch has 3 rows, which are not pairs"):
        DPOLoss()(odd, {"logps": logps[:3]}, ref_logps=ref[:3])
    inputs["labels"][3] = -100
    with pytest.raises(DataError, match="row 3 of the batch has no trained token, but the other row of its pair has"):
        DPOLoss()(inputs, {"logps": logps}, ref_logps=ref)  # type: ignore[arg-type]
    inputs["labels"][3] = 1
    inputs["labels"][0] = -100
    with pytest.raises(DataError, match="row 0 of the batch has no trained token"):
        DPOLoss()(inputs, {"logps": logps}, ref_logps=ref)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, "beta=0; it must be a finite number above 0"),
        ({"beta": float("inf")}, "beta=inf"),
        ({"beta": 10**400}, "beta=1000"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5; it must be a finite number of at least 0 and below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "has a meaning for loss_type='sigmoid' only, not for 'ipo'"),
        ({"loss_type": "kto"}, "loss_type='kto'; it must be one of sigmoid, hinge, ipo, kto_pair"),
        ({"loss_type": ["ipo"]}, "loss_type="),
        ({"reference_free": "no"}, "reference_free='no'; it must be True or False"),
        ({"sft_weight": -1}, "sft_weight=-1; it must be a finite number of at least 0"),
        ({"ignore_index": None}, "ignore_index=None"),
        ({"bta": 1}, "unknown argument 'bta', nearest: 'beta'"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        registry().build("DPOLoss", "loss", **options)


def test_it_says_that_pairs_stay_together_and_which_forward_it_needs() -> None:
    assert DPOLoss.rows_together == 2
    with pytest.raises(TrainingStateError, match=r"needs outputs\['logps'\].*task='causal_lm'"):
        DPOLoss()({"labels": torch.ones(2, 1).long()}, {"embeddings": torch.zeros(2, 1)}, ref_logps=[1, 1])
