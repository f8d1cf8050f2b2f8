"""Cross entropy on selected log-probabilities."""

from typing import Literal

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss


class CrossEntropyLoss(Loss):
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the whole step.

    `loss_sum = -sum_t w_t logp_t` over positions with `labels != ignore_index`, where `w_t` is `loss_scale` (1 if the
    batch has none); `denominator` is the number of those positions. With `dft=True` each term is weighted by the
    token's own probability, held constant: `-sum_t sg(p_t) logp_t` (dynamic fine-tuning, arXiv:2508.05629, eq. 9).

    Args:
        ignore_index: a label that is not trained, beside -100, which never is.
        reduction: "mean" or "sum"; both are published and both mean the same here, because a loss never divides: the
            training loop divides the sum by the token count of the whole step, whatever the split.
        dft: weight tokens by their probability.
    """

    def __init__(self, ignore_index: int = -100, reduction: Literal["mean", "sum"] = "mean", dft: bool = False) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"CrossEntropyLoss: reduction={reduction!r}; it must be 'mean' or 'sum'")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.dft = dft

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels` int64 `[B, T]`; optional `loss_scale` float32 `[B, T]`.
            outputs: `logps` float32 `[B, T]`.
        """
        logps = outputs["logps"]
        labels = inputs["labels"].to(logps.device)
        mask = (labels != self.ignore_index) & (labels != -100)
        chosen = logps[mask]
        terms = -chosen.detach().exp() * chosen if self.dft else -chosen
        if (scale := inputs.get("loss_scale")) is not None:
            terms = terms * scale.to(logps.device)[mask]
        return LossOutput(terms.sum(), int(mask.sum()))
