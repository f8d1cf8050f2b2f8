"""GSPO: clipped policy gradients with one ratio for a whole sequence."""

from typing import TYPE_CHECKING

from twinkle_losses.grpo import GRPOLoss
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor


class GSPOLoss(GRPOLoss):
    """GRPO's loss with the geometric mean of a sequence's ratios in the place of each of them.

    With s = exp(mean of logp_t - old_t over the sequence's trained tokens), a sequence's policy term is (GSPO,
    arXiv:2507.18071, eq. 5 to 7)

        - min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A)

    Means, denominator and metrics are those of `GRPOLoss`. s moves far less than a single ratio, so that its bounds
    are far narrower than GRPO's: the paper's are `epsilon=3e-4, epsilon_high=4e-4` (section 5.1); the defaults here are
    those of the published interface. The gradient of s is shared by all tokens: of advantages that differ within a
    sequence it sees their mean (the loss `gspo` is the paper's GSPO-token, eq. 13 and 14, which does not).
    """

    def _log_ratio(self, logps: "Tensor", old: "Tensor", where: Trained) -> "Tensor":
        return where.fill(where.means(logps - old)[:, None].expand_as(logps))
