"""SimPO, CPO and ORPO against loops over their formulas in plain floats; splits, masks, refusals."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle_losses.cpo import CPOLoss
from twinkle_losses.orpo import ORPOLoss
from twinkle_losses.simpo import SimPOLoss

PAIRS, WIDTH = 4, 6
Row = list[float]


def batch() -> tuple[dict[str, Any], torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 11, (2 * PAIRS, WIDTH), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    labels[:, -1] = -100
    labels[:, 0] = 0
    labels[4] = labels[5] = -100  # a pair that trains nothing
    logps = torch.randn(labels.shape, generator=draw, dtype=torch.float64).abs().neg() - 0.05
    return {"labels": labels}, logps


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def mean(row: Row) -> float:
    return sum(row) / len(row)


def simpo(chosen: Row, rejected: Row, beta: float = 2.5, gamma: float = 0.5) -> tuple[float, dict[str, float]]:
    c, r = mean(chosen), mean(rejected)
    numbers = {"rewards/chosen": beta * c, "rewards/rejected": beta * r, "rewards/margins": beta * (c - r)}
    return -log_sigmoid(beta * (c - r) - gamma), numbers | {"rewards/accuracies": float(c > r)}


def cpo(chosen: Row, rejected: Row, beta: float = 0.1, bc_coef: float = 1.0) -> tuple[float, dict[str, float]]:
    c, r = sum(chosen), sum(rejected)
    numbers = {"rewards/chosen": beta * c, "rewards/rejected": beta * r, "rewards/margins": beta * (c - r)}
    numbers |= {"rewards/accuracies": float(c > r), "nll": -mean(chosen)}
    return -log_sigmoid(beta * (c - r)) - bc_coef * mean(chosen), numbers


def orpo(chosen: Row, rejected: Row, lambda_orpo: float = 0.1) -> tuple[float, dict[str, float]]:
    p, q = math.exp(mean(chosen)), math.exp(mean(rejected))
    ratio = math.log((p / (1 - p)) / (q / (1 - q)))
    numbers = {"log_odds_ratio": ratio, "rewards/accuracies": float(p > q), "nll": -math.log(p)}
    return -math.log(p) - lambda_orpo * log_sigmoid(ratio), numbers


CASES: list[tuple[Any, Callable[..., tuple[float, dict[str, float]]], dict[str, float]]] = [
    (SimPOLoss, simpo, {}),
    (SimPOLoss, simpo, {"beta": 0.7, "gamma": 1.3}),
    (CPOLoss, cpo, {}),
    (CPOLoss, cpo, {"beta": 0.6, "bc_coef": 0.2}),
    (ORPOLoss, orpo, {}),
    (ORPOLoss, orpo, {"lambda_orpo": 0.8}),
]
NAMES = [f"{made.__name__}-{options}" for made, _, options in CASES]
LOSSES = [SimPOLoss, CPOLoss, ORPOLoss]


def by_hand(
    term: Callable[..., tuple[float, dict[str, float]]], labels: torch.Tensor, logps: torch.Tensor,
    weights: torch.Tensor, options: dict[str, float],
) -> tuple[float, int, dict[str, float]]:  # fmt: skip
    total, count, sums = 0.0, 0, {"logps/chosen": 0.0, "logps/rejected": 0.0}
    for pair in range(len(labels) // 2):
        rows: list[Row] = []
        for row in (2 * pair, 2 * pair + 1):
            places = [t for t in range(labels.shape[1]) if labels[row, t] != -100]
            rows.append([float(weights[row, t] * logps[row, t]) for t in places])
        if not rows[0]:
            continue
        value, numbers = term(*rows, **options)
        numbers |= {"logps/chosen": sum(rows[0]), "logps/rejected": sum(rows[1])}
        total, count = total + value, count + 1
        sums = {name: sums.get(name, 0.0) + found for name, found in numbers.items()}
    return total, count, sums


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "loss_scale"])
@pytest.mark.parametrize(("made", "term", "options"), CASES, ids=NAMES)
def test_it_is_its_formula(made: Any, term: Any, options: dict[str, float], weighted: bool) -> None:
    inputs, logps = batch()
    draw = torch.Generator().manual_seed(1)
    weights = torch.ones_like(logps)
    if weighted:
        weights = torch.rand(logps.shape, generator=draw, dtype=torch.float64) + 0.1
        inputs["loss_scale"] = weights
    found = made(**options)(inputs, {"logps": logps})
    total, count, numbers = by_hand(term, inputs["labels"], logps, weights, options)
    assert found.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert found.denominator == count == PAIRS - 1
    assert found.metrics == pytest.approx(numbers, rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("made", "_term", "options"), CASES, ids=NAMES)
def test_its_gradient_is_that_of_its_value_and_none_where_nothing_is_trained(
    made: Any, _term: Any, options: dict[str, float]
) -> None:
    inputs, logps = batch()

    def value(leaf: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = made(**options)(inputs, {"logps": leaf}).loss_sum
        return total

    leaf = logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (leaf,))
    gradient = torch.autograd.grad(value(leaf), leaf)[0]
    masked = inputs["labels"] == -100
    masked[4:6] = True
    assert not gradient[masked].any()
    assert bool((gradient[~masked] != 0).all())


@pytest.mark.parametrize(("made", "_term", "options"), CASES, ids=NAMES)
def test_any_split_between_pairs_adds_up(made: Any, _term: Any, options: dict[str, float]) -> None:
    inputs, logps = batch()
    loss = made(**options)
    whole = loss(inputs, {"logps": logps})
    for bounds in ([0, 2, 4, 6, 8], [0, 6, 8], [0, 4, 8]):
        parts = [
            loss({"labels": inputs["labels"][start:end]}, {"logps": logps[start:end]})
            for start, end in itertools.pairwise(bounds)
        ]
        assert float(sum(part.loss_sum for part in parts)) == pytest.approx(whole.loss_sum.item(), rel=1e-12)
        assert sum(part.denominator for part in parts) == whole.denominator
        for name, value in whole.metrics.items():
            assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("junk", [-200.0, float("nan"), float("inf")])
@pytest.mark.parametrize("made", LOSSES)
def test_what_stands_where_nothing_is_trained_is_never_read(made: Any, junk: float) -> None:
    inputs, logps = batch()
    leaf = logps.masked_fill(inputs["labels"] == -100, junk).requires_grad_()
    wanted, found = made()(inputs, {"logps": logps}), made()(inputs, {"logps": leaf})
    assert found.loss_sum.item() == wanted.loss_sum.item()
    assert found.metrics == wanted.metrics
    assert bool(torch.isfinite(torch.autograd.grad(found.loss_sum, leaf)[0]).all())


@pytest.mark.parametrize("scores", [(-1e4, 0.0), (0.0, -1e4), (0.0, 0.0), (-1e-8, -1e-30)])
@pytest.mark.parametrize("made", LOSSES)
def test_absurd_probabilities_stay_finite_in_float32(made: Any, scores: tuple[float, float]) -> None:
    inputs: Any = {"labels": torch.tensor([[1, -100], [2, -100]])}
    logps = torch.tensor([[scores[0], 0.0], [scores[1], 0.0]], requires_grad=True)
    found = made()(inputs, {"logps": logps})
    assert bool(torch.isfinite(found.loss_sum))
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert bool(torch.isfinite(torch.autograd.grad(found.loss_sum, logps)[0]).all())


@pytest.mark.parametrize("logp", [-1e-12, -1e-5, -0.1, -0.6931, -0.6932, -3.0, -40.0, -700.0])
def test_the_odds_of_orpo_are_exact_near_zero_and_near_one(logp: float) -> None:
    """The rejected row has odds of 1, so that the ratio is the chosen row's odds; the loop above cannot go so far."""
    inputs: Any = {"labels": torch.tensor([[1], [2]])}
    logps = torch.tensor([[logp], [-math.log(2)]], dtype=torch.float64)
    found = ORPOLoss()(inputs, {"logps": logps}).metrics["log_odds_ratio"]
    wanted = logp - math.log(-math.expm1(logp))
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("made", LOSSES)
def test_no_trained_token_counts_nothing_and_keeps_the_graph(made: Any) -> None:
    logps = torch.randn(4, 3, requires_grad=True)
    found = made()({"labels": torch.full((4, 3), -100)}, {"logps": logps})
    assert (found.loss_sum.item(), found.denominator) == (0.0, 0)
    assert set(found.metrics.values()) == {0.0}
    assert not torch.autograd.grad(found.loss_sum, logps)[0].any()


