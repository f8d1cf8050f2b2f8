"""Tinker's losses against loops over single tokens in plain floats, written from the published formulas."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twinkle._registry import registry
from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError, DataError

ROWS, WIDTH = 5, 7
POLICIES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("dro", {}),
    ("dro", {"beta": 1.0}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
]
DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}


def built(name: str, **options: Any) -> Any:
    return registry().build(name, "loss", **options)


def batch(name: str, seed: int = 0) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """Return inputs, log-probabilities and arguments: ratios on both sides of every bound, a row without targets."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * scale

    labels = torch.randint(0, 11, (ROWS, WIDTH), generator=draw)
    labels[torch.rand(ROWS, WIDTH, generator=draw) < 0.3] = -100
    labels[3] = -100
    logps = numbers(0.5) - 2
    arguments = {"old_logps": logps + numbers(0.7), "advantages": numbers(1)}
    arguments["old_logps"][1] -= 1.2  # ratios above 4
    arguments["advantages"][:, 0] = 0.0
    if name == "gspo":
        arguments["sequence_ratio_mask"] = (torch.rand(ROWS, WIDTH, generator=draw) < 0.6).double()
        arguments["sequence_ratio_mask"][2] = 0.0
    return {"labels": labels}, logps.requires_grad_(), arguments


def called(loss: Any, inputs: Any, logps: Tensor, arguments: Any) -> tuple[LossOutput, Tensor]:
    result = loss(inputs, {"logps": logps}, **arguments)
    (gradient,) = torch.autograd.grad(result.loss_sum, logps)
    return result, gradient


class ByHand:
    """Value and derivative by one token's lp, from the formulas; r is a number here, and so is its derivative."""

    def __init__(self, options: dict[str, Any], bounds: tuple[float, float]) -> None:
        self.options, self.bounds = options, bounds

    def importance_sampling(self, lp: float, q: float, a: float, s: float) -> tuple[float, float]:
        r = math.exp(lp - q)
        return -r * a, -r * a

    def ppo(self, lp: float, q: float, a: float, s: float) -> tuple[float, float]:
        return self._smaller(math.exp(lp - q), a)

    def gspo(self, lp: float, q: float, a: float, s: float) -> tuple[float, float]:
        return self._smaller(math.exp(s + lp - lp), a)

    def cispo(self, lp: float, q: float, a: float, s: float) -> tuple[float, float]:
        weight = min(max(math.exp(lp - q), self.bounds[0]), self.bounds[1])
        return -weight * lp * a, -weight * a

    def dro(self, lp: float, q: float, a: float, s: float) -> tuple[float, float]:
        beta = self.options.get("beta", 0.05)
        return -(lp * a - 0.5 * beta * (lp - q) ** 2), -(a - beta * (lp - q))

    def _smaller(self, r: float, a: float) -> tuple[float, float]:
        clamped = min(max(r, self.bounds[0]), self.bounds[1])
        return (-r * a, -r * a) if r * a <= clamped * a else (-clamped * a, 0.0)


