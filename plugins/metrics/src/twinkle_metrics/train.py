"""Learning rate, steps and speed."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.metric import Metric


class TrainMetric(Metric):
    """The learning rate that the last step used, the number of updates, seconds, and updates a second.

    Keys: `learning rate` (`learning rate(param group i)`, from 1, when groups differ), `iters`, `total time elapse` in
    seconds since the metric was made, `speed` in updates a second since the last look.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        super().__init__(device_mesh, process_group)
        self._born = time.perf_counter()
        self._iterations = 0
        self._rates: list[float] = []
        self._seen_at, self._seen_iterations = self._born, 0

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Keep `lr` (a number or one a parameter group) and count `step // gradient_accumulation_steps`."""
        lr = kwargs.get("lr")
        if lr is not None:
            self._rates = list(lr) if isinstance(lr, Sequence) else [lr]
        if "iterations" in kwargs:
            self._iterations = kwargs["iterations"]
        elif "step" in kwargs:
            self._iterations = kwargs["step"] // max(1, kwargs.get("gradient_accumulation_steps", 1))

    def calculate(self) -> Mapping[str, float]:
        """Return the numbers; the learning rate is missing until a step has been made."""
        now = time.perf_counter()
        values: dict[str, float] = {}
        if len(set(self._rates)) == 1:
            values["learning rate"] = self._rates[0]
        else:
            values |= {f"learning rate(param group {i})": rate for i, rate in enumerate(self._rates, 1)}
        values["iters"] = self._iterations
        values["total time elapse"] = now - self._born
        values["speed"] = (self._iterations - self._seen_iterations) / max(now - self._seen_at, 1e-9)
        self._seen_at, self._seen_iterations = now, self._iterations
        self.reset()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers, with times as seconds before now: clocks of other processes have other origins."""
        now = time.perf_counter()
        return {**super().state_dict(), "_born": now - self._born, "_seen_at": now - self._seen_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the numbers of `state_dict`; the time between the two calls is not counted."""
        now = time.perf_counter()
        super().load_state_dict({**state, "_born": now - state["_born"], "_seen_at": now - state["_seen_at"]})

    def reset(self) -> None:
        """Clear the learning rate; time and step count continue."""
        self._rates = []
