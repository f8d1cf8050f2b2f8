"""The optimizer step: gradients are divided once by the denominator of all losses, and clipped by their global norm."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, NonFiniteError, TrainingStateError
from twinkle.logging import get_logger
from twinkle_transformers import losses
from twinkle_transformers.flat_step import measure
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.optimizers import override
from twinkle_transformers.parallel import Replicated, local


def clip_group(group: OptimizerGroup, parallel: Replicated, max_norm: float, norm_type: float, policy: str) -> float:
    """Divide and clip the pending gradients of all ranks; return their norm before clipping.

    Raises:
        NonFiniteError: the norm is not finite and `policy` is "raise"; gradients are discarded, nothing was updated.
    """
    divide(group, parallel)
    norm = clip([local(grad) for grad in gradients(group)], max_norm, norm_type, parallel.combine_norms)
    finite, scale = norm - norm == 0.0, group.loss_scale
    if scale is not None and not group.measured:
        scale.update(overflow=not finite)
    group.last_grad_norm, group.measured = norm, True
    if not finite and scale is not None and not scale.exhausted:
        group.dropped = True  # expected in fp16: the next step has a smaller scale
    elif not finite:
        what = f"the gradient norm of adapter {group.adapter_name!r} is {norm} at step {group.updates + 1}"
        if policy == "raise":
            group.drop_passes()
            raise NonFiniteError(f"{what}; the weights are unchanged (on_nonfinite='skip' leaves such steps out)")
        get_logger().warning("%s; this step is left out", what)
        group.dropped = True
        group.train_status.skipped += parallel.ranks.is_first  # all ranks have the same norm, and one counts it
    return norm


def step_group(
    group: OptimizerGroup, parallel: Replicated, optim_params: Mapping[str, Any] | None, flush: bool, policy: str
) -> None:
    """Update the parameters if an update is due, and add the passes of the step to the metrics.

    Without a call of `clip_group`, gradients are divided and their norm is checked here.

    Raises:
        NonFiniteError: as `clip_group`.
        TrainingStateError: nothing was accumulated, or the step was already made.
    """
    if not group.pending:
        if flush:
            return
        raise TrainingStateError(
            f"step: adapter {group.adapter_name!r} has no accumulated gradients; call backward first"
        )
    if group.stepped:
        raise TrainingStateError("step: this step was already made; call backward first")
    if not group.due(flush):
        return
    if not group.measured:
        clip_group(group, parallel, 0.0, 2.0, policy)
    if optim_params:
        override(group.optimizer, optim_params)
    if not group.dropped:
        parallel.settle()
        group.optimizer.step()
        group.updates += 1
    losses.feed_metrics(group, group.train_status)
    group.stepped = True


def schedule(group: OptimizerGroup, metrics: float | None) -> None:
    """Advance the scheduler by the updates since the last call; pass `metrics` to a scheduler that takes it."""
    scheduler = group.lr_scheduler
    watches = scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters
    if metrics is not None and not watches:
        what = "there is no scheduler" if scheduler is None else f"{type(scheduler).__name__} watches no number"
        raise ArgumentError(f"lr_step: {what}; leave metrics= out, or set one such as ReduceLROnPlateau")
    if scheduler is not None:
        for _ in range(group.updates - group.scheduled):
            if watches:
                scheduler.step(group.last_loss if metrics is None else metrics)
            else:
                scheduler.step()
    group.scheduled = group.updates


def set_accumulation(group: OptimizerGroup, steps: int | None) -> None:
    """Set the number of backward calls a step; None leaves it.

    Raises:
        ArgumentError: it is below 1.
    """
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"gradient_accumulation_steps must be an integer of at least 1, got {steps!r}")
    group.gradient_accumulation_steps = steps


def divide(group: OptimizerGroup, parallel: Replicated) -> None:
    """Sum the pending gradients over ranks and divide them by the denominator of all ranks, once.

    The gradient of a step is `grad(sum of loss sums) / sum of denominators`, so that it does not depend on how the rows
    were split over ranks, micro-batches and accumulation steps. A denominator of 0 (no token was trained) gives a zero
    gradient and a warning.
    """
    if group.divided:
        return
    group.divided = True
    step = f"step {group.updates + 1} of adapter {group.adapter_name!r}"
    denominator, loss_sum = parallel.ranks.agree(step, group.denominator, group.loss_sum).sum(0).tolist()
    group.last_loss = loss_sum / denominator if denominator else 0.0
    parallel.sum_gradients(group.parameters())
    grads = [local(grad) for grad in gradients(group)]
    if denominator <= 0 and not group.skipped:  # skipped micro-batches were logged already
        get_logger().warning("%s has no effect: the denominator of its losses is 0, so its gradient is zero", step)
    if grads and denominator > 0:
        torch._foreach_div_(grads, denominator * (1.0 if group.loss_scale is None else group.loss_scale.factor))
    elif grads:
        torch._foreach_zero_(grads)


def clip(
    grads: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    combine: Callable[[Tensor, float], Tensor] = lambda norm, _: norm,
) -> float:
    """Scale `grads` in place so that their joint norm is at most `max_norm`; return the norm before.

    Args:
        grads: this rank's part of the gradients of all parameters of one adapter.
        max_norm: maximum norm; 0 or less measures without scaling.
        norm_type: p of the p-norm.
        combine: returns the norm over all ranks, given this rank's.
    """
    norm = float(combine(_joint_norm(grads, norm_type), norm_type))
    if grads and 0 < max_norm < norm:
        torch._foreach_mul_(list(grads), max_norm / norm)
    return norm


def _joint_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the joint norm of all `grads`, at least in float32; 0 if this rank's shards are empty."""
    held = [grad for grad in grads if grad.numel()]
    if not held:
        return torch.zeros((), device=grads[0].device if grads else None)
    if norm_type == 2:
        whole: Tensor = torch.linalg.vector_norm(measure(held))  # torch's sum on CPUs loses digits over long tensors
        return whole
    short = [grad for grad in held if grad.dtype in (torch.bfloat16, torch.float16)]
    norms: list[Tensor] = list(torch._foreach_norm(short, norm_type, dtype=torch.float32)) if short else []
    if wide := [grad for grad in held if grad.dtype not in (torch.bfloat16, torch.float16)]:
        norms += torch._foreach_norm(wide, norm_type)
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    joint: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device, dtype) for norm in norms]), norm_type
    )
    return joint


def gradients(group: OptimizerGroup) -> list[Tensor]:
    """Return the gradients that exist."""
    return [p.grad for p in group.parameters() if p.grad is not None]
