"""The family of policy gradients against a loop over one token at a time, written from the papers; splits, slopes."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle._registry import registry

ROWS, WIDTH = 5, 7
ALL = {"beta": 0.1, "entropy_coef": 0.05, "tis_cap": 1.2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("GRPOLoss", ALL),
    ("GSPOLoss", {"epsilon": 0.03, "epsilon_high": 0.04}),
    ("GSPOLoss", ALL),
    ("BNPOLoss", {}),
    ("BNPOLoss", ALL | {"epsilon_high": 0.4}),
    ("DAPOLoss", {}),
    ("DAPOLoss", {"tis_cap": 0.9, "entropy_coef": -0.1}),
    ("DRGRPOLoss", {}),
    ("DRGRPOLoss", ALL | {"max_completion_length": 9}),
    ("PPOLoss", {}),
    ("PPOLoss", ALL | {"dual_clip": 1.3, "epsilon": 0.1}),
    ("CISPOLoss", {"epsilon_high": 0.1}),
    ("CISPOLoss", ALL),
    ("SAPOLoss", {}),
    ("SAPOLoss", ALL | {"tau_pos": 0.7, "tau_neg": 1.3, "epsilon": 0.4}),
    ("ReinforceLoss", {}),
    ("ReinforceLoss", {"per": "token", "importance_ratio": True}),
    ("ReinforceLoss", ALL | {"importance_ratio": True}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def batch() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)

    def numbers(scale: float) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * scale

    labels = torch.randint(0, 11, (ROWS, WIDTH), generator=draw)
    labels[torch.rand(ROWS, WIDTH, generator=draw) < 0.4] = -100
    labels[:, -1] = -100
    labels[3] = -100  # a row that trains nothing: an empty completion
    outputs = {"logps": numbers(0.5) - 1, "entropies": numbers(0.1) + 1}
    old = outputs["logps"] + numbers(0.4)
    arguments = {"advantages": numbers(1), "old_logps": old}
    arguments |= {"ref_logps": outputs["logps"] + numbers(0.5), "rollout_logps": old + numbers(0.2)}
    return {"labels": labels}, outputs, arguments


def loss_of(name: str, options: dict[str, Any]) -> Any:
    return registry().build(name, "loss", **options)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def k3(d: float) -> float:
    return math.exp(d) - d - 1


def policy_term(name: str, o: dict[str, Any], r: float, a: float, logp: float) -> tuple[float, bool]:
    """Return a token's policy term, and whether the loss calls it clipped."""
    low = o.get("epsilon", 0.2)
    high = o.get("epsilon_high", 0.28 if name == "DAPOLoss" else low)
    if name == "CISPOLoss":
        return -min(r, 1 + high) * a * logp, r > 1 + high
    if name == "SAPOLoss":
        tau = o.get("tau_pos", 1.0) if a > 0 else o.get("tau_neg", 1.0)
        return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a, abs(r - 1) > low
    if name == "ReinforceLoss":
        return -a * (r if o.get("importance_ratio") else logp), False
    objective = min(r * a, clip(r, 1 - low, 1 + high) * a)
    if o.get("dual_clip") and a < 0:
        objective = max(objective, o["dual_clip"] * a)
    return -objective, objective != r * a


def by_hand(
    name: str, o: dict[str, Any], inputs: Any, outputs: Any, arguments: Any
) -> tuple[float, float, dict[str, float]]:
    """Return the mean over the step, the denominator, and the means for the log."""
    rows: list[list[dict[str, float]]] = []
    for b, labels in enumerate(inputs["labels"].tolist()):
        tokens = [t for t, label in enumerate(labels) if label != -100]
        both = [(float(outputs["logps"][b, t]), float(arguments["old_logps"][b, t])) for t in tokens]
        whole = sum(logp - old for logp, old in both) / max(len(tokens), 1)
        rows.append([])
        for t, (logp, old) in zip(tokens, both, strict=True):
            a, ref, rollout = (float(arguments[key][b, t]) for key in ("advantages", "ref_logps", "rollout_logps"))
            r = math.exp(whole if name == "GSPOLoss" else logp - old)
            term, clipped = policy_term(name, o, r, a, logp)
            weight, entropy = math.exp(old - rollout), float(outputs["entropies"][b, t])
            cap = o.get("tis_cap", math.inf)
            term *= min(weight, cap) if "tis_cap" in o else 1
            term += o.get("beta", 0) * k3(ref - logp) - o.get("entropy_coef", 0) * entropy
            found = {"term": term, "clip_ratio": clipped, "approx_kl": k3(logp - old), "kl": k3(ref - logp)}
            found |= {"entropy": entropy, "rollout_kl": k3(old - rollout), "tis_clip_ratio": weight > cap}
            rows[-1].append(found)
    return means(name, o, rows)


