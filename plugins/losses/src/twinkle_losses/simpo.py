"""SimPO: preferences by mean log-probabilities, with a margin and without a reference."""

from typing import TYPE_CHECKING

from twinkle_losses.options import label_to_ignore, number
from twinkle_losses.pair_loss import Halves, PairLoss
from twinkle_losses.pairs import reward_numbers

if TYPE_CHECKING:
    from torch import Tensor


class SimPOLoss(PairLoss):
    """Preference loss over pairs of rows `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, averaged over the pairs.

    With c and r the mean of logp_t over the trained tokens of the chosen and of the rejected row, and s the logistic
    function, a pair's term is (SimPO, arXiv:2405.14734, eq. 6)

        -log s( beta (c - r) - gamma )

    Where the batch has `loss_scale`, it multiplies logp_t, and the number of tokens stays. `loss_sum` is the sum over
    pairs, `denominator` the number of pairs that train something: a pair of which neither row has a trained token
    counts nothing.

    `metrics`, sums over pairs as well: `rewards/chosen` (beta c), `rewards/rejected` (beta r), `rewards/margins`
    (beta (c - r), before gamma is taken off), `rewards/accuracies` (1 where c > r), `logps/chosen` and
    `logps/rejected` (sums of the rows' log-probabilities).

    Args:
        beta: scale of the rewards, above 0.
        gamma: by how much the chosen row's reward shall lead, at least 0.
        ignore_index: a label that is not trained, in addition to -100.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(self, beta: float = 2.5, gamma: float = 0.5, ignore_index: int = -100) -> None:
        self.beta = number(self, "beta", beta, above=0)
        self.gamma = number(self, "gamma", gamma, least=0)
        self.ignore_index = label_to_ignore(self, ignore_index)

    def _terms(self, sums: Halves, means: Halves) -> "tuple[Tensor, dict[str, Tensor]]":
        from torch.nn.functional import logsigmoid

        chosen, rejected = means
        terms = -logsigmoid(self.beta * (chosen - rejected) - self.gamma)
        return terms, reward_numbers(self.beta, chosen, rejected)