@pytest.mark.parametrize("made", LOSSES)
def test_rows_that_are_no_pairs_are_refused(made: Any) -> None:
    inputs, logps = batch()
    with pytest.raises(ArgumentError, match=f"{made.__name__}: the batch has 3 rows, which are not pairs"):
        made()({"labels": inputs["labels"][:3]}, {"logps": logps[:3]})
    inputs["labels"][3] = -100
    with pytest.raises(DataError, match="row 3 of the batch has no trained token, but the other row of its pair has"):
        made()(inputs, {"logps": logps})


@pytest.mark.parametrize("made", LOSSES)
def test_it_says_that_pairs_stay_together_and_which_forward_it_needs(made: Any) -> None:
    assert made.rows_together == 2
    with pytest.raises(TrainingStateError, match=r"needs outputs\['logps'\].*task='causal_lm'"):
        made()({"labels": torch.ones(2, 1).long()}, {"embeddings": torch.zeros(2, 1)})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("SimPOLoss", {"beta": 0}, "SimPOLoss: beta=0; it must be a finite number above 0"),
        ("SimPOLoss", {"gamma": -1}, "SimPOLoss: gamma=-1; it must be a finite number of at least 0"),
        ("SimPOLoss", {"ignore_index": None}, "ignore_index=None"),
        ("CPOLoss", {"beta": float("nan")}, "CPOLoss: beta=nan"),
        ("CPOLoss", {"bc_coef": -0.1}, "CPOLoss: bc_coef=-0.1; it must be a finite number of at least 0"),
        ("CPOLoss", {"cpo_alpha": 1}, "unknown argument 'cpo_alpha'"),
        ("ORPOLoss", {"lambda_orpo": True}, "ORPOLoss: lambda_orpo=True"),
        ("ORPOLoss", {"beta": 0.1}, "unknown argument 'beta'"),
    ],
)
def test_options_that_have_no_meaning_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        registry().build(name, "loss", **options)
