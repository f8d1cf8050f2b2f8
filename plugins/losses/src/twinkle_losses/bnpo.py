"""Clipped policy gradients as a mean over all tokens: BNPO, and DAPO with its bounds."""

from typing import ClassVar

from twinkle_losses.grpo import GRPOLoss


class BNPOLoss(GRPOLoss):
    """GRPO's terms, averaged over all trained tokens of the whole step: a long answer counts for its length.

    `loss_sum` is the sum of GRPO's l_t over trained tokens, `denominator` the number of trained tokens, both exact
    whatever the split (elsewhere this loss is a mean over the tokens of a local batch, then over batches: a token of a
    short batch counted more). It is the aggregation that goes by this name beside GRPO's; the Beta distribution that
    the BNPO paper divides rewards by (arXiv:2506.02864) belongs to the advantages.

    Arguments and metrics are those of `GRPOLoss`.
    """

    over_tokens: ClassVar[bool] = True


class DAPOLoss(BNPOLoss):
    """Clip-higher and a mean over all trained tokens (DAPO, arXiv:2503.14476, eq. 8 to 12).

    With r_t = exp(logp_t - old_t), a trained token's term is

        l_t = - min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t)

    `loss_sum` is its sum over trained tokens, `denominator` the number of trained tokens of the whole step (eq. 12
    writes the mean within one prompt's group, and an expectation over prompts). It is `BNPOLoss` with the paper's
    bounds and without a KL term (section 2.3). What else is DAPO's is no part of a loss: groups of equal rewards are
    drawn anew (eq. 11), and long answers are punished by a reward (eq. 13).

    Args:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far it may rise above 1.
        entropy_coef: see `PolicyGradientLoss`, as for the rest.
        ignore_index: a label that is not trained.
        tis_cap: cap of truncated importance sampling.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float = 0.28,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
        *,
        tis_cap: float | None = None,
    ) -> None:
        super().__init__(epsilon, epsilon_high, 0.0, entropy_coef, ignore_index, tis_cap=tis_cap)
