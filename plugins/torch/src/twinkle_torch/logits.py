"""What lies between a head's product and a distribution: the model's own transform of its logits, and dtypes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to the product of hidden states and head: `softcap(z * scale) / temperature`.

    Attributes:
        scale: factor on the raw logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: c in `c * tanh(z / c)` (Gemma 2, arXiv:2408.00118, section 2); None is off.
        temperature: of the distribution whose log-probabilities are wanted.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the transformed logits of `raw`, same shape."""
        z = raw if self.scale == 1.0 else raw * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if self.temperature == 1.0 else z / self.temperature

    def apply_(self, raw: Tensor) -> Tensor:
        """Transform `raw` in place, for tensors that no graph needs."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw if self.temperature == 1.0 else raw.div_(self.temperature)

    @property
    def factor(self) -> float:
        """The constant part of d z / d raw."""
        return self.scale / self.temperature

    def bend(self, z: Tensor) -> Tensor | None:
        """Return the part of d z / d raw that depends on the logits, `1 - tanh^2`, in z's shape; None is 1."""
        if self.softcap is None:
            return None
        capped = z * (self.temperature / self.softcap)
        return capped.square_().neg_().add_(1.0)


def transform_of(config: Any) -> LogitTransform:
    """Return the transform that a transformers text configuration asks for.

    Args:
        config: with `logit_scale` (Cohere), `logits_scaling` (Granite; a divisor) or `final_logit_softcapping` (Gemma
            2), any of them absent or None.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale = scale / divisor
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to compute beside the log-probabilities of the targets."""

    entropies: bool = False
    uniform: bool = False
    predictions: bool = False
    top: int = 0
    """How many of the most probable tokens."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which soft-maxes and sums of `dtype` numbers are done: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def logits_of(h: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """Return `transform(h @ weight.T + bias)` in a wide dtype, without a graph.

    Args:
        h: `[n, H]`.
        weight: `[V, H]` of the same dtype.
        bias: `[V]` or None.
        transform: what the model does to the product.
    """
    return transform.apply_(nn.functional.linear(h, weight, bias).to(wide(h.dtype)))
