"""CPO: contrastive preferences without a reference, held in place by the likelihood of the chosen rows."""

from typing import TYPE_CHECKING

from twinkle_losses.options import label_to_ignore, number
from twinkle_losses.pair_loss import Halves, PairLoss
from twinkle_losses.pairs import reward_numbers

if TYPE_CHECKING:
    from torch import Tensor


class CPOLoss(PairLoss):
    """Preference loss over pairs of rows `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, averaged over the pairs.

    With c and r the sum of logp_t over the trained tokens of the chosen and of the rejected row, n the number of
    tokens of the chosen row and s the logistic function, a pair's term is (CPO, arXiv:2401.08417, section 3)

        -log s( beta (c - r) ) - bc_coef c / n

    The second part is the likelihood of the chosen row, which keeps the model near preferred text (behaviour cloning).
    The paper writes it as a sum; here it is the mean over the row's tokens, so that `bc_coef` means the same for short
    and long rows, and every pair counts alike.

    Where the batch has `loss_scale`, it multiplies logp_t, and the number of tokens stays. `loss_sum` is the sum over
    pairs, `denominator` the number of pairs that train something: a pair of which neither row has a trained token
    counts nothing.

    `metrics`, sums over pairs as well: `rewards/chosen` (beta c), `rewards/rejected` (beta r), `rewards/margins`
    (beta (c - r)), `rewards/accuracies` (1 where c > r), `logps/chosen` (c), `logps/rejected` (r), `nll` (-c / n).

    Args:
        beta: scale of the rewards, above 0.
        bc_coef: weight of the chosen rows' likelihood, at least 0.
        ignore_index: a label that is not trained, in addition to -100.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(self, beta: float = 0.1, bc_coef: float = 1.0, ignore_index: int = -100) -> None:
        self.beta = number(self, "beta", beta, above=0)
        self.bc_coef = number(self, "bc_coef", bc_coef, least=0)
        self.ignore_index = label_to_ignore(self, ignore_index)

    def _terms(self, sums: Halves, means: Halves) -> "tuple[Tensor, dict[str, Tensor]]":
        from torch.nn.functional import logsigmoid

        (chosen, rejected), (likelihood, _) = sums, means
        terms = -logsigmoid(self.beta * (chosen - rejected)) - self.bc_coef * likelihood
        return terms, reward_numbers(self.beta, chosen, rejected) | {"nll": -likelihood.detach()}
