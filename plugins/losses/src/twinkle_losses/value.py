"""The loss of a critic: squared errors of the values of tokens, clipped."""

from typing import Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, DataError
from twinkle.loss import Loss
from twinkle_losses.options import label_to_ignore, number, output
from twinkle_torch.trained import Trained


class ValueLoss(Loss):
    """Squared distance of values from returns, averaged over all trained tokens of the whole step.

    With V_t the value at a trained position (of the state in which the label is drawn), R_t the return there and
    V_old_t the value when the rows were sampled (PPO, arXiv:1707.06347, eq. 9; clipped as its authors' code does,
    arXiv:2005.12729, section 3)

        l_t = max((V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2)

    `loss_sum` is `coef` times the sum of l_t over trained tokens, `denominator` their number. Where the batch has
    `loss_scale`, l_t is multiplied by it. `metrics`, sums over tokens as well: `value_error` ((V_t - R_t)^2) and
    `value_clip_ratio` (share of tokens whose clipped error is the larger one, so that they have no gradient).

    For `TransformersModel(model_cls="AutoModelForTokenClassification", num_labels=1, classifier_dropout=0.0)`, a
    critic beside the policy, which gets the rows that the policy gets.

    Args:
        clip: how far a value may move from the old one; None is the plain squared error.
        coef: factor of the loss (eq. 9 has c_1, many implementations 0.5).
        ignore_index: a label that is not trained, in addition to -100.

    Raises:
        ArgumentError: an option is outside its range.
    """

    require_logps = False
    require_logits = True
    row_inputs = ("returns", "old_values")

    def __init__(self, clip: float | None = 0.2, coef: float = 1.0, ignore_index: int = -100) -> None:
        self.clip = None if clip is None else number(self, "clip", clip, above=0)
        self.coef = number(self, "coef", coef, above=0)
        self.ignore_index = label_to_ignore(self, ignore_index)

    def __call__(
        self, inputs: InputBatch, outputs: ModelOutput, returns: Any = None, old_values: Any = None
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        Both arguments are tensors `[B, T]` or lists of lists: a row has as many numbers as trained positions, in order,
        or one a token.

        Args:
            inputs: `labels` int64 `[B, T]`; optional `loss_scale` float32 `[B, T]`.
            outputs: `logits` `[B, T, 1]`, the values.
            returns: what values are to become: advantage plus old value (generalized advantage estimation,
                arXiv:1506.02438).
            old_values: values of a forward before the update; needed with `clip`.

        Raises:
            ArgumentError: `returns` are missing, or `old_values` with `clip`; lengths do not fit; or a number at a
                trained token is NaN or infinite.
            DataError: the model gives more than one value a token.
        """
        import torch

        logits = output(outputs, "logits", self, "call with task='causal_lm'")
        if logits.ndim != 3 or logits.shape[-1] != 1:
            raise DataError(
                f"ValueLoss: logits are {list(logits.shape)}; it needs one value a token, [B, T, 1]: load the critic "
                "with model_cls='AutoModelForTokenClassification', num_labels=1"
            )
        values = logits[..., 0].to(torch.promote_types(logits.dtype, torch.float32))
        where = Trained.of(inputs, values, self.ignore_index, self)
        given = {"returns": self._given("returns", returns)}
        if self.clip is not None:
            given["old_values"] = self._given("old_values", old_values)
        rows, values = where.aligned(given, values, broadcast=False), where.fill(values)
        goal, old = rows["returns"], rows.get("old_values")
        error = (values - goal).square()
        numbers = {"value_error": error}
        if self.clip is not None and old is not None:
            bounded = (old + (values - old).clamp(-self.clip, self.clip) - goal).square()
            numbers["value_clip_ratio"] = (bounded > error).to(error.dtype)
            error = torch.maximum(error, bounded)
        if (scale := inputs.get("loss_scale")) is not None:
            error = error * scale.to(error)
        sums = {name: float(where.sums(terms.detach()).sum()) for name, terms in numbers.items()}
        return LossOutput(self.coef * where.sums(error).sum(), sum(where.counts), sums)

    def _given(self, name: str, value: Any) -> Any:
        if value is None:
            raise ArgumentError(
                f"ValueLoss: {name} are missing; pass {name}=, one number for each trained token"
                + (", or set clip=None" if name == "old_values" else "")
            )
        return value
