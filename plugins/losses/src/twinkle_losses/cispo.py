"""CISPO: importance weights are clipped, tokens never."""

from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError
from twinkle_losses.grpo import GRPOLoss

if TYPE_CHECKING:
    from torch import Tensor


class CISPOLoss(GRPOLoss):
    """Policy gradient with importance weights of at most 1 + `epsilon_high`, averaged over all trained tokens.

    With r_t = exp(logp_t - old_t) and sg(x) an x that is held constant, a trained token's policy term is (CISPO,
    arXiv:2506.13585, eq. 4 and 5, without a lower bound, as in the paper's experiments)

        - sg(min(r_t, 1 + epsilon_high)) A_t logp_t

    Every token keeps a gradient, also a rare one that has become much more probable, which clipping elsewhere silences.
    `loss_sum` is the sum over trained tokens, `denominator` their number. Metrics are those of `PolicyGradientLoss`;
    `clip_ratio` is the share of tokens whose weight is at the bound.

    Arguments are those of `GRPOLoss`; `epsilon` is only what `epsilon_high` is by default.
    """

    over_tokens: ClassVar[bool] = True

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        ref_logps: Any = None,
        advantages: Any = None,
        rollout_logps: Any = None,
        num_items_in_batch: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch; see `PolicyGradientLoss`.

        Args:
            inputs: labels.
            outputs: log-probabilities.
            old_logps: one number a token.
            ref_logps: log-probabilities of the reference, in the same form.
            advantages: one a row, or one a token.
            rollout_logps: one number a token.
            num_items_in_batch: published, and refused: the step counts the trained tokens of all its parts by itself.

        Raises:
            ArgumentError: an argument is missing, does not fit, or is `num_items_in_batch`.
        """
        if num_items_in_batch is not None:
            raise ArgumentError(
                f"CISPOLoss: num_items_in_batch={num_items_in_batch!r:.40}; the step divides by the trained tokens of "
                "all its micro-batches and ranks, which it counts itself; omit it (DRGRPOLoss divides by a "
                "constant of yours)"
            )
        return super().__call__(inputs, outputs, old_logps, ref_logps, advantages, rollout_logps)

    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        return -ratio.detach().clamp(max=1 + self.epsilon_high) * advantages * logps

    def _clipped(self, ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        return ratio > 1 + self.epsilon_high
