"""What the losses of policy gradients read: log-probabilities now and at sampling time, advantages, thresholds."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError
from twinkle_losses.options import number, score
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

_ON_THE_WIRE = {"old_logps": "'logprobs' of a Tinker datum"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch of sampled tokens.

    Attributes:
        where: the positions that have a target.
        logps: log-probabilities under the model `[B, T]`, with gradient.
        old: those under the policy that sampled `[B, T]`.
        advantages: of the tokens `[B, T]`.
        scale: `loss_scale` `[B, T]` of the batch, if it has one.
    """

    where: Trained
    logps: "Tensor"
    old: "Tensor"
    advantages: "Tensor"
    scale: "Tensor | None"

    @classmethod
    def of(cls, loss: object, inputs: InputBatch, outputs: ModelOutput, old_logps: Any, advantages: Any) -> "Drawn":
        """Read a batch.

        Raises:
            ArgumentError: an argument is missing, or its lengths are not those of the rows.
            DataError: labels are not one token a position.
        """
        logps = score(inputs, outputs, "logps", loss)
        where = Trained.of(inputs, logps, -100, loss)
        old = where.align("old_logps", given(loss, "old_logps", old_logps), logps)
        weights = where.align("advantages", given(loss, "advantages", advantages), logps)
        return cls(where, logps, old, weights, inputs.get("loss_scale"))

    def log_ratio(self) -> "Tensor":
        """Return lp - q `[B, T]`, 0 where the advantage is 0: there a ratio that overflows would make NaN of 0."""
        import torch

        return torch.where(self.where.mask & (self.advantages != 0), self.logps - self.old, 0.0)

    def total(self, terms: "Tensor") -> LossOutput:
        """Return the sum of terms `[B, T]`; its denominator is the number of positions that have a target."""
        if self.scale is not None:
            terms = terms * self.scale.to(terms)
        return LossOutput(self.where.fill(terms).sum(), sum(self.where.counts))


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of every token's ratio: absolute values, not distances from 1.

    Attributes:
        low: the smallest ratio.
        high: the largest.
    """

    low: float
    high: float

    @classmethod
    def checked(cls, loss: object, low: Any, high: Any) -> "Clip":
        """Return the bounds of tokens without their own bounds.

        Raises:
            ArgumentError: they are no numbers of at least 0, or the wrong way round.
        """
        bounds = [
            number(loss, name, value, least=0)
            for name, value in (("clip_low_threshold", low), ("clip_high_threshold", high))
        ]
        if bounds[0] > bounds[1]:
            raise ArgumentError(
                f"{type(loss).__name__}: clip_low_threshold={low!r} is above clip_high_threshold={high!r}; they bound "
                "the ratio itself (0.8 and 1.2, say), not its distance from 1"
            )
        return cls(*bounds)

    def of_tokens(self, drawn: Drawn, low: Any, high: Any) -> "Bounds":
        """Return the bounds of each token.

        Args:
            drawn: the batch.
            low: `clip_low_threshold` of each token, in any form of a per-row argument; None is the same for all.
            high: upper bound, in the same form.

        Raises:
            ArgumentError: a token's bounds are the wrong way round.
        """
        import torch

        own = [
            torch.full_like(drawn.old, bound) if value is None else drawn.where.align(name, value, drawn.old)
            for name, value, bound in (("clip_low_threshold", low, self.low), ("clip_high_threshold", high, self.high))
        ]
        given_some = low is not None or high is not None
        if given_some and bool(((own[0] > own[1]) & drawn.where.mask).any()):
            raise ArgumentError(
                f"{drawn.where.loss}: a token's clip_low_threshold is above its clip_high_threshold; they bound the "
                "ratio itself (0.8 and 1.2, say), not its distance from 1"
            )
        return Bounds(*own)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the ratios of tokens, `[B, T]` each."""

    low: "Tensor"
    high: "Tensor"

    def __call__(self, ratio: "Tensor") -> "Tensor":
        """Return the ratios within the bounds."""
        import torch

        return torch.clamp(ratio, self.low, self.high)

    def smaller(self, log_ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        """Return min(r A, clamp(r) A) `[B, T]` with r = exp(log_ratio).

        A clipped term is a constant and never meets r's gradient: where r overflows, that would be NaN.
        """
        import torch

        ratio = log_ratio.detach().exp()
        bounded = self(ratio)
        clipped = ((ratio > bounded) & (advantages > 0)) | ((ratio < bounded) & (advantages < 0))
        free = torch.where(clipped, 0.0, log_ratio).exp()
        return torch.where(clipped, bounded, free) * advantages


def given(loss: object, name: str, value: Any) -> Any:
    """Return a per-row argument.

    Raises:
        ArgumentError: it is None.
    """
    if value is None:
        wire = f" ({_ON_THE_WIRE[name]})" if name in _ON_THE_WIRE else ""
        raise ArgumentError(f"{type(loss).__name__}: {name}{wire} is missing; give one number a token")
    return value
