"""Metrics: exact over uneven parts and over ranks, plain numbers, empty until something was seen."""

from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.metric import Metric
from twinkle_metrics.accuracy import Accuracy
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
    monkeypatch.setattr(metric, "gather_results", TwoRanks({"sum": 9.0, "count": 9.0}))
    metric.accumulate({}, {"loss_sum": 3.0, "num_tokens": 1.0})
    assert metric.calculate() == {"loss": 1.2}


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


def test_train_numbers_are_of_the_steps_since_the_last_look() -> None:
    metric = TrainMetric()
    metric.accumulate({}, {}, lr=[0.1, 0.1], step=4, gradient_accumulation_steps=2)
    values = metric.calculate()
    assert values["learning rate"] == 0.1
    assert values["iters"] == 2
    assert values["speed"] > 0
    metric.accumulate({}, {}, lr=[0.1, 0.2], step=4, gradient_accumulation_steps=2)
    values = metric.calculate()
    assert values["learning rate(param group 1)"] == 0.2
    assert values["speed"] == 0


@pytest.mark.parametrize("name", ["LossMetric", "Accuracy"])
def test_nothing_seen_is_no_number(name: str) -> None:
    assert registry().build(name, "metric").calculate() == {}


@pytest.mark.parametrize("name", ["LossMetric", "Accuracy", "TrainMetric"])
def test_metrics_are_found_by_name_and_give_plain_numbers(name: str) -> None:
    metric = registry().build(name, "metric")
    assert isinstance(metric, Metric)
    outputs: Any = {"loss_sum": 1.0, "num_tokens": 2.0, "predictions": torch.zeros(2, 3, dtype=torch.int64)}
    metric.accumulate(INPUTS, outputs, lr=[0.1], step=1, grad_norm=1.0)
    assert {type(value) for value in metric.calculate().values()} <= {int, float}
