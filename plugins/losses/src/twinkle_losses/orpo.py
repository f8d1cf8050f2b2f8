"""ORPO: the likelihood of the chosen rows and the odds of chosen against rejected ones, without a reference."""

import math
from typing import TYPE_CHECKING

from twinkle_losses.options import label_to_ignore, number
from twinkle_losses.pair_loss import Halves, PairLoss

if TYPE_CHECKING:
    from torch import Tensor


class ORPOLoss(PairLoss):
    """Preference loss over pairs of rows `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, averaged over the pairs.

    With c and r the mean of logp_t over the trained tokens of the chosen and of the rejected row, s the logistic
    function and odds(x) = e^x / (1 - e^x), a pair's term is (ORPO, arXiv:2403.07691, eq. 6 and 7)

        -c - lambda_orpo log s( log( odds(c) / odds(r) ) )

    Where the batch has `loss_scale`, it multiplies logp_t, and the number of tokens stays. `loss_sum` is the sum over
    pairs, `denominator` the number of pairs that train something: a pair of which neither row has a trained token
    counts nothing. A mean probability that rounds to 1 has the largest finite odds of its dtype.

    `metrics`, sums over pairs as well: `log_odds_ratio`, `rewards/accuracies` (1 where c > r), `logps/chosen` and
    `logps/rejected` (sums of the rows' log-probabilities), `nll` (-c).

    Args:
        lambda_orpo: weight of the odds, at least 0.
        ignore_index: a label that is not trained, in addition to -100.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(self, lambda_orpo: float = 0.1, ignore_index: int = -100) -> None:
        self.lambda_orpo = number(self, "lambda_orpo", lambda_orpo, least=0)
        self.ignore_index = label_to_ignore(self, ignore_index)

    def _terms(self, sums: Halves, means: Halves) -> "tuple[Tensor, dict[str, Tensor]]":
        from torch.nn.functional import logsigmoid

        chosen, rejected = means
        ratio = _log_odds(chosen) - _log_odds(rejected)
        terms = -chosen - self.lambda_orpo * logsigmoid(ratio)
        return terms, {
            "log_odds_ratio": ratio.detach(),
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "nll": -chosen.detach(),
        }


def _log_odds(logp: "Tensor") -> "Tensor":
    """Return log(p / (1 - p)) of log p, exact for p near 0 and near 1, finite for p = 1."""
    import torch

    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    near_one = logp > -math.log(2)
    # Each branch sees only what it is exact for: the other one's gradient would be infinite there.
    by_expm1 = (-torch.expm1(torch.where(near_one, logp, -1.0))).log()
    by_log1p = torch.log1p(-torch.where(near_one, -1.0, logp).exp())
    return logp - torch.where(near_one, by_expm1, by_log1p)
