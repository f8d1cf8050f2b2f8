"""Metrics of policies against loops over one token at a time, in plain Python; parts, ranks, and what is refused."""

import math
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import ArgumentError, Unsupported
from twinkle_metrics.policy import CISPOMetric, GRPOMetric, GSPOMetric

IGNORED = -100
LABELS = [[5, 6, 7, IGNORED], [IGNORED, 3, IGNORED, IGNORED], [1, 2, 3, IGNORED], [IGNORED] * 4]
NEW = [[-0.5, -1.0, -0.1, 9.0], [math.nan, -2.0, 1.0, 1.0], [-0.3, -0.2, -3.0, 0.0], [5.0] * 4]
OLD = [[-0.9, -1.0, -0.6], [-1.5], [-0.2, -0.9, -1.0], []]
ROLLOUT = [[-0.8, -1.1, -0.6], [-1.6], [-0.2, -0.7, -1.4], []]
ADVANTAGES = [1.0, -1.0, -0.5, 2.0]
INPUTS: Any = {"labels": torch.tensor(LABELS)}
OUTPUTS: Any = {"logps": torch.tensor(NEW, dtype=torch.float64)}
GIVEN: Any = {"old_logps": OLD, "rollout_logps": ROLLOUT, "advantages": ADVANTAGES}


def tokens() -> list[tuple[int, float, float, float, float]]:
    """Return row, new, old, rollout and advantage of each trained token."""
    found = []
    for row, labels in enumerate(LABELS):
        trained = [place for place, label in enumerate(labels) if label != IGNORED]
        for count, place in enumerate(trained):
            found.append((row, NEW[row][place], OLD[row][count], ROLLOUT[row][count], ADVANTAGES[row]))
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def k3(difference: float) -> float:
    return math.exp(difference) - 1 - difference


def expected() -> dict[str, float]:
    rows = tokens()
    low = [new - old < math.log(0.8) and advantage < 0 for _, new, old, _, advantage in rows]
    high = [new - old > math.log(1.3) and advantage > 0 for _, new, old, _, advantage in rows]
    return {
        "train/policy_confidence": mean([math.exp(new) for _, new, *_ in rows]),
        "train/mean_new_logp": mean([new for _, new, *_ in rows]),
        "train/mean_old_logp": mean([old for _, _, old, *_ in rows]),
        "train/logp_diff_mean": mean([new - old for _, new, old, *_ in rows]),
        "train/approx_kl": mean([k3(new - old) for _, new, old, *_ in rows]),
        "train/token_kl_max": max(k3(new - old) for _, new, old, *_ in rows),
        "train/token_ratio_max": max(math.exp(new - old) for _, new, old, *_ in rows),
        "train/clip_ratio_low": mean([float(one) for one in low]),
        "train/clip_ratio_high": mean([float(one) for one in high]),
        "train/clip_ratio": mean([float(a or b) for a, b in zip(low, high, strict=True)]),
        "train/mismatch_kl": mean([k3(old - rollout) for _, _, old, rollout, _ in rows]),
        "train/mismatch_logp_diff": mean([abs(old - rollout) for _, _, old, rollout, _ in rows]),
        "train/mismatch_ratio_max": max(math.exp(old - rollout) for _, _, old, rollout, _ in rows),
    }


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12)


