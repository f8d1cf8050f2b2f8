"""Metrics: exact over uneven parts and over ranks, plain numbers, empty until something was seen."""

from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import DataError
from twinkle.metric import Metric
from twinkle_metrics.accuracy import Accuracy
from twinkle_metrics.embedding import EmbeddingMetric
from twinkle_metrics.loss import LossMetric
from twinkle_metrics.train import TrainMetric

INPUTS: Any = {"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])}


class TwoRanks:
    """A metric whose gather returns a second rank's result beside its own."""

    def __init__(self, other: dict[str, Any]) -> None:
        self.other = other

    def __call__(self, local_results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*local_results, self.other]


def test_the_loss_is_sum_over_sum_not_a_mean_of_means() -> None:
    metric = LossMetric()
    metric.accumulate({}, {"loss_sum": 10.0, "num_tokens": 1.0})
    metric.accumulate({}, {"loss_sum": 2.0, "num_tokens": 5.0})
    assert metric.calculate() == {"loss": 2.0}


def test_the_loss_is_exact_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = LossMetric()
    monkeypatch.setattr(metric, "gather_results", TwoRanks({"sum": 9.0, "count": 9.0, "extra": {"kl": 1.2}}))
    metric.accumulate({}, {"loss_sum": 3.0, "num_tokens": 1.0})
    assert metric.calculate() == {"loss": 1.2, "kl": pytest.approx(0.12)}


def test_the_gradient_norm_is_the_last_steps() -> None:
    metric = LossMetric()
    metric.accumulate({}, {"loss_sum": 1.0, "num_tokens": 1.0}, grad_norm=None)
    metric.accumulate({}, {"loss_sum": 1.0, "num_tokens": 1.0}, grad_norm=0.5)
    assert metric.calculate() == {"loss": 1.0, "grad_norm": 0.5}
    metric.accumulate({}, {"loss_sum": 1.0, "num_tokens": 1.0})
    assert "grad_norm" not in metric.calculate()


def test_accuracy_counts_trained_positions_only() -> None:
    metric = Accuracy()
    metric.accumulate(INPUTS, {"predictions": torch.tensor([[1, 0, -100], [3, -100, -100]])})
    assert metric.calculate() == {"accuracy": pytest.approx(2 / 3), "correct_tokens": 2, "total_tokens": 3}


def test_accuracy_leaves_out_positions_of_weight_zero() -> None:
    metric = Accuracy()
    inputs = {**INPUTS, "loss_scale": torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0]])}
    metric.accumulate(inputs, {"predictions": torch.tensor([[1, -100, -100], [2, -100, -100]])})
    assert metric.calculate() == {"accuracy": 0.5, "correct_tokens": 1, "total_tokens": 2}


def test_accuracy_is_silent_about_passes_that_predict_no_tokens() -> None:
    metric = Accuracy()
    metric.accumulate({"labels": torch.tensor([1, 0])}, {"embeddings": torch.eye(2)})
    assert metric.calculate() == {}


def test_accuracy_refuses_outputs_unpacked_without_their_labels() -> None:
    with pytest.raises(DataError, match=r"labels \[1, 5\] and predictions \[2, 3\] differ in shape"):
        Accuracy().accumulate(
            {"labels": torch.zeros(1, 5, dtype=torch.int64)}, {"predictions": torch.zeros(2, 3, dtype=torch.int64)}
        )


def groups(seed: int, sizes: list[int]) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = [int(row == 0) for size in sizes for row in range(size)]
    vectors = torch.nn.functional.normalize(torch.randn(len(labels), 3, generator=generator), dim=-1)
    return {"labels": torch.tensor(labels)}, {"embeddings": vectors}


def test_similarities_are_those_of_anchors_with_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = EmbeddingMetric()
    positives, negatives, pairs = [], [], []
    for seed, sizes in ((0, [2, 4, 3]), (1, [2])):
        inputs, outputs = groups(seed, sizes)
        metric.accumulate(inputs, outputs)
        start = 0
        for size in sizes:
            anchor, *others = outputs["embeddings"][start : start + size].tolist()
            cosines = [sum(a * b for a, b in zip(anchor, other, strict=True)) for other in others]
            positives.append(cosines[0])
            negatives += cosines[1:]
            pairs.append((anchor, others[0]))
            start += size
    far = [
        sum(a * b for a, b in zip(anchor, other, strict=True))
        for one, (anchor, _) in enumerate(pairs)
        for two, (_, other) in enumerate(pairs)
        if one != two
    ]
    wanted = {
        "pos_sim": sum(positives) / len(positives),
        "pos_sim_min": min(positives),
        "pos_sim_max": max(positives),
        "neg_sim": sum(far) / len(far),
        "hard_neg_sim": sum(negatives) / len(negatives),
    }
    assert metric.calculate() == pytest.approx(wanted, abs=1e-6)
    assert metric.calculate() == {}


def test_similarities_without_negatives_and_of_other_tasks() -> None:
    metric = EmbeddingMetric()
    metric.accumulate({"labels": torch.zeros(1, 2)}, {"logps": torch.zeros(1, 2)})
    assert metric.calculate() == {}
    metric.accumulate(*groups(0, [2, 2]))
    assert set(metric.calculate()) == {"pos_sim", "pos_sim_min", "pos_sim_max", "neg_sim"}
    metric.accumulate(*groups(0, [2]))
    assert set(metric.calculate()) == {"pos_sim", "pos_sim_min", "pos_sim_max"}


def test_train_numbers_are_of_the_steps_since_the_last_look() -> None:
    metric = TrainMetric()
    metric.accumulate({}, {}, lr=[0.1, 0.1], step=4, gradient_accumulation_steps=2)
    values = metric.calculate()
    assert values["learning rate"] == 0.1
    assert values["iters"] == 2
    assert values["speed"] > 0
    metric.accumulate({}, {}, lr=[0.1, 0.2], step=4, gradient_accumulation_steps=2)
    values = metric.calculate()
    assert values["learning rate(param group 2)"] == 0.2
    assert values["speed"] == 0


@pytest.mark.parametrize("name", ["LossMetric", "Accuracy", "EmbeddingMetric"])
def test_nothing_seen_is_no_number(name: str) -> None:
    assert registry().build(name, "metric").calculate() == {}


@pytest.mark.parametrize("name", ["LossMetric", "Accuracy", "TrainMetric", "EmbeddingMetric"])
def test_metrics_are_found_by_name_and_give_plain_numbers(name: str) -> None:
    metric = registry().build(name, "metric")
    assert isinstance(metric, Metric)
    outputs: Any = {"loss_sum": 1.0, "num_tokens": 2.0, "predictions": torch.zeros(2, 3, dtype=torch.int64)}
    metric.accumulate(INPUTS, outputs, lr=[0.1], step=1, grad_norm=1.0)
    assert {type(value) for value in metric.calculate().values()} <= {int, float}


def test_what_a_loss_reports_is_divided_by_its_denominator() -> None:
    metric = LossMetric()
    for extra, count in ((6.0, 2), (3.0, 1)):
        metric.accumulate({}, {"loss_sum": 1.0, "num_tokens": count, "loss_metrics": {"kl": extra}})
    assert metric.calculate() == {"loss": 2 / 3, "kl": 3.0}
    metric.accumulate({}, {"loss_sum": 1.0, "num_tokens": 1})
    assert metric.calculate() == {"loss": 1.0}
