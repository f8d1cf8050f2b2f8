"""`gspo`: policy gradients with one importance ratio for a whole sequence."""

from typing import Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_losses.tinker.drawn import Clip, Drawn, given


class Gspo(Loss):
    """Sequence-level clipping (GSPO-token, arXiv:2507.18071, eq. 13 and 14): `-sum min(r A, clamp(r, low, high) A)`.

    With s the mean of `sg(lp) - q` over the tokens of a row whose `sequence_ratio_mask` is not 0, a token's ratio is
    `r = exp(s + lp - sg(lp))`: the same value for all tokens of the row, each with the gradient of its own. The mean of
    no tokens is 0: such a row has a ratio of 1. The mask chooses what s is made of; what a token counts is its
    advantage, 0 where nothing was sampled.

    Args:
        clip_low_threshold: the smallest ratio that counts. The protocol states no default; those here are the paper's
            (section 5.1: 3e-4 below 1 and 4e-4 above).
        clip_high_threshold: the largest.

    Raises:
        ArgumentError: a threshold is no number of at least 0, or they are the wrong way round.
    """

    row_inputs = ("sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold")

    def __init__(self, clip_low_threshold: float = 0.9997, clip_high_threshold: float = 1.0004) -> None:
        self.clip = Clip.checked(self, clip_low_threshold, clip_high_threshold)

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        advantages: Any = None,
        sequence_ratio_mask: Any = None,
        clip_low_threshold: Any = None,
        clip_high_threshold: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels` int64 `[B, T]`, -100 where there is no target.
            outputs: `logps` float32 `[B, T]`.
            old_logps: q, one number a token.
            advantages: A, one number a token.
            sequence_ratio_mask: not 0 at the tokens whose mean ratio is the sequence's.
            clip_low_threshold: of each token; None is the loss's own.
            clip_high_threshold: upper bound, in the same form.

        Raises:
            ArgumentError: an argument is missing, or its lengths do not fit.
        """
        import torch

        drawn = Drawn.of(self, inputs, outputs, old_logps, advantages)
        given(self, "sequence_ratio_mask", sequence_ratio_mask)
        counted = drawn.where.align("sequence_ratio_mask", sequence_ratio_mask, drawn.logps) != 0
        moved = torch.where(counted, drawn.logps.detach() - drawn.old, 0.0).sum(1)
        mean = moved / counted.sum(1).clamp(min=1)
        log_ratio = mean[:, None] + drawn.logps - drawn.logps.detach()
        log_ratio = torch.where(drawn.advantages != 0, log_ratio, 0.0)
        bounds = self.clip.of_tokens(drawn, clip_low_threshold, clip_high_threshold)
        return drawn.total(-bounds.smaller(log_ratio, drawn.advantages))
