"""PPO: clipped policy gradients as a mean over tokens, with a second bound for tokens that are to be unlearnt."""

from typing import TYPE_CHECKING, ClassVar

from twinkle_losses.grpo import GRPOLoss
from twinkle_losses.options import number

if TYPE_CHECKING:
    from torch import Tensor


class PPOLoss(GRPOLoss):
    """Clipped policy gradient, averaged over all trained tokens of the whole step (PPO, arXiv:1707.06347, eq. 7).

    With r_t = exp(logp_t - old_t) and A_t a token's advantage (of generalized advantage estimation, say), its policy
    term is -m_t, with

        m_t = min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t)
        m_t = max(m_t, dual_clip A_t) where A_t < 0, with `dual_clip` (arXiv:1912.09729, eq. 5)

    Without the second line a token of negative advantage that has become much more probable since it was sampled counts
    without bound. `loss_sum` is the sum over trained tokens, `denominator` their number. The loss of the value head is
    another component. Metrics are those of `GRPOLoss`, and the second bound counts as clipping.

    Args:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far it may rise above 1; None is `epsilon`.
        beta: see `PolicyGradientLoss`, as for the rest.
        entropy_coef: weight of the entropy.
        ignore_index: a label that is not trained.
        dual_clip: the largest ratio that counts where an advantage is negative; above 1 + `epsilon_high` (the paper
            has 3). None is no such bound.
        tis_cap: cap of truncated importance sampling.

    Raises:
        ArgumentError: an option is outside its range.
    """

    over_tokens: ClassVar[bool] = True

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
        *,
        dual_clip: float | None = None,
        tis_cap: float | None = None,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, tis_cap=tis_cap)
        bound = 1 + self.epsilon_high
        self.dual_clip = None if dual_clip is None else number(self, "dual_clip", dual_clip, above=bound)

    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        import torch

        terms = super()._policy_terms(ratio, advantages, logps)
        if self.dual_clip is None:
            return terms
        return torch.where(advantages < 0, torch.minimum(terms, -self.dual_clip * advantages), terms)

    def _clipped(self, ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        clipped = super()._clipped(ratio, advantages)
        return clipped if self.dual_clip is None else clipped | ((ratio > self.dual_clip) & (advantages < 0))
