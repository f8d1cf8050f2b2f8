"""`cross_entropy`: weighted negative log-likelihood, of one target a position or of several."""

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import DataError
from twinkle.loss import Loss
from twinkle_losses.options import score


class CrossEntropy(Loss):
    """Weighted negative log-likelihood: `-sum w lp`, with nothing divided.

    w is the batch's `loss_scale` (the `weights` of a Tinker datum), which may be negative or a fraction; without one it
    is 1. The denominator, which a loop of one's own divides by, is the number of positions that have a target.
    Positions of weight 0 are scored too, because clients of this loss use their log-probabilities.
    """

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels` int64 `[B, T]`, or `[B, T, K]` for K targets a position; -100 is no target. Optional
                `loss_scale` float32 of the same shape.
            outputs: `logps` float32, in the shape of the labels.

        Raises:
            DataError: labels or weights have another shape.
            TrainingStateError: the forward was of another task.
        """
        import torch

        logps = score(inputs, outputs, "logps", self)
        labels, weights = inputs["labels"], inputs.get("loss_scale")
        if tuple(getattr(labels, "shape", ())) != tuple(logps.shape) or labels.is_floating_point():
            raise DataError(
                f"cross_entropy: labels are {list(getattr(labels, 'shape', ()))} and logps {list(logps.shape)}; it "
                "needs rows with one label a token, or K of them"
            )
        mask = (labels != -100).to(logps.device)
        terms = -torch.where(mask, logps, 0.0)
        if weights is not None:
            if weights.shape != labels.shape:
                raise DataError(
                    f"cross_entropy: loss_scale is {list(weights.shape)} and labels {list(labels.shape)}; give one "
                    "weight a target"
                )
            terms = terms * torch.where(mask, weights.to(terms), 0.0)
        positions = mask if mask.dim() == 2 else mask.any(-1)
        return LossOutput(terms.sum(), int(positions.sum()))