def by_hand(
    name: str, inputs: Any, logps: Tensor, arguments: Any, options: dict[str, Any]
) -> tuple[float, list[list[float]]]:
    low, high = DEFAULTS.get(name, (0.0, math.inf))
    low, high = options.get("clip_low_threshold", low), options.get("clip_high_threshold", high)
    total, slopes = 0.0, [[0.0] * WIDTH for _ in range(ROWS)]
    lp, q, a = (x.tolist() for x in (logps, arguments["old_logps"], arguments["advantages"]))
    for b in range(ROWS):
        there = [t for t in range(WIDTH) if inputs["labels"][b, t] != -100]
        mask = arguments.get("sequence_ratio_mask")
        chosen = [t for t in there if mask is not None and mask[b, t] != 0]
        s = sum(lp[b][t] - q[b][t] for t in chosen) / len(chosen) if chosen else 0.0
        for t in there:
            bounds = [
                float(arguments[key][b][t]) if key in arguments else bound
                for key, bound in (("clip_low_threshold", low), ("clip_high_threshold", high))
            ]
            formula: Callable[..., tuple[float, float]] = getattr(ByHand(options, (bounds[0], bounds[1])), name)
            value, slopes[b][t] = formula(lp[b][t], q[b][t], a[b][t], s)
            total += value * float(inputs["loss_scale"][b, t] if "loss_scale" in inputs else 1)
            slopes[b][t] *= float(inputs["loss_scale"][b, t] if "loss_scale" in inputs else 1)
    return total, slopes


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_a_policy_gradient_is_its_formula(name: str, options: dict[str, Any], seed: int) -> None:
    inputs, logps, arguments = batch(name, seed)
    result, gradient = called(built(name, **options), inputs, logps, arguments)
    total, slopes = by_hand(name, inputs, logps, arguments, options)
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert result.denominator == int((inputs["labels"] != -100).sum())
    assert not result.metrics


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_bounds_of_tokens_take_the_place_of_the_losses_own(name: str) -> None:
    inputs, logps, arguments = batch(name)
    draw = torch.Generator().manual_seed(5)
    arguments["clip_low_threshold"] = torch.rand(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    result, gradient = called(built(name), inputs, logps, arguments)
    total, slopes = by_hand(name, inputs, logps, arguments, {})
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    arguments["clip_low_threshold"] += 5.0
    with pytest.raises(ArgumentError, match="clip_low_threshold is above its clip_high_threshold"):
        built(name)(inputs, {"logps": logps}, **arguments)


@pytest.mark.parametrize("name", POLICIES)
def test_weights_multiply_each_term(name: str) -> None:
    inputs, logps, arguments = batch(name)
    inputs["loss_scale"] = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    result, gradient = called(built(name), inputs, logps, arguments)
    total, slopes = by_hand(name, inputs, logps, arguments, {})
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POLICIES)
def test_rows_add_up_in_any_split(name: str) -> None:
    inputs, logps, arguments = batch(name)
    whole, _ = called(built(name), inputs, logps, arguments)
    parts = [
        built(name)(
            {"labels": inputs["labels"][a:b]}, {"logps": logps[a:b]}, **{k: v[a:b] for k, v in arguments.items()}
        )
        for a, b in itertools.pairwise([0, 1, 4, ROWS])
    ]
    assert sum(part.loss_sum.item() for part in parts) == pytest.approx(whole.loss_sum.item(), rel=1e-12)
    assert sum(part.denominator for part in parts) == whole.denominator


@pytest.mark.parametrize("name", POLICIES)
def test_where_every_mask_is_zero_nothing_is_nan(name: str) -> None:
    inputs, logps, arguments = batch(name)
    arguments = {key: torch.zeros_like(value) if key != "old_logps" else value for key, value in arguments.items()}
    result, gradient = called(built(name), inputs, logps, arguments)
    assert result.loss_sum.item() == 0 or name == "dro"
    assert bool(gradient.isfinite().all())
    inputs["labels"][:] = -100
    result, gradient = called(built(name), inputs, logps, arguments)
    assert (result.loss_sum.item(), result.denominator) == (0.0, 0)
    assert not gradient.any()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_placeholder_under_an_advantage_of_zero_does_no_harm(name: str) -> None:
    inputs, logps, arguments = batch(name)
    wanted, expected = called(built(name), inputs, logps, arguments)
    if name == "gspo":
        arguments["sequence_ratio_mask"][:, 0] = 0
        wanted, expected = called(built(name), inputs, logps, arguments)
    arguments["old_logps"][:, 0] = -99999.0
    found, gradient = called(built(name), inputs, logps, arguments)
    assert found.loss_sum.item() == wanted.loss_sum.item()
    assert torch.equal(gradient, expected)


