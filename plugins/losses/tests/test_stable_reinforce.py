"""`stable_reinforce` against a loop over single tokens in plain floats, written from the formula in its docstring."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twinkle._registry import registry
from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError

ROWS, WIDTH = 5, 8
SEQUENCES = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 0, 0, 2, 2, 2],  # two turns, a prompt between them
        [1, 1, 1, 2, 2, 2, 2, 2],  # two sequences back to back
        [0, 0, 0, 0, 0, 0, 0, 0],  # nothing was sampled
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
)
OPTIONS: list[dict[str, Any]] = [{}, {"kl_coeff": 0.3}, {"weight_cap": 0.8}, {"kl_coeff": 1.5, "weight_cap": 3.0}]


def built(**options: Any) -> Any:
    return registry().build("stable_reinforce", "loss", **options)


def batch(seed: int = 0) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """Return inputs, log-probabilities and arguments: weights on both sides of each cap, padding, an advantage of 0."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * scale

    labels = torch.randint(0, 11, (ROWS, WIDTH), generator=draw)
    labels[0, 6:] = -100
    logps = numbers(0.5) - 2
    old = logps + numbers(0.3)
    old[2, :3] -= 1.0  # a weight far above the caps
    old[4] += 0.5  # and one far below
    advantages = numbers(1) * (SEQUENCES > 0)
    advantages[1, 5] = 0.0
    return (
        {"labels": labels},
        logps.requires_grad_(),
        {"old_logps": old, "advantages": advantages, "sampled_sequence": SEQUENCES},
    )


def called(loss: Any, inputs: Any, logps: Tensor, arguments: Any) -> tuple[LossOutput, Tensor]:
    result = loss(inputs, {"logps": logps}, **arguments)
    (gradient,) = torch.autograd.grad(result.loss_sum, logps)
    return result, gradient


def by_hand(
    inputs: Any, logps: Tensor, arguments: Any, kl_coeff: float = 0.0, weight_cap: float = 2.0
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Return the sum, its derivative by each token's lp, and the metrics."""
    total, slopes = 0.0, [[0.0] * WIDTH for _ in range(ROWS)]
    metrics = {"kl": 0.0, "weight": 0.0, "truncated": 0.0, "twinkle_own_formula": 0.0}
    lp, q, a = (x.tolist() for x in (logps, arguments["old_logps"], arguments["advantages"]))
    for b in range(ROWS):
        there = [t for t in range(WIDTH) if inputs["labels"][b, t] != -100]
        metrics["twinkle_own_formula"] += len(there)
        for number in (1, 2):
            places = [t for t in there if arguments["sampled_sequence"][b, t] == number]
            ratio = math.exp(math.fsum(lp[b][t] - q[b][t] for t in places))
            weight = min(ratio, weight_cap)
            for t in places:
                r = math.exp(lp[b][t] - q[b][t])
                kl = r - 1 - (lp[b][t] - q[b][t])
                scale = float(inputs["loss_scale"][b, t]) if "loss_scale" in inputs else 1.0
                total += scale * (-weight * a[b][t] * lp[b][t] + kl_coeff * kl)
                slopes[b][t] = scale * (-weight * a[b][t] + kl_coeff * (r - 1))
                metrics["kl"] += kl
                metrics["weight"] += weight
                metrics["truncated"] += ratio > weight_cap
    return total, slopes, metrics


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_gradient_and_metrics_are_those_of_the_formula(options: dict[str, Any], seed: int) -> None:
    inputs, logps, arguments = batch(seed)
    result, gradient = called(built(**options), inputs, logps, arguments)
    total, slopes, metrics = by_hand(inputs, logps, arguments, **options)
    # float64 on both sides: a few hundred roundings of 1.1e-16 each
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert result.metrics == pytest.approx(metrics, rel=1e-12)
    assert result.denominator == int((inputs["labels"] != -100).sum())


def test_the_batch_has_weights_on_both_sides_of_the_cap() -> None:
    result, _ = called(built(), *batch())
    assert 0 < result.metrics["truncated"] < int((SEQUENCES > 0).sum())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_is_the_finite_difference_with_the_weights_held(options: dict[str, Any]) -> None:
    inputs, logps, arguments = batch()
    _, gradient = called(built(**options), inputs, logps, arguments)
    cap, coeff, step = options.get("weight_cap", 2.0), options.get("kl_coeff", 0.0), 1e-6
    weights: dict[tuple[int, int], float] = {}
    for b in range(ROWS):
        for number in (1, 2):
            places = (SEQUENCES[b] == number) & (inputs["labels"][b] != -100)
            weights[b, number] = min(
                math.exp(float((logps.detach()[b] - arguments["old_logps"][b])[places].sum())), cap
            )

    def term(b: int, t: int, lp: float) -> float:
        if inputs["labels"][b, t] == -100 or SEQUENCES[b, t] == 0:
            return 0.0
        log_ratio = lp - float(arguments["old_logps"][b, t])
        weight = weights[b, int(SEQUENCES[b, t])]
        return -weight * float(arguments["advantages"][b, t]) * lp + coeff * (math.exp(log_ratio) - 1 - log_ratio)

    for b in range(ROWS):
        for t in range(WIDTH):
            lp = float(logps.detach()[b, t])
            slope = (term(b, t, lp + step) - term(b, t, lp - step)) / (2 * step)
            # central difference: h^2/6 of a third derivative of order 1, and 1e-16/h of rounding
            assert float(gradient[b, t]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_sums_add_over_any_split_of_the_rows(cut: int) -> None:
    inputs, logps, arguments = batch()
    inputs["loss_scale"] = torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    loss = built(kl_coeff=0.2)
    whole, gradient = called(loss, inputs, logps, arguments)
    total, slopes, _ = by_hand(inputs, logps, arguments, kl_coeff=0.2)
    assert whole.loss_sum.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    parts = []
    for rows in (slice(0, cut), slice(cut, ROWS)):
        part = {name: value[rows] for name, value in inputs.items()}
        own = logps.detach()[rows].requires_grad_()
        parts.append(called(loss, part, own, {name: value[rows] for name, value in arguments.items()}))
    assert sum(part.loss_sum.item() for part, _ in parts) == pytest.approx(whole.loss_sum.item(), rel=1e-12)
    assert sum(part.denominator for part, _ in parts) == whole.denominator
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient, rtol=1e-12, atol=1e-12)
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part, _ in parts) == pytest.approx(value, rel=1e-12)


