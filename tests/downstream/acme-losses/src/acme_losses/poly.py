"""PolyLoss (arXiv:2204.12511) for next tokens."""

from collections.abc import Sequence
from typing import Any

from acme_numbers import polynomial

from twinkle.data_format import LossOutput
from twinkle.loss import Loss


class PolyLoss(Loss):
    """`-log p + c_1 (1 - p) + c_2 (1 - p)^2 + ...`, averaged over the trained tokens of the step.

    Args:
        coefficients: c_1, c_2, ...; none is cross entropy.
    """

    def __init__(self, coefficients: Sequence[float] = (1.0,)) -> None:
        self.coefficients = tuple(coefficients)

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        """Sum over `labels != -100`; `logps` float32 `[B, T]`."""
        logps = outputs["logps"]
        chosen = logps[inputs["labels"].to(logps.device) != -100]
        loss = polynomial((0.0, *self.coefficients), 1 - chosen.exp()) - chosen
        return LossOutput(loss.sum(), chosen.numel())
