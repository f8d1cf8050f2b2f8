"""Policy gradients of the Tinker protocol that look at one token at a time.

In all of them lp is a token's log-probability now, q the one at sampling time, A its advantage, r = exp(lp - q), and sg
holds a value constant. `loss_scale`, where a batch has it, multiplies each token's term.
"""

from typing import Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_losses.options import number
from twinkle_losses.tinker.drawn import Clip, Drawn


class ImportanceSampling(Loss):
    """Policy gradient with importance weights: `-sum r A`."""

    def __call__(
        self, inputs: InputBatch, outputs: ModelOutput, old_logps: Any = None, advantages: Any = None
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: `labels` int64 `[B, T]`, -100 where there is no target.
            outputs: `logps` float32 `[B, T]`.
            old_logps: q, one number a token.
            advantages: A, one number a token.

        Raises:
            ArgumentError: an argument is missing, or its lengths do not fit.
        """
        drawn = Drawn.of(self, inputs, outputs, old_logps, advantages)
        return drawn.total(-drawn.log_ratio().exp() * drawn.advantages)


class Ppo(Loss):
    """Clipped policy gradient (PPO, arXiv:1707.06347, eq. 7): `-sum min(r A, clamp(r, low, high) A)`.

    Args:
        clip_low_threshold: the smallest ratio that counts; the value itself, not its distance from 1.
        clip_high_threshold: the largest.

    Raises:
        ArgumentError: a threshold is no number of at least 0, or they are the wrong way round.
    """

    row_inputs = ("clip_low_threshold", "clip_high_threshold")

    def __init__(self, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> None:
        self.clip = Clip.checked(self, clip_low_threshold, clip_high_threshold)

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        advantages: Any = None,
        clip_low_threshold: Any = None,
        clip_high_threshold: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: see `ImportanceSampling`.
            outputs: see `ImportanceSampling`.
            old_logps: q, one number a token.
            advantages: A, one number a token.
            clip_low_threshold: of each token; None is the loss's own.
            clip_high_threshold: upper bound, in the same form.

        Raises:
            ArgumentError: an argument is missing, or its lengths do not fit.
        """
        drawn = Drawn.of(self, inputs, outputs, old_logps, advantages)
        bounds = self.clip.of_tokens(drawn, clip_low_threshold, clip_high_threshold)
        return drawn.total(-bounds.smaller(drawn.log_ratio(), drawn.advantages))


class Cispo(Loss):
    """Clipped importance weights (CISPO, arXiv:2506.13585, eq. 4): `-sum sg(clamp(r, low, high)) lp A`.

    Every token keeps a gradient; clipping bounds its weight. Tinker's documentation has two pairs of defaults: 0.0 and
    4.0 in its tutorials (taken here), 0.8 and 1.2 in older pages.

    Args:
        clip_low_threshold: the smallest weight; a value of the ratio itself.
        clip_high_threshold: the largest.

    Raises:
        ArgumentError: a threshold is no number of at least 0, or they are the wrong way round.
    """

    row_inputs = ("clip_low_threshold", "clip_high_threshold")

    def __init__(self, clip_low_threshold: float = 0.0, clip_high_threshold: float = 4.0) -> None:
        self.clip = Clip.checked(self, clip_low_threshold, clip_high_threshold)

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        advantages: Any = None,
        clip_low_threshold: Any = None,
        clip_high_threshold: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch; see `Ppo` for the arguments."""
        drawn = Drawn.of(self, inputs, outputs, old_logps, advantages)
        bounds = self.clip.of_tokens(drawn, clip_low_threshold, clip_high_threshold)
        weights = bounds(drawn.log_ratio().detach().exp())
        return drawn.total(-weights * drawn.logps * drawn.advantages)


class Dro(Loss):
    """Direct reward optimisation (DRO, arXiv:2405.19107): `-sum (lp A - beta/2 (lp - q)^2)`.

    Args:
        beta: weight of the distance from the policy that sampled. The protocol states no default; 0.05 is the value of
            its documentation's example.

    Raises:
        ArgumentError: `beta` is no number of at least 0.
    """

    def __init__(self, beta: float = 0.05) -> None:
        self.beta = number(self, "beta", beta, least=0)

    def __call__(
        self, inputs: InputBatch, outputs: ModelOutput, old_logps: Any = None, advantages: Any = None
    ) -> LossOutput:
        """Compute the loss of one micro-batch; see `ImportanceSampling` for the arguments."""
        drawn = Drawn.of(self, inputs, outputs, old_logps, advantages)
        distance = drawn.where.fill(drawn.logps - drawn.old)
        return drawn.total(self.beta / 2 * distance.square() - drawn.logps * drawn.advantages)