def means(name: str, o: dict[str, Any], rows: list[list[dict[str, float]]]) -> tuple[float, float, dict[str, float]]:
    sequences, tokens = sum(bool(row) for row in rows), sum(len(row) for row in rows)
    per_token = name in ("BNPOLoss", "DAPOLoss", "PPOLoss", "CISPOLoss") or o.get("per") == "token"
    count = tokens if per_token else sequences

    def mean(key: str) -> float:
        return sum(sum(token[key] for token in row) / (tokens if per_token else len(row)) for row in rows if row)

    names = ("clip_ratio", "approx_kl", "kl", "entropy", "rollout_kl", "tis_clip_ratio")
    numbers = {key: mean(key) / (1 if per_token else sequences) for key in names}
    loss = mean("term") / (1 if per_token else sequences)
    if name in ("DRGRPOLoss", "ReinforceLoss"):
        count = len(rows) * o.get("max_completion_length", 1024) if name == "DRGRPOLoss" else count
        loss = sum(token["term"] for row in rows for token in row) / count
    if name == "DRGRPOLoss":
        numbers = {key: value * sequences / len(rows) for key, value in numbers.items()}
    return loss, count, numbers


@every_case
def test_it_is_its_formula(name: str, options: dict[str, Any]) -> None:
    inputs, outputs, arguments = batch()
    result = loss_of(name, options)(inputs, outputs, **arguments)
    loss, count, numbers = by_hand(name, options, inputs, outputs, arguments)
    assert float(result.loss_sum) / result.denominator == pytest.approx(loss, rel=1e-12)
    assert result.denominator == count
    absent = set() if options.get("entropy_coef") else {"entropy"}
    absent |= set() if options.get("tis_cap") else {"tis_clip_ratio"}
    absent |= {"clip_ratio"} if name == "ReinforceLoss" else set()
    assert result.metrics.keys() == numbers.keys() - absent
    found = {key: value / result.denominator for key, value in result.metrics.items()}
    assert found == pytest.approx({key: numbers[key] for key in found}, rel=1e-12)
    assert found.get("clip_ratio", 1) > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] != "CISPOLoss"], ids=str)
