"""Rewards and lengths: exact over calls and ranks, and only what was given."""

import math
import statistics
from typing import Any

import numpy as np
import pytest

from twinkle.errors import ArgumentError, DataError
from twinkle_metrics.completion import CompletionRewardMetric

ACCURACY = [1.0, 0.0, 0.25, 1.0, 0.5]


def test_means_and_deviations_are_those_of_all_rows_of_uneven_calls() -> None:
    metric = CompletionRewardMetric()
    metric.accumulate(rewards={"accuracy": ACCURACY[:1]}, completion_lengths=[7], generate_time=1.5)
    metric.accumulate(rewards={"accuracy": ACCURACY[1:], "brevity": [2]}, completion_lengths=[1, 2, 3, 0])
    metric.accumulate(generate_time=2.0, weight_sync_time=0.25)
    assert metric.calculate() == {
        "train/accuracy_reward": pytest.approx(statistics.fmean(ACCURACY)),
        "train/accuracy_reward_std": pytest.approx(statistics.stdev(ACCURACY)),
        "train/brevity_reward": 2.0,
        "train/brevity_reward_std": 0.0,
        "train/completion_length": 2.6,
        "train/completion_length_max": 7.0,
        "profiling/Time taken: generate": 1.75,
        "profiling/Time taken: move_model_to_sampler": 0.25,
    }
    assert metric.calculate() == {}


def test_over_ranks_rows_are_joined_and_the_slowest_rank_tells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = CompletionRewardMetric()
    other = {"rewards": {"accuracy": ACCURACY[2:]}, "lengths": [9.0], "times": {"generate_time": [5.0, 3.0]}}
    monkeypatch.setattr(metric, "gather_results", lambda results: [*results, other])
    metric.accumulate(rewards={"accuracy": ACCURACY[:2]}, completion_lengths=[1], generate_time=3.0)
    values = metric.calculate()
    assert values["train/accuracy_reward_std"] == pytest.approx(statistics.stdev(ACCURACY))
    assert (values["train/completion_length"], values["profiling/Time taken: generate"]) == (5.0, 4.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1", True])
def test_a_reward_that_is_no_number_is_named_and_nothing_is_taken_in(bad: Any) -> None:
    metric = CompletionRewardMetric()
    with pytest.raises(DataError, match="reward 'accuracy' of row 1 is"):
        metric.accumulate(rewards={"format": [1.0, 1.0], "accuracy": [1.0, bad]})
    assert metric.calculate() == {}
    with pytest.raises(ArgumentError, match="rewards is"):
        metric.accumulate(rewards=[1.0])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"reward 'accuracy' is 1\.0; give one number a row"):
        metric.accumulate(rewards={"accuracy": 1.0})  # type: ignore[dict-item]


def test_numbers_of_numpy_are_numbers() -> None:
    metric = CompletionRewardMetric()
    metric.accumulate(rewards={"accuracy": list(np.array([1.0, 0.0], np.float32))}, completion_lengths=np.array([3, 5]))
    assert metric.calculate()["train/accuracy_reward"] == 0.5
