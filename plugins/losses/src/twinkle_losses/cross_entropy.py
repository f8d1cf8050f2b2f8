"""Cross entropy on selected log-probabilities."""

from typing import TYPE_CHECKING, Literal

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, DataError
from twinkle.loss import Loss
from twinkle_losses.options import flag, label_to_ignore, score

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropyLoss(Loss):
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the whole step.

    `loss_sum = sum_t w_t nll_t` over positions with `labels != ignore_index`, where `w_t` is `loss_scale` (1 if the
    batch has none); `denominator` is the number of those positions. A weight says how much a token counts beside a
    plain one: dividing by the sum of weights instead would undo a weight that all tokens share, and a step whose
    weights are small would move as far as any other. A weight of 0 keeps the token in the count, and costs nothing.

    - plain: `nll_t = -logp_t`
    - `label_smoothing=e`: the target is `(1 - e) onehot + e / V`, so `nll_t = -(1 - e) logp_t - e mean_v logp_tv`
      (arXiv:1512.00567, section 7; torch's `cross_entropy` has the same meaning)
    - `dft=True`: weighted by the token's own probability, held constant: `nll_t = -sg(p_t) logp_t` (dynamic
      fine-tuning, arXiv:2508.05629, eq. 9)

    Args:
        ignore_index: a label that is not trained, in addition to -100.
        reduction: "mean" or "sum"; both are published and both mean the same here, because a loss never divides: the
            training loop divides the sum by the token count of the whole step, independent of the split.
        dft: weight tokens by their probability.
        label_smoothing: e in [0, 1); not together with `dft`.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    skips_weight_zero = True

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        dft: bool = False,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        what = type(self).__name__
        if reduction not in ("mean", "sum"):
            raise ArgumentError(f"{what}: reduction={reduction!r}; it must be 'mean' or 'sum'")
        if not isinstance(label_smoothing, int | float) or not 0 <= label_smoothing < 1:
            raise ArgumentError(f"{what}: label_smoothing={label_smoothing!r}; it must be a number in [0, 1)")
        if dft and label_smoothing:
            raise ArgumentError(f"{what}: dft=True weights by the probability of one target; leave label_smoothing out")
        self.ignore_index = label_to_ignore(self, ignore_index)
        self.reduction = reduction
        self.dft = flag(self, "dft", dft)
        self.label_smoothing = float(label_smoothing)
        self.require_uniform_logps = label_smoothing > 0

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels` int64 `[B, T]`, or flat `[N]`; optional `loss_scale` float32 of this shape.
            outputs: `logps` float32 of this shape, and `uniform_logps` with `label_smoothing`; or `logits` with a
                further dimension V.

        Raises:
            DataError: rows have several labels a token.
            TrainingStateError: the forward was of another task.
        """
        logps = score(inputs, outputs, "logps", self)
        labels = inputs["labels"].to(logps.device)
        if labels.dim() == 3:
            raise DataError(
                f"{type(self).__name__}: labels are {list(labels.shape)}, and it needs one label a token; several "
                "weighted targets are for the loss 'cross_entropy'"
            )
        mask = self._mask(labels)
        smoothed = score(inputs, outputs, "uniform_logps", self) if self.label_smoothing else None
        terms = self._terms(logps[mask], None if smoothed is None else smoothed[mask])
        if (scale := inputs.get("loss_scale")) is not None:
            terms = terms * scale.to(logps.device)[mask]
        return LossOutput(terms.sum(), int(mask.sum()))

    def _mask(self, labels: "Tensor") -> "Tensor":
        return (labels != self.ignore_index) & (labels != -100)

    def _terms(self, chosen: "Tensor", uniform: "Tensor | None") -> "Tensor":
        """Return nll_t of each trained position, of its log-probability and the mean one of the vocabulary."""
        if self.dft:
            return -chosen.detach().exp() * chosen
        if uniform is None:
            return -chosen
        return (self.label_smoothing - 1.0) * chosen - self.label_smoothing * uniform
