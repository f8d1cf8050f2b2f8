"""Regression: squared errors of a value head."""

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import DataError
from twinkle.loss import Loss
from twinkle_losses.options import output


class MSELoss(Loss):
    """Squared errors of `logits` against float targets of the same shape, averaged over the targets of the whole step.

    `loss_sum = sum (logit - target)^2` over all targets that are neither NaN nor -100; `denominator` is their number
    (the mean squared error, as torch's `mse_loss` gives it). A last dimension of 1 in the logits need not be in the
    targets. For `TransformersModel(model_cls="AutoModelForSequenceClassification", num_labels=K)` each row's `labels`
    is a number or K numbers; for `AutoModelForTokenClassification` it is a number a token.
    """

    require_logps = False
    require_logits = True

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels`: targets `[B]`, `[B, K]` or `[B, T]`, -100 or NaN for no target.
            outputs: `logits` `[B, 1]`, `[B, K]`, `[B, T, 1]`, ...

        Raises:
            DataError: targets and logits have different shapes.
        """
        import torch

        logits = output(outputs, "logits", self, "call with task='causal_lm'")
        targets = inputs["labels"]
        if not isinstance(targets, torch.Tensor):
            raise DataError("MSELoss: `labels` of the rows differ in length; each row needs as many as the model gives")
        found = tuple(logits.shape)
        if found == (*targets.shape, 1):
            logits = logits.squeeze(-1)
        if logits.shape != targets.shape:
            raise DataError(
                f"MSELoss: logits {list(found)} and labels {list(targets.shape)} differ in shape; give a target for "
                "each value, and load the model with a head that gives such values "
                "(model_cls='AutoModelForSequenceClassification', num_labels=...)"
            )
        given = (targets == targets) & (targets != -100)
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        on_device = given.to(values.device)
        errors = values[on_device] - targets[given].to(values.device, values.dtype)
        return LossOutput(errors.square().sum(), int(given.sum()))
