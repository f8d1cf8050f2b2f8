"""Focal loss (arXiv:1708.02002) for next tokens."""

from typing import Any

from twinkle.data_format import LossOutput
from twinkle.loss import Loss

from .power import weight


class HubFocalLoss(Loss):
    """`-(1 - p)^gamma log p`, averaged over the trained tokens of the step."""

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        """Sum over `labels != -100`; `logps` float32 `[B, T]`."""
        logps = outputs["logps"]
        chosen = logps[inputs["labels"].to(logps.device) != -100]
        return LossOutput(-(weight(chosen, self.gamma) * chosen).sum(), chosen.numel())