def test_a_clipped_ratio_that_overflows_has_no_gradient_and_one_that_counts_is_told() -> None:
    inputs = {"labels": torch.tensor([[3]])}
    for advantage, finite in ((1.0, True), (-1.0, False)):
        logps = torch.tensor([[-1.0]], requires_grad=True)
        given = {"old_logps": [[-200.0]], "advantages": [[advantage]]}
        result, gradient = called(built("ppo"), inputs, logps, given)
        assert bool(result.loss_sum.isfinite()) is finite
        if finite:
            assert result.loss_sum.item() == pytest.approx(-1.2)
            assert gradient.item() == 0.0


def test_one_row_of_lists_is_read_as_tensors_are() -> None:
    inputs, logps, arguments = batch("ppo")
    lists = {key: value.tolist() for key, value in arguments.items()}
    first, second = (called(built("ppo"), inputs, logps, given)[0].loss_sum.item() for given in (arguments, lists))
    assert first == second


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_missing_is_named(name: str) -> None:
    inputs, logps, arguments = batch(name)
    optional = {"clip_low_threshold", "clip_high_threshold"}
    for key in arguments.keys() - optional:
        rest = {other: value for other, value in arguments.items() if other != key}
        with pytest.raises(ArgumentError, match=f"{key}.* is missing"):
            built(name)(inputs, {"logps": logps}, **rest)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ppo", {"clip_low_threshold": 1.3}, "above clip_high_threshold=1.2"),
        ("ppo", {"clip_low": 0.8}, "clip_low_threshold"),
        ("cispo", {"clip_high_threshold": "4"}, "finite number"),
        ("gspo", {"clip_low_threshold": -0.1}, "at least 0"),
        ("dro", {"beta": float("nan")}, "finite number"),
        ("importance_sampling", {"beta": 1.0}, "beta"),
    ],
)
def test_options_outside_their_range_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        built(name, **options)


@pytest.mark.parametrize("several", [None, 1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_its_formula(several: int | None, weighted: bool) -> None:
    draw = torch.Generator().manual_seed(4)
    shape = (ROWS, WIDTH) if several is None else (ROWS, WIDTH, several)
    labels = torch.randint(0, 11, shape, generator=draw)
    labels[torch.rand(shape, generator=draw) < 0.3] = -100
    logps = torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
    weights = torch.randn(shape, generator=draw, dtype=torch.float64)  # negative ones and fractions
    weights[0] = 0.0
    inputs: dict[str, Any] = {"labels": labels, **({"loss_scale": weights} if weighted else {})}
    result, gradient = called(built("cross_entropy"), inputs, logps, {})
    total, positions = 0.0, set()
    for place in itertools.product(*map(range, shape)):
        slope = 0.0
        if labels[place] != -100:
            slope = -float(weights[place]) if weighted else -1.0
            total += slope * float(logps[place].detach())
            positions.add(place[:2])
        assert gradient[place].item() == pytest.approx(slope, rel=1e-12)
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert result.denominator == len(positions)


def test_cross_entropy_refuses_shapes_that_do_not_fit() -> None:
    labels, logps = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    with pytest.raises(DataError, match=r"loss_scale is \[2, 4\] and labels \[2, 3\]"):
        built("cross_entropy")({"labels": labels, "loss_scale": torch.ones(2, 4)}, {"logps": logps})
    with pytest.raises(DataError, match=r"labels are \[2, 3\] and logps \[2, 3, 2\]"):
        built("cross_entropy")({"labels": labels}, {"logps": torch.zeros(2, 3, 2)})


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_gradient_refuses_several_targets(name: str) -> None:
    inputs, logps, arguments = batch(name)
    several = {"labels": inputs["labels"][..., None].repeat(1, 1, 2)}
    with pytest.raises(DataError, match="one label"):
        built(name)(several, {"logps": logps[..., None].repeat(1, 1, 2)}, **arguments)
