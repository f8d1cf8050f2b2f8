"""REINFORCE: the plain policy gradient, as RLOO and REINFORCE++ take it."""

from typing import TYPE_CHECKING, Literal, get_args

from twinkle.errors import ArgumentError
from twinkle_losses.options import flag
from twinkle_losses.policy_gradient import PolicyGradientLoss
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

Per = Literal["sequence", "token"]


class ReinforceLoss(PolicyGradientLoss):
    """Policy gradient that clips nothing: -A_t logp_t for each trained token.

    With `importance_ratio` a token's policy term is -r_t A_t, r_t = exp(logp_t - old_t), whose gradient is the plain
    one times r_t: for tokens that older weights sampled.

    `loss_sum` is the sum over trained tokens. `per="sequence"` divides it by the number of sequences that train
    something: a whole answer is one action, whose log-probability is the sum of its tokens' (RLOO,
    arXiv:2402.14740). `per="token"` divides it by the number of trained tokens: each token is an action, as in
    REINFORCE++ (arXiv:2501.03262). The baseline, RLOO's or another, is in the advantages.

    `metrics` are those of `PolicyGradientLoss`, as means over sequences, or over tokens.

    Args:
        per: "sequence" or "token".
        importance_ratio: weight tokens by their ratio; needs `old_logps` to have an effect.
        beta: see `PolicyGradientLoss`, as for the rest.
        entropy_coef: weight of the entropy.
        ignore_index: a label that is not trained.
        tis_cap: cap of truncated importance sampling.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        per: Per = "sequence",
        importance_ratio: bool = False,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
        *,
        tis_cap: float | None = None,
    ) -> None:
        super().__init__(beta, entropy_coef, ignore_index, tis_cap)
        if per not in get_args(Per):
            raise ArgumentError(f"ReinforceLoss: per={per!r}; it must be one of {', '.join(get_args(Per))}")
        self.per = per
        self.importance_ratio = flag(self, "importance_ratio", importance_ratio)

    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        return -(ratio if self.importance_ratio else logps) * advantages

    def _total(self, terms: "Tensor", where: Trained) -> "Tensor":
        return where.sums(terms).sum()

    def _denominator(self, where: Trained) -> int:
        return where.sequences if self.per == "sequence" else sum(where.counts)

    def _measured(self, values: "Tensor", where: Trained) -> "Tensor":
        return (where.means(values) if self.per == "sequence" else where.sums(values)).sum()
