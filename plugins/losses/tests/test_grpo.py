"""GRPO against a loop over its formula in plain floats; splits, masks, clipping, and what is refused."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle._registry import registry
from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_losses.grpo import GRPOLoss

ROWS, WIDTH = 5, 7
OPTIONS: list[dict[str, Any]] = [
    {},
    {"epsilon": 0.1, "epsilon_high": 0.4},
    {"beta": 0.3},
    {"entropy_coef": 0.2},
    {"epsilon": 0.05, "epsilon_high": 0.3, "beta": 0.1, "entropy_coef": -0.1},
]


def batch(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * scale

    labels = torch.randint(0, 11, (ROWS, WIDTH), generator=draw)
    labels[torch.rand(ROWS, WIDTH, generator=draw) < 0.4] = -100
    labels[:, -1] = -100
    labels[3] = -100  # a row that trains nothing
    outputs = {"logps": numbers(0.5) - 1, "entropies": numbers(0.1) + 1}
    arguments = {
        "advantages": numbers(1),
        "old_logps": outputs["logps"] + numbers(0.3),
        "ref_logps": outputs["logps"] + numbers(0.5),
    }
    return {"labels": labels}, outputs, arguments


def leaves(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone().requires_grad_() for name, value in outputs.items()}


def by_hand(
    inputs: Any, outputs: Any, old_logps: Any, ref_logps: Any, advantages: Any, epsilon: float = 0.2,
    epsilon_high: float | None = None, beta: float = 0.0, entropy_coef: float = 0.0,
) -> tuple[float, int, dict[str, float]]:  # fmt: skip
    high = epsilon if epsilon_high is None else epsilon_high
    total, count, clipped_share, moved = 0.0, 0, 0.0, 0.0
    for b, labels in enumerate(inputs["labels"].tolist()):
        terms, clips, moves = [], 0, []
        for t, label in enumerate(labels):
            if label == -100:
                continue
            logp, old, ref = (float(x[b, t]) for x in (outputs["logps"], old_logps, ref_logps))
            a, ratio = float(advantages[b, t]), math.exp(logp - old)
            bounded = min(max(ratio, 1 - epsilon), 1 + high)
            term = -min(ratio * a, bounded * a)
            clips += bounded * a < ratio * a
            moves.append(ratio - 1 - math.log(ratio))
            term += beta * (math.exp(ref - logp) - (ref - logp) - 1)
            terms.append(term - entropy_coef * float(outputs["entropies"][b, t]))
        if terms:
            total += sum(terms) / len(terms)
            clipped_share += clips / len(terms)
            moved += sum(moves) / len(terms)
            count += 1
    return total, count, {"clip_ratio": clipped_share, "approx_kl": moved}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_its_formula(options: dict[str, Any]) -> None:
    inputs, outputs, arguments = batch()
    result = GRPOLoss(**options)(inputs, outputs, **arguments)
    total, count, numbers = by_hand(inputs, outputs, **arguments, **options)
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert result.denominator == count == ROWS - 1
    assert {name: result.metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-12)
    assert numbers["clip_ratio"] > 0
    assert ("entropy" in result.metrics) == ("entropy_coef" in options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_its_gradient_is_that_of_its_value(options: dict[str, Any]) -> None:
    inputs, outputs, arguments = batch()

    def value(logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        made: Any = {"logps": logps, "entropies": entropies}
        return GRPOLoss(**options)(inputs, made, **arguments).loss_sum

    ready = leaves(outputs)
    assert torch.autograd.gradcheck(value, (ready["logps"], ready["entropies"]))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, ROWS - 1), unique=True, max_size=ROWS - 1), st.sampled_from(OPTIONS))
def test_any_split_of_the_rows_adds_up(cuts: list[int], options: dict[str, Any]) -> None:
    inputs, outputs, arguments = batch()
    ready, loss = leaves(outputs), GRPOLoss(**options)
    whole = loss(inputs, ready, **arguments)
    wanted = torch.autograd.grad(whole.loss_sum, ready["logps"])[0]
    bounds = [0, *sorted(cuts), ROWS]
    parts = []
    for start, end in itertools.pairwise(bounds):
        some = [{name: value[start:end] for name, value in part.items()} for part in (inputs, ready, arguments)]
        parts.append(loss(some[0], some[1], **some[2]))  # type: ignore[arg-type]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum, rtol=1e-12, atol=1e-12)
    assert sum(part.denominator for part in parts) == whole.denominator
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-12, abs=1e-12)
    added = torch.autograd.grad(torch.stack([part.loss_sum for part in parts]).sum(), ready["logps"])[0]
    torch.testing.assert_close(added, wanted, rtol=1e-12, atol=1e-12)


def test_without_old_logps_every_ratio_is_one_and_the_gradient_that_of_the_plain_policy() -> None:
    inputs, outputs, arguments = batch()
    ready = leaves(outputs)
    result = GRPOLoss()(inputs, ready, advantages=arguments["advantages"])
    mask = inputs["labels"] != -100
    counts = mask.sum(1, keepdim=True).clamp(min=1)
    gradient = torch.autograd.grad(result.loss_sum, ready["logps"])[0]
    torch.testing.assert_close(gradient, -arguments["advantages"] * mask / counts)
    assert result.loss_sum.item() == pytest.approx(-float((arguments["advantages"] * mask / counts).sum()), rel=1e-12)
    assert result.metrics == {"clip_ratio": 0.0, "approx_kl": 0.0}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_a_clipped_token_has_no_gradient_and_another_has_its_ratio(advantage: float, ratio: float) -> None:
    logps = torch.tensor([[-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    result = GRPOLoss(epsilon=0.2)(
        {"labels": torch.tensor([[3, -100]])},
        {"logps": logps},
        old_logps=[[-1.0 - math.log(ratio)]],
        advantages=[advantage],
    )
    gradient = torch.autograd.grad(result.loss_sum, logps)[0]
    clipped = (advantage > 0) == (ratio > 1)
    assert gradient.tolist() == [[pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-12), 0.0]]
    assert result.metrics["clip_ratio"] == float(clipped)


@pytest.mark.parametrize("junk", [-200.0, 200.0, float("nan"), float("inf"), float("-inf")])
def test_what_stands_where_nothing_is_trained_is_never_read(junk: float) -> None:
    inputs, outputs, arguments = batch()
    masked = inputs["labels"] == -100
    options = {"beta": 0.3, "entropy_coef": 0.1}
    wanted = GRPOLoss(**options)(inputs, outputs, **arguments)
    ready = leaves({name: value.masked_fill(masked, junk) for name, value in outputs.items()})
    spoiled = {name: value.masked_fill(masked, junk) for name, value in arguments.items()}
    result = GRPOLoss(**options)(inputs, ready, **spoiled)  # type: ignore[arg-type]
    assert result.loss_sum.item() == wanted.loss_sum.item()
    assert result.metrics == wanted.metrics
    for gradient in torch.autograd.grad(result.loss_sum, list(ready.values())):
        assert bool(torch.isfinite(gradient).all())
        assert not gradient[masked].any()


def test_absurd_ratios_stay_finite_in_float32() -> None:
    logps = torch.tensor([[-1.0, -900.0, 0.0]], requires_grad=True)
    result = GRPOLoss(beta=0.1)(
        {"labels": torch.tensor([[3, 4, -100]])},
        {"logps": logps},
        old_logps=[[-900.0, -1.0]],
        ref_logps=[[-900.0, -1.0]],
        advantages=[-1.0],
    )
    assert bool(torch.isfinite(result.loss_sum))
    assert bool(torch.isfinite(torch.autograd.grad(result.loss_sum, logps)[0]).all())
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_no_trained_token_counts_nothing_and_keeps_the_graph() -> None:
    logps = torch.randn(2, 3, requires_grad=True)
    result = GRPOLoss(beta=0.1)(
        {"labels": torch.full((2, 3), -100)}, {"logps": logps}, ref_logps=[[], []], advantages=[1.0, 2.0]
    )
    gradient = torch.autograd.grad(result.loss_sum, logps)[0]
    assert (result.loss_sum.item(), result.denominator) == (0.0, 0)
    assert not gradient.any()


def test_a_weight_multiplies_its_token_and_leaves_the_count() -> None:
    inputs, outputs, arguments = batch()
    weights = torch.rand(ROWS, WIDTH, dtype=torch.float64)
    result = GRPOLoss()({**inputs, "loss_scale": weights}, outputs, **arguments)
    total = 0.0
    for row in range(ROWS):
        mask = inputs["labels"][row] != -100
        for column in mask.nonzero().flatten().tolist():
            one = [
                {name: x[row : row + 1, column : column + 1] for name, x in p.items()}
                for p in (inputs, outputs, arguments)
            ]
            alone = GRPOLoss()(one[0], one[1], **one[2])  # type: ignore[arg-type]
            total += float(weights[row, column] * alone.loss_sum) / int(mask.sum())
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)


def test_a_reference_without_beta_is_measured_and_changes_nothing() -> None:
    inputs, outputs, arguments = batch()
    measured = GRPOLoss()(inputs, outputs, **arguments)
    plain = GRPOLoss()(inputs, outputs, old_logps=arguments["old_logps"], advantages=arguments["advantages"])
    assert measured.loss_sum.item() == plain.loss_sum.item()
    mask = inputs["labels"] != -100
    difference = arguments["ref_logps"] - outputs["logps"]
    kl = ((difference.exp() - difference - 1) * mask).sum(1) / mask.sum(1).clamp(min=1)
    assert measured.metrics["kl"] == pytest.approx(float(kl.sum()), rel=1e-12)
    assert "kl" not in plain.metrics


def test_what_it_says_of_moving_is_on_average_the_divergence_from_the_policy_that_drew_the_tokens() -> None:
    old, now = (torch.tensor(row, dtype=torch.float64).log_softmax(0) for row in ([0.0, 1.0, -2.0], [1.5, -0.5, 0.0]))
    average = 0.0
    for old_logp, logp in zip(old.tolist(), now.tolist(), strict=True):
        row: Any = {"labels": torch.tensor([[1]])}, {"logps": torch.tensor([[logp]], dtype=torch.float64)}
        found = GRPOLoss()(*row, old_logps=[[old_logp]], advantages=[1.0]).metrics["approx_kl"]
        average += math.exp(old_logp) * found
    assert average == pytest.approx(float((old.exp() * (old - now)).sum()), rel=1e-12)


@pytest.mark.parametrize("moved", [1e-2, -1e-3, 1e-4])
def test_a_small_move_is_measured_in_float32_too(moved: float) -> None:
    logps = torch.tensor([[moved]])
    found = GRPOLoss(beta=1.0)(
        {"labels": torch.tensor([[1]])}, {"logps": logps}, old_logps=[[0.0]], ref_logps=[[0.0]], advantages=[0.0]
    )
    assert found.metrics["approx_kl"] == pytest.approx(math.expm1(moved) - moved, rel=1e-2)
    assert float(found.loss_sum) == found.metrics["kl"] == pytest.approx(math.expm1(-moved) + moved, rel=1e-2)


def test_what_a_sampler_returned_goes_to_its_tokens() -> None:
    inputs, outputs, arguments = batch()
    mask = inputs["labels"] != -100
    ragged = {
        name: [row[kept].tolist() for row, kept in zip(value, mask, strict=True)] for name, value in arguments.items()
    }
    found = GRPOLoss(beta=0.2)(inputs, outputs, **ragged)  # type: ignore[arg-type]
    assert found.loss_sum.item() == float(GRPOLoss(beta=0.2)(inputs, outputs, **arguments).loss_sum)


def test_a_subclass_replaces_one_step() -> None:
    class TokenMean(GRPOLoss):
        """The mean over all tokens."""

        def _total(self, terms: torch.Tensor, where: Any) -> torch.Tensor:
            return where.sums(terms).sum()  # type: ignore[no-any-return]

        def _denominator(self, where: Any) -> int:
            return sum(where.counts)

    inputs, outputs, arguments = batch()
    found = TokenMean()(inputs, outputs, **arguments)
    lengths = (inputs["labels"] != -100).sum(1)
    alone = [
        GRPOLoss()(*({name: x[r : r + 1] for name, x in part.items()} for part in (inputs, outputs)),
                   **{name: x[r : r + 1] for name, x in arguments.items()})
        for r in range(ROWS)
    ]  # fmt: skip
    wanted = sum(one.loss_sum.item() * int(n) for one, n in zip(alone, lengths, strict=True))
    assert found.loss_sum.item() == pytest.approx(wanted, rel=1e-12)
    assert found.denominator == int(lengths.sum())


def call(options: dict[str, Any], **arguments: Any) -> LossOutput:
    inputs, outputs, _ = batch()
    return GRPOLoss(**options)(inputs, {"logps": outputs["logps"]}, **arguments)


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({}, {}, ArgumentError, "GRPOLoss: advantages are missing.*pass advantages="),
        ({"beta": 0.1}, {"advantages": [1] * ROWS}, ArgumentError, "beta=0.1.*ref_logps are missing.*or set beta=0"),
        ({}, {"advantages": [1, 2]}, ArgumentError, "advantages has 2 entries, the batch has 5 rows"),
        ({}, {"advantages": [[1] * 6] * ROWS}, ArgumentError, "advantages of row 0 has 6 numbers"),
        ({"entropy_coef": 0.1}, {"advantages": [1] * ROWS}, TrainingStateError, r"needs outputs\['entropies'\]"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused(options: Any, arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(options, **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, "epsilon=-0.1; it must be a finite number of at least 0"),
        ({"epsilon": "0.2"}, "epsilon='0.2'"),
        ({"epsilon_high": float("nan")}, "epsilon_high=nan"),
        ({"beta": -1}, "beta=-1; it must be a finite number of at least 0"),
        ({"beta": True}, "beta=True"),
        ({"entropy_coef": None}, "entropy_coef=None; it must be a finite number$"),
        ({"ignore_index": 1.0}, "ignore_index=1.0; it must be a whole number"),
        ({"clip_range": 0.2}, "unknown argument 'clip_range'"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        registry().build("GRPOLoss", "loss", **options)


def test_it_asks_for_entropies_only_with_their_weight() -> None:
    assert GRPOLoss(entropy_coef=0.1).require_entropy is True
    assert GRPOLoss().require_entropy is False
    assert GRPOLoss().splittable is True