def test_on_policy_it_is_reinforce() -> None:
    inputs, logps, arguments = batch()
    arguments["old_logps"] = logps.detach().clone()
    result, gradient = called(built(kl_coeff=0.7), inputs, logps, arguments)
    trained = inputs["labels"] != -100
    torch.testing.assert_close(gradient, torch.where(trained, -arguments["advantages"], 0.0))
    assert result.metrics["kl"] == result.metrics["truncated"] == 0.0


def test_without_sequence_numbers_a_row_is_one_sequence() -> None:
    inputs, logps, arguments = batch()
    arguments["sampled_sequence"] = None
    single = built()(inputs, {"logps": logps}, **arguments)
    arguments["sampled_sequence"] = torch.ones_like(SEQUENCES)
    assert single.loss_sum.item() == built()(inputs, {"logps": logps}, **arguments).loss_sum.item()


def test_an_overflowing_ratio_is_capped_and_moves_nothing_else() -> None:
    inputs, logps, arguments = batch()
    arguments["old_logps"][0, 2] = -1e4
    result, gradient = called(built(), inputs, logps, arguments)
    assert math.isfinite(result.loss_sum.item())
    torch.testing.assert_close(gradient[0, 2:6], -2.0 * arguments["advantages"][0, 2:6])


def test_wrong_arguments_are_named() -> None:
    inputs, logps, arguments = batch()
    for options in ({"kl_coeff": -0.1}, {"kl_coeff": "high"}, {"weight_cap": 0.0}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            built(**options)
    astray = {**arguments, "advantages": torch.ones(ROWS, WIDTH, dtype=torch.float64)}
    with pytest.raises(ArgumentError, match=r"must be 0 at tokens that were not sampled, got 1\.0 at token 0"):
        built()(inputs, {"logps": logps}, **astray)
    with pytest.raises(ArgumentError, match="sampled_sequence must hold whole numbers"):
        built()(inputs, {"logps": logps}, **{**arguments, "sampled_sequence": SEQUENCES - 1})
    with pytest.raises(ArgumentError, match="old_logps"):
        built()(inputs, {"logps": logps}, **{**arguments, "old_logps": None})
