"""`stable_reinforce`: policy gradients with one truncated importance weight for each sampled sequence.

Tinker publishes the name and the inputs of this loss, not its formula. The formula here is Twinkle's own.
"""

from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError
from twinkle.loss import Loss
from twinkle_losses.options import number
from twinkle_losses.tinker.drawn import Drawn

if TYPE_CHECKING:
    from torch import Tensor


class StableReinforce(Loss):
    """REINFORCE with truncated sequence weights and a KL penalty: Twinkle's own formula, not Tinker's.

    A row holds sampled sequences s, each a set of positions that one version of the policy sampled. With lp a token's
    log-probability now, q the one at sampling time, A its advantage and sg a value held constant, the sum over the
    sequences of a row is

    `-w_s sum_t A_t lp_t + kl_coeff sum_t (r_t - 1 - log r_t)`, t over the positions of s, with

    - `w_s = min(exp(sum_t sg(lp_t) - q_t), weight_cap)`: the importance weight of the whole sequence, truncated from
      above (Ionides, Truncated Importance Sampling, J. Comput. Graph. Stat. 17, 2008). A weight of a sequence instead
      of one for each token corrects the distribution of the whole sample (Liu, Li et al., When Speed Kills Stability,
      2025). Sequences of a row are weighted apart, as actions given what precedes them (Degris, White, Sutton,
      arXiv:1205.4839): the distribution of the contexts is not corrected.
    - `-w A lp`, whose gradient is REINFORCE's (Williams, 1992) times the weight; the weight has no gradient.
    - `r_t = exp(lp_t - q_t)`: `r - 1 - log r` is the k3 estimator of KL(q || p) (Schulman, Approximating KL
      Divergence, 2020). The tokens are drawn from q, so that value and gradient are unbiased given the context.

    The denominator is the number of positions that have a target. `metrics`, sums over those positions as well: `kl`
    (the k3 estimate), `weight` (w_s), `truncated` (1 where the weight was truncated), and `twinkle_own_formula`
    (always 1: marks results of this formula).

    Args:
        kl_coeff: weight of the KL penalty, which applies to every sampled position, independent of its advantage.
        weight_cap: largest weight of a sequence.

    Raises:
        ArgumentError: `kl_coeff` is negative, `weight_cap` is not above 0, or one is not a number.
    """

    row_inputs = ("sampled_sequence",)

    def __init__(self, kl_coeff: float = 0.0, weight_cap: float = 2.0) -> None:
        self.kl_coeff = number(self, "kl_coeff", kl_coeff, least=0)
        self.weight_cap = number(self, "weight_cap", weight_cap, above=0)

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        advantages: Any = None,
        sampled_sequence: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels` int64 `[B, T]`, -100 where there is no target.
            outputs: `logps` float32 `[B, T]`.
            old_logps: q, one number a token.
            advantages: A, one number a token; 0 where the token was not sampled.
            sampled_sequence: for each token the number of its sequence in the row, from 1; 0 where the token was not
                sampled. None: the positions of a row that have a target are one sequence.

        Raises:
            ArgumentError: an argument is missing, its lengths do not fit, or a token that was not sampled has an
                advantage.
        """
        import torch

        drawn = Drawn.of(self, inputs, outputs, old_logps, advantages)
        sequence = _sequences(drawn, sampled_sequence)
        sampled = sequence > 0
        _check_advantages(drawn, sampled)
        log_ratio = torch.where(sampled, drawn.logps - drawn.old, 0.0)
        moved = torch.zeros(len(sequence), int(sequence.max()) + 1, dtype=log_ratio.dtype, device=log_ratio.device)
        moved = moved.scatter_add(1, sequence, log_ratio.detach()).gather(1, sequence)
        cap = torch.full_like(moved, self.weight_cap)
        weight = torch.where(sampled, torch.minimum(moved.exp(), cap), 0.0)
        terms = -weight * drawn.advantages * torch.where(sampled, drawn.logps, 0.0)
        if self.kl_coeff:
            terms = terms + self.kl_coeff * (log_ratio.expm1() - log_ratio)
        result = drawn.total(terms)
        with torch.no_grad():
            kl = log_ratio.detach().expm1() - log_ratio.detach()
            counts = {"kl": kl, "weight": weight, "truncated": (sampled & (moved.exp() > cap)).to(kl)}
            metrics = {name: float(values.sum()) for name, values in counts.items()}
        return LossOutput(
            result.loss_sum, result.denominator, {**metrics, "twinkle_own_formula": float(result.denominator)}
        )


def _sequences(drawn: Drawn, given: Any) -> "Tensor":
    """Return the number of each token's sequence `[B, T]` int64, 0 where nothing was sampled."""
    if given is None:
        return drawn.where.mask.long()
    numbers = drawn.where.align("sampled_sequence", given, drawn.old)
    found = numbers.long()
    width = found.shape[1]
    if bool(((numbers != found) | (found < 0) | (found > width)).any()):
        raise ArgumentError(f"StableReinforce: sampled_sequence must hold whole numbers from 0 to {width}")
    return found


def _check_advantages(drawn: Drawn, sampled: "Tensor") -> None:
    astray = (drawn.advantages != 0) & ~sampled
    if bool(astray.any()):
        row, place = astray.nonzero()[0].tolist()
        raise ArgumentError(
            f"StableReinforce: advantages must be 0 at tokens that were not sampled, got "
            f"{float(drawn.advantages[row, place])} at token {place} of row {row}"
        )
