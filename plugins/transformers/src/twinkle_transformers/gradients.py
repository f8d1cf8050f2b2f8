"""Dividing and clipping gradients: once a step, by what all its losses counted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle.logging import get_logger
from twinkle_transformers.group import OptimizerGroup


def divide(group: OptimizerGroup) -> None:
    """Divide the pending gradients by their denominator, once.

    The gradient of a step is `grad(sum of loss sums) / sum of denominators`. A denominator of 0 (no token was trained)
    is a zero gradient, and the log says so.
    """
    if group.divided:
        return
    grads = gradients(group)
    if group.denominator > 0:
        torch._foreach_div_(grads, group.denominator) if grads else None
    else:
        get_logger().warning(
            "step %d of adapter %r trained nothing: the denominators of its losses add up to 0; its gradient is zero",
            group.updates + 1,
            group.adapter_name,
        )
        torch._foreach_zero_(grads) if grads else None
    group.divided = True


def clip(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> float:
    """Scale `grads` in place so that their joint norm is at most `max_norm`; return the norm before.

    Args:
        grads: gradients of all parameters of one adapter.
        max_norm: the bound; 0 or less measures without scaling.
        norm_type: p of the p-norm.
    """
    if not grads:
        return 0.0
    total = torch.nn.utils.get_total_norm(grads, norm_type)
    norm = float(total)
    if max_norm > 0 and norm > max_norm:
        torch._foreach_mul_(list(grads), max_norm / norm)
    return norm


def gradients(group: OptimizerGroup) -> list[Tensor]:
    """Return the gradients that exist."""
    return [p.grad for p in group.parameters() if p.grad is not None]
