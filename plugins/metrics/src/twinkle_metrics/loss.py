"""The loss and the gradient norm of the steps since the last look."""

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.metric import Metric


class LossMetric(Metric):
    """`loss`: sum of losses over sum of denominators; `grad_norm`: of the last step, if gradients were clipped.

    So are the numbers that the loss itself returned in `LossOutput.metrics`, under their names. All are exact over
    micro-batches, accumulation steps and ranks: sums are added, then divided once.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        super().__init__(device_mesh, process_group)
        self._grad_norm: float | None = None
        self.reset()

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Add `outputs["loss_sum"]` and `outputs["num_tokens"]`; keep the step's `grad_norm`.

        Outputs without `loss_sum`, which a script passes, are read as published: `loss` is a sum over `num_tokens`, or
        a mean if `num_tokens` is 0 or missing, or if `loss_reduction="mean"`; means count alike.
        """
        count = float(outputs.get("num_tokens") or 0.0)
        if "loss_sum" in outputs:
            self._loss_sum += float(outputs["loss_sum"])
        else:
            count = 1.0 if kwargs.get("loss_reduction") == "mean" else count or 1.0
            self._loss_sum += float(outputs["loss"])
        self._denominator += count
        for name, value in outputs.get("loss_metrics", {}).items():
            self._extra[name] = self._extra.get(name, 0.0) + value
        if (norm := kwargs.get("grad_norm")) is not None:
            self._grad_norm = float(norm)

    def calculate(self) -> Mapping[str, float]:
        """Return `loss` and, after a clipped step, `grad_norm`; nothing if nothing was accumulated."""
        parts = self.gather_results([{"sum": self._loss_sum, "count": self._denominator, "extra": self._extra}])
        count = sum(part["count"] for part in parts)
        values = {"loss": sum(part["sum"] for part in parts) / count} if count else {}
        for name in sorted({name for part in parts for name in part["extra"]}) if count else ():
            values[name] = sum(part["extra"].get(name, 0.0) for part in parts) / count
        if self._grad_norm is not None:
            values["grad_norm"] = self._grad_norm
        self.reset()
        return values

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._loss_sum = 0.0
        self._denominator = 0.0
        self._grad_norm = None
        self._extra: dict[str, float] = {}
