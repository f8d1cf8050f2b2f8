"""GRPO: clipped policy gradients, averaged over the tokens of a sequence, then over the sequences."""

from typing import TYPE_CHECKING

from twinkle_losses.options import number
from twinkle_losses.policy_gradient import PolicyGradientLoss

if TYPE_CHECKING:
    from torch import Tensor


class GRPOLoss(PolicyGradientLoss):
    """Clipped policy gradient, averaged over the tokens of a sequence, then over the sequences of the whole step.

    With r_t = exp(logp_t - old_t), A_t the advantage and k_t = exp(ref_t - logp_t) - (ref_t - logp_t) - 1, a trained
    token's term is (GRPO, arXiv:2402.03300, eq. 3 and 4)

        l_t = - min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t) + beta k_t - entropy_coef H_t

    `loss_sum` is the sum over sequences of the mean of l_t over the sequence's trained tokens; `denominator` is the
    number of sequences that train something. A sequence without trained tokens counts nothing, in neither.

    `metrics` are those of `PolicyGradientLoss`; `clip_ratio` is the share of tokens whose ratio is clipped, so that
    they have no policy gradient.

    Args:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far it may rise above 1; None is `epsilon` (another value: DAPO's clip-higher,
            arXiv:2503.14476, eq. 10).
        beta: see `PolicyGradientLoss`, as for the rest.
        entropy_coef: weight of the entropy.
        ignore_index: a label that is not trained.
        tis_cap: cap of truncated importance sampling.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
        *,
        tis_cap: float | None = None,
    ) -> None:
        super().__init__(beta, entropy_coef, ignore_index, tis_cap)
        self.epsilon = number(self, "epsilon", epsilon, least=0)
        high = epsilon if epsilon_high is None else epsilon_high
        self.epsilon_high = number(self, "epsilon_high", high, least=0)

    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        import torch

        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def _numbers(self, ratio: "Tensor", advantages: "Tensor") -> "dict[str, Tensor]":
        return {"clip_ratio": self._clipped(ratio, advantages).to(ratio)}

    def _clipped(self, ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        """Return where the clipped term is the smaller one, bool `[B, T]`."""
        high, low = ratio > 1 + self.epsilon_high, ratio < 1 - self.epsilon
        return (high & (advantages > 0)) | (low & (advantages < 0))
