"""What was sampled and earned: rewards, lengths, and the seconds it took."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import ArgumentError, DataError
from twinkle.metric import Metric

_TIMES = {
    "generate_time": "profiling/Time taken: generate",
    "weight_sync_time": "profiling/Time taken: move_model_to_sampler",
}


class CompletionRewardMetric(Metric):
    """Rewards and lengths of sampled answers, over all rows of all calls and ranks since the last look.

    Keys: `train/{name}_reward` and `train/{name}_reward_std`, mean and sample standard deviation (0 of one row) of each
    reward; `train/completion_length`, `train/completion_length_max`, in tokens; `profiling/Time taken: generate` and
    `profiling/Time taken: move_model_to_sampler`, seconds a call, of the slowest rank. What was never given has no key.

    The loop feeds it by hand: `metric.accumulate(rewards={"accuracy": [1.0, 0.0]}, completion_lengths=[12, 9])`.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        super().__init__(device_mesh, process_group)
        self.reset()

    def accumulate(
        self,
        inputs: InputBatch | None = None,
        outputs: ModelOutput | None = None,
        *,
        rewards: Mapping[str, Sequence[float]] | None = None,
        completion_lengths: Sequence[int] | None = None,
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the answers to a batch of prompts.

        Args:
            inputs: not used, like `outputs` and `kwargs`: a model that has this metric passes them.
            outputs: not used.
            rewards: by name, one number a row.
            completion_lengths: tokens of each answer.
            generate_time: seconds that sampling took.
            weight_sync_time: seconds that bringing the weights to the sampler took.
            **kwargs: not used.

        Raises:
            ArgumentError: `rewards` is no mapping.
            DataError: a reward or a length is no finite number; names it and the row.
        """
        if not isinstance(rewards or {}, Mapping):
            raise ArgumentError(f"CompletionRewardMetric: rewards is {rewards!r:.60}; give {{name: one number a row}}")
        found = {name: _numbers(f"reward {name!r}", values) for name, values in (rewards or {}).items()}
        lengths = [] if completion_lengths is None else _numbers("completion_lengths", completion_lengths)
        for name, values in found.items():
            self._rewards.setdefault(name, []).extend(values)
        self._lengths.extend(lengths)
        for name, seconds in zip(_TIMES, (generate_time, weight_sync_time), strict=True):
            if seconds is not None:
                self._times.setdefault(name, []).append(float(seconds))

    def calculate(self) -> Mapping[str, float]:
        """Return the numbers over all ranks; nothing if nothing was accumulated."""
        parts = self.gather_results([{"rewards": self._rewards, "lengths": self._lengths, "times": self._times}])
        self.reset()
        values: dict[str, float] = {}
        for name in dict.fromkeys(name for part in parts for name in part["rewards"]):
            scores = [score for part in parts for score in part["rewards"].get(name, [])]
            values |= _moments(f"train/{name}_reward", scores)
        if lengths := [length for part in parts for length in part["lengths"]]:
            values["train/completion_length"] = math.fsum(lengths) / len(lengths)
            values["train/completion_length_max"] = max(lengths)
        for name, key in _TIMES.items():
            if seconds := [part["times"][name] for part in parts if name in part["times"]]:
                values[key] = max(math.fsum(calls) / len(calls) for calls in seconds)
        return values

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._rewards: dict[str, list[float]] = {}
        self._lengths: list[float] = []
        self._times: dict[str, list[float]] = {}


def _numbers(what: str, values: Any) -> list[float]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Sequence) or isinstance(plain, str):
        raise DataError(f"CompletionRewardMetric: {what} is {plain!r:.60}; give one number a row")
    for row, value in enumerate(plain):
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise DataError(f"CompletionRewardMetric: {what} of row {row} is {value!r:.60}; give finite numbers")
    return [float(value) for value in plain]


def _moments(name: str, scores: list[float]) -> dict[str, float]:
    if not scores:
        return {}
    mean = math.fsum(scores) / len(scores)
    squares = math.fsum((score - mean) ** 2 for score in scores)
    return {name: mean, f"{name}_std": math.sqrt(squares / (len(scores) - 1)) if len(scores) > 1 else 0.0}