def test_its_gradient_is_that_of_its_value(name: str, options: dict[str, Any]) -> None:
    inputs, outputs, arguments = batch()
    loss = loss_of(name, options)

    def value(logps: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss(inputs, {**outputs, "logps": logps}, **arguments).loss_sum
        return found

    assert torch.autograd.gradcheck(value, outputs["logps"].clone().requires_grad_())


@pytest.mark.parametrize("options", [{"epsilon_high": 0.1}, {"beta": 0.1, "tis_cap": 1.2}], ids=str)
def test_cispo_gives_each_token_its_capped_weight(options: dict[str, Any]) -> None:
    inputs, outputs, arguments = batch()
    found = gradient("CISPOLoss", options, lambda arguments: arguments)
    mask = inputs["labels"] != -100
    for b, t in itertools.product(range(ROWS), range(WIDTH)):
        logp, old, a, ref, rollout = (
            float(x[b, t])
            for x in (
                outputs["logps"],
                *(arguments[k] for k in ("old_logps", "advantages", "ref_logps", "rollout_logps")),
            )
        )
        bound, cap = 1 + options.get("epsilon_high", 0.2), options.get("tis_cap")
        wanted = -min(math.exp(logp - old), bound) * a * (min(math.exp(old - rollout), cap) if cap else 1)
        wanted += options.get("beta", 0.0) * (1 - math.exp(ref - logp))
        assert float(found[b, t]) == pytest.approx(wanted / int(mask.sum()) if mask[b, t] else 0.0, rel=1e-12)


@pytest.mark.sample(2)
@every_case
@settings(deadline=None, max_examples=5)
@given(st.lists(st.integers(1, ROWS - 1), unique=True, max_size=ROWS - 1))
def test_any_split_of_the_rows_adds_up(name: str, options: dict[str, Any], cuts: list[int]) -> None:
    inputs, outputs, arguments = batch()
    loss = loss_of(name, options)
    whole, parts = loss(inputs, outputs, **arguments), []
    for start, end in itertools.pairwise([0, *sorted(cuts), ROWS]):
        some = [{key: value[start:end] for key, value in part.items()} for part in (inputs, outputs, arguments)]
        parts.append(loss(some[0], some[1], **some[2]))
    assert sum(part.denominator for part in parts) == whole.denominator
    assert float(sum(part.loss_sum for part in parts)) == pytest.approx(float(whole.loss_sum), rel=1e-12)
    for key, value in whole.metrics.items():
        assert sum(part.metrics[key] for part in parts) == pytest.approx(value, rel=1e-12, abs=1e-12)


def gradient(name: str, options: dict[str, Any], change: Callable[[Any], Any] | None = None) -> torch.Tensor:
    """Return the gradient by each log-probability of a step whose policy has not moved since it sampled."""
    inputs, outputs, arguments = batch()
    logps = outputs["logps"].clone().requires_grad_()
    kept = {"advantages": arguments["advantages"]} | (change(arguments) if change else {})
    result = loss_of(name, options)(inputs, {**outputs, "logps": logps}, **kept)
    return torch.autograd.grad(result.loss_sum / result.denominator, logps)[0]


@pytest.mark.parametrize("name", ["BNPOLoss", "DAPOLoss", "PPOLoss", "CISPOLoss", "SAPOLoss", "GRPOLoss", "DRGRPOLoss"])
def test_before_the_policy_moves_all_of_them_are_the_plain_gradient_with_their_own_mean(name: str) -> None:
    inputs, _, arguments = batch()
    mask = inputs["labels"] != -100
    plain = -arguments["advantages"] * mask
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    wanted = {"GRPOLoss": plain / lengths / 4, "SAPOLoss": plain / lengths / 4, "DRGRPOLoss": plain / 1024 / ROWS}
    torch.testing.assert_close(gradient(name, {}), wanted.get(name, plain / mask.sum()))


def test_the_samplers_weights_are_held_constant_also_where_the_old_policy_is_the_current_one() -> None:
    _, outputs, arguments = batch()
    rollout = arguments["rollout_logps"]
    found = gradient("BNPOLoss", {"tis_cap": 1.5}, lambda _: {"rollout_logps": rollout})
    weights = (outputs["logps"] - rollout).exp().clamp(max=1.5)
    assert 0 < int((weights == 1.5).sum()) < weights.numel()
    torch.testing.assert_close(found, gradient("BNPOLoss", {}) * weights)


def test_the_second_bound_of_ppo_ends_the_gradient_of_what_is_to_be_unlearnt_and_is_too_probable() -> None:
    def at(ratio: float, advantage: float) -> float:
        logps = torch.tensor([[-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
        old = [[-1.0 - math.log(ratio)]]
        result = loss_of("PPOLoss", {"dual_clip": 3.0})(
            {"labels": torch.tensor([[3, -100]])}, {"logps": logps}, old_logps=old, advantages=[advantage]
        )
        return float(torch.autograd.grad(result.loss_sum, logps)[0][0, 0])

    assert at(2.9, -1.0) == pytest.approx(2.9)
    assert at(3.1, -1.0) == 0.0
    assert at(0.7, 1.0) == pytest.approx(-0.7)


def test_gspo_moves_all_tokens_of_a_sequence_alike() -> None:
    inputs, _, arguments = batch()
    rows = {"advantages": [1.0, -1.0, 0.5, 1.0, 2.0], "old_logps": arguments["old_logps"]}
    found = gradient("GSPOLoss", {"epsilon": 5.0}, lambda _: rows)
    for row, mask in zip(found, inputs["labels"] != -100, strict=True):
        assert len(set(row[mask].tolist())) == min(int(mask.sum()), 1)