def test_the_numbers_are_means_over_tokens() -> None:
    metric = GRPOMetric(epsilon=0.2, epsilon_high=0.3)
    metric.accumulate(INPUTS, OUTPUTS, **GIVEN)
    values = metric.calculate()
    assert values == close(expected())
    assert 0 < values["train/clip_ratio_low"] < values["train/clip_ratio"] < 1
    assert metric.calculate() == {}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_micro_batches_and_ranks_of_uneven_size_give_the_same(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(metric: GRPOMetric, rows: slice) -> GRPOMetric:
        given = {name: values[rows] for name, values in GIVEN.items()}
        metric.accumulate({"labels": INPUTS["labels"][rows]}, {"logps": OUTPUTS["logps"][rows]}, **given)
        return metric

    whole = GRPOMetric(epsilon_high=0.3)
    part(part(whole, slice(0, cut)), slice(cut, 4))
    assert whole.calculate() == close(expected())

    sent: list[Any] = []
    first, second = GRPOMetric(epsilon_high=0.3), part(GRPOMetric(epsilon_high=0.3), slice(cut, 4))
    monkeypatch.setattr(second, "gather_results", lambda results: sent.extend(results) or results)
    second.calculate()
    monkeypatch.setattr(first, "gather_results", lambda results: [*results, *sent])
    assert part(first, slice(0, cut)).calculate() == close(expected())


def test_gspo_counts_sequences_by_their_mean_ratio() -> None:
    metric = GSPOMetric(epsilon=0.2, epsilon_high=0.3)
    metric.accumulate(INPUTS, OUTPUTS, **GIVEN)
    values = metric.calculate()
    low, high = 0, 0
    for row in range(3):
        ratio = math.exp(mean([new - old for place, new, old, *_ in tokens() if place == row]))
        low += ratio < 0.8 and ADVANTAGES[row] < 0
        high += ratio > 1.3 and ADVANTAGES[row] > 0
    assert (low, high) == (2, 1)
    assert values["train/clip_ratio_low"] == pytest.approx(2 / 3)
    assert values["train/clip_ratio_high"] == pytest.approx(1 / 3)
    assert values["train/approx_kl"] == close(expected()["train/approx_kl"])


def test_cispo_counts_weights_at_the_upper_bound_alone() -> None:
    metric = CISPOMetric(epsilon_high=0.3)
    metric.accumulate(INPUTS, OUTPUTS, **GIVEN)
    values = metric.calculate()
    share = mean([float(new - old > math.log(1.3)) for _, new, old, *_ in tokens()])
    assert values["train/clip_ratio"] == values["train/clip_ratio_high"] == pytest.approx(share)
    assert values["train/clip_ratio_low"] == 0.0


def test_what_was_not_given_has_no_key() -> None:
    metric = GRPOMetric()
    metric.accumulate(INPUTS, OUTPUTS)
    assert set(metric.calculate()) == {"train/policy_confidence", "train/mean_new_logp"}
    entropies = torch.full((4, 4), 0.5)
    metric.accumulate(INPUTS, {**OUTPUTS, "entropies": entropies}, old_logps=OLD)
    values = metric.calculate()
    assert values["train/entropy"] == pytest.approx(0.5)
    assert "train/approx_kl" in values
    assert not any("clip" in name or "mismatch" in name for name in values)


def test_the_sampler_is_compared_with_the_logps_of_this_pass_where_no_others_were_computed() -> None:
    metric = GRPOMetric()
    metric.accumulate(INPUTS, OUTPUTS, rollout_logps=OLD)
    assert metric.calculate()["train/mismatch_kl"] == close(expected()["train/approx_kl"])


def test_tokens_that_moved_most_are_kept_with_their_places() -> None:
    metric = GRPOMetric(top_k_kl=2)
    for rows in (slice(0, 1), slice(1, 4)):
        given = {"old_logps": OLD[rows]}
        metric.accumulate({"labels": INPUTS["labels"][rows]}, {"logps": OUTPUTS["logps"][rows]}, **given)
    assert all(isinstance(value, float) for value in metric.calculate().values())
    first, second = metric.high_kl_records
    assert (first["row"], first["position"], first["token"]) == (2, 2, 3)
    assert first["kl"] == close(k3(-2.0))
    assert (second["row"], second["position"], second["kl"]) == (2, 1, close(k3(0.7)))
    metric.calculate()
    assert metric.high_kl_records == []


def test_a_hopeless_token_does_not_make_the_numbers_infinite() -> None:
    metric = GRPOMetric()
    metric.accumulate(
        {"labels": torch.tensor([[1, 2]])}, {"logps": torch.tensor([[-0.1, -900.0]])}, old_logps=[[-900.0, 0.0]]
    )
    assert all(math.isfinite(value) for value in metric.calculate().values())


def test_log_probabilities_of_other_rows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="GRPOMetric: old_logps has 3 entries, the batch has 4 rows"):
        GRPOMetric().accumulate(INPUTS, OUTPUTS, old_logps=OLD[:3])
    with pytest.raises(ArgumentError, match="GSPOMetric: rollout_logps of row 0 has 2 numbers"):
        GSPOMetric().accumulate(INPUTS, OUTPUTS, rollout_logps=[[-1.0, -1.0], *ROLLOUT[1:]])


@pytest.mark.parametrize("options", [{"epsilon": -1}, {"epsilon_high": math.inf}, {"top_k_kl": -1}])
def test_options_outside_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        registry().build("GRPOMetric", "metric", **options)
    with pytest.raises(Unsupported, match="temperature="):
        GRPOMetric(temperature=0.7)
