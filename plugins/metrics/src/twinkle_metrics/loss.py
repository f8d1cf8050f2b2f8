"""The loss and the gradient norm of the steps since the last look."""

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch


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

        Outputs that a script passes are read as `loss_and_count` does; outputs without a loss are not counted.
        """
        outputs = outputs or {}
        if (loss := loss_and_count(inputs, outputs, kwargs)) is not None:
            self._loss_sum += loss[0]
            self._denominator += loss[1]
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


def loss_and_count(inputs: Any, outputs: ModelOutput, given: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the sum of a loss and the number that divides it; None if the outputs have no loss.

    With `loss_sum`, which models give, the number is `num_tokens`. Otherwise the outputs are read as published: `loss`
    is a sum over `num_tokens`; or a mean, which counts 1, if `num_tokens` is 0 or missing, or if `given` has
    `loss_reduction="mean"`. With `loss_reduction="sum"` and without `num_tokens`, it is a sum over the trained labels.

    Args:
        inputs: as `Metric.accumulate` takes them; their labels are counted.
        outputs: likewise.
        given: the further arguments of `accumulate`.
    """
    total, tokens = outputs.get("loss_sum"), outputs.get("num_tokens")
    if total is not None:
        return float(total), float(tokens or 0.0)
    if (loss := outputs.get("loss")) is None:
        return None
    if given.get("loss_reduction") == "mean":
        return float(loss), 1.0
    if tokens is None and given.get("loss_reduction") == "sum":
        tokens = int((as_batch(inputs, {})[0]["labels"] != -100).sum())
    return float(loss), float(tokens or 1.0)
