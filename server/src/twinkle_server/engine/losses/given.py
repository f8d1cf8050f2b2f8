"""A loss that the client has computed itself from the log-probabilities of a forward pass."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_server.engine.errors import UserError

SHARES: Final = "shares"
"""Argument with the share of each row in the value of the loss."""


class GivenLoss(Loss):
    """A loss whose value the client has computed, and whose gradient it sends as `loss_scale` of the rows.

    The gradient of the linear term `sum(loss_scale * logps)` with respect to the weights is that of the client's loss.

    Args:
        value: of the loss for all rows.
        denominator: what the loss is divided by at the step, with those of other backward calls.
    """

    row_inputs = (SHARES,)

    def __init__(self, value: float, denominator: float) -> None:
        self.value, self.denominator = value, denominator

    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch; see `Loss`."""
        logps = outputs["logps"]
        linear = (inputs["loss_scale"].to(logps.device) * logps).sum()
        share = sum(map(float, kwargs[SHARES]))
        return LossOutput(linear - linear.detach() + self.value * share, self.denominator * share, {})


def given_loss(
    given: Mapping[str, float], rows: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
) -> tuple[GivenLoss, dict[str, Any]]:
    """Return the loss of a call, and its inputs.

    Args:
        given: `value` and `denominator`.
        rows: of the call, with the gradient as `loss_scale`.
        inputs: `loss_inputs` of the call.

    Raises:
        UserError: a row lacks its gradient or its labels, or the call has arguments of another loss.
    """
    if inputs:
        raise UserError(f"given_loss takes no loss_inputs, got {sorted(inputs)[0]!r}")
    for number, row in enumerate(rows):
        if "labels" not in row or "loss_scale" not in row:
            raise UserError(
                f"row {number}: given_loss requires labels, and as loss_scale the gradient of the loss with respect to "
                "their log-probabilities"
            )
    return GivenLoss(given["value"], given["denominator"]), {SHARES: [1.0 / len(rows)] * len(rows)}
