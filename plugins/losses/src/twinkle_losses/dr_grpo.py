"""Dr. GRPO: clipped policy gradients divided by a constant, so that no length counts for more."""

from typing import TYPE_CHECKING

from twinkle_losses.grpo import GRPOLoss
from twinkle_losses.options import whole
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor


class DRGRPOLoss(GRPOLoss):
    """GRPO's terms, summed over tokens and divided by rows times a constant (arXiv:2503.20783, section 3.2).

    GRPO's mean over a sequence's tokens makes each token of a long wrong answer cost less than one of a short wrong
    answer. Here `loss_sum` is the sum of GRPO's l_t over trained tokens, and `denominator` is the number of rows times
    `max_completion_length`: all rows count, those without trained tokens too. Give advantages that are not divided by
    a deviation (`scale="none"`), the paper's other change.

    `metrics` are those of `GRPOLoss`, as means over rows of the means over a row's tokens.

    Args:
        epsilon: how far a ratio may fall below 1.
        beta: weight of the KL term; above 0 it needs `ref_logps`.
        max_completion_length: the constant, tokens a row: as many as the sampler may draw.
        ignore_index: a label that is not trained.
        epsilon_high: how far a ratio may rise above 1; None is `epsilon`.
        entropy_coef: see `PolicyGradientLoss`, as for the rest.
        tis_cap: cap of truncated importance sampling.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        max_completion_length: int = 1024,
        ignore_index: int = -100,
        *,
        epsilon_high: float | None = None,
        entropy_coef: float = 0.0,
        tis_cap: float | None = None,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, tis_cap=tis_cap)
        self.max_completion_length = whole(self, "max_completion_length", max_completion_length, least=1)

    def _total(self, terms: "Tensor", where: Trained) -> "Tensor":
        return where.sums(terms).sum()

    def _denominator(self, where: Trained) -> int:
        return len(where.counts) * self.max_completion_length

    def _measured(self, values: "Tensor", where: Trained) -> "Tensor":
        return where.means(values).sum() * self.max_completion_length
