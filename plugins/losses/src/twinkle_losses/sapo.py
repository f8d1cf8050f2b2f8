"""SAPO: a soft gate in the place of clipping."""

from typing import TYPE_CHECKING

from twinkle_losses.options import number
from twinkle_losses.policy_gradient import PolicyGradientLoss

if TYPE_CHECKING:
    from torch import Tensor


class SAPOLoss(PolicyGradientLoss):
    """Policy gradient whose tokens fade out as their ratio leaves 1, averaged over tokens, then over sequences.

    With r_t = exp(logp_t - old_t), s the logistic function and tau = `tau_pos` where A_t > 0, `tau_neg` elsewhere, a
    trained token's policy term is (SAPO, arXiv:2511.20347)

        - (4 / tau) s(tau (r_t - 1)) A_t

    Its gradient is the plain policy's at r_t = 1 and falls to nothing on both sides, the faster the larger tau. Means,
    denominator and metrics are those of `PolicyGradientLoss`; `clip_ratio` is the share of tokens whose ratio is
    farther than `epsilon` from 1.

    Args:
        epsilon: for `clip_ratio` alone: nothing is clipped.
        beta: see `PolicyGradientLoss`, as for the rest.
        tau_pos: temperature of tokens of positive advantage, above 0.
        tau_neg: of the others; the paper's is 1.05, above that of positive ones, which calms training.
        ignore_index: a label that is not trained.
        entropy_coef: weight of the entropy.
        tis_cap: cap of truncated importance sampling.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        tau_pos: float = 1.0,
        tau_neg: float = 1.0,
        ignore_index: int = -100,
        *,
        entropy_coef: float = 0.0,
        tis_cap: float | None = None,
    ) -> None:
        super().__init__(beta, entropy_coef, ignore_index, tis_cap)
        self.epsilon = number(self, "epsilon", epsilon, least=0)
        self.tau_pos = number(self, "tau_pos", tau_pos, above=0)
        self.tau_neg = number(self, "tau_neg", tau_neg, above=0)

    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        import torch

        tau = torch.where(advantages > 0, ratio.new_tensor(self.tau_pos), ratio.new_tensor(self.tau_neg))
        return -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages

    def _numbers(self, ratio: "Tensor", advantages: "Tensor") -> "dict[str, Tensor]":
        return {"clip_ratio": ((ratio - 1).abs() > self.epsilon).to(ratio)}
