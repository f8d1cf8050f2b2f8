"""Clips and steps many optimizers at once, each over one flat vector, with the results of torch's own `step()`.

The trainable weights of an adapter are one flat parameter with one flat gradient, so a step is a few operations on long
vectors instead of hundreds on small matrices. An ordinary `torch.optim` object owns moments and step count, so
schedulers, `state_dict` and `load_state_dict` are torch's own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from twinkle.errors import ArgumentError

_FUSED = (Adam, AdamW)
_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_ROW, _LONG = 1 << 12, 1 << 15
"""torch's float32 sum on a CPU has a relative error of 3e-4 for 10 M numbers, so long vectors are summed by rows."""
_TINY = 2.0**-126
"""The smallest normal float32."""


def is_elementwise(cls: type[Optimizer]) -> bool:
    """Return whether `cls` updates each number independently of others, so that a flat vector equals its matrices.

    Of torch's own classes these are ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop and SGD;
    Adafactor and Muon depend on whole matrices. Other classes (also subclasses) declare it with `elementwise = True`.
    """
    declared = vars(cls).get("elementwise")
    if declared is not None:
        return bool(declared)
    return cls.__module__.startswith("torch.optim.") and cls.__name__ in _ELEMENTWISE


@torch.no_grad()
def measure(grads: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, without synchronizing the device.

    Args:
        grads: n dense tensors of one device and any shapes.

    Returns:
        `[n]` on their device: float64 where any is, else float32. The relative error is below 1e-6 at any length, for
        bfloat16 and float16 below 1e-5.
    """
    if not grads:
        return torch.zeros(0)
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    short = [_row_norms(grad, dtype) if grad.is_cpu and grad.numel() > _LONG else grad for grad in grads]
    return torch.stack(list(torch._foreach_norm(short, 2.0, dtype=dtype)))


@torch.no_grad()
def scale_(grads: Sequence[Tensor], factors: Sequence[float] | Tensor) -> None:
    """Multiply each tensor in place by its own factor, in one call.

    Args:
        grads: n tensors.
        factors: n numbers, or a tensor `[n]` on their device, which is not read by the host.

    Raises:
        ArgumentError: not as many factors as tensors.
    """
    if len(factors) != len(grads):
        raise ArgumentError(f"scale_: there must be one factor for each tensor, got {len(factors)} for {len(grads)}")
    if not grads:
        return
    if isinstance(factors, Tensor):
        torch._foreach_mul_(list(grads), list(factors.unbind()))
    else:
        torch._foreach_mul_(list(grads), [float(factor) for factor in factors])


@torch.no_grad()
def clip_and_step(optimizers: Sequence[Optimizer], denominators: Sequence[float], max_norms: Sequence[float]) -> Tensor:
    """Divide, clip and step n optimizers: `g /= denominator * max(1, norm / max_norm)`, then the update.

    The norm is that of all gradients of one optimizer, after the division by its denominator. Optimizers that are
    fused Adam or AdamW over one float32 tensor are updated together: on the host one kernel call for each distinct set
    of options, on a CUDA device one launch each, queued before the host knows any norm. The rest take their own
    `step()`: other classes, dtypes, several tensors, hooks, an `lr` that is a tensor, and the first step, in which
    torch makes the state.

    Args:
        optimizers: n different optimizers with gradients on one device. One without gradients is not stepped.
        denominators: denominators of the losses; 0 or less gives a zero gradient.
        max_norms: maximum norms; 0 or less measures without clipping.

    Returns:
        norms before clipping `[n]`, float32 (float64 where gradients are). If one is not finite, the weights,
        moments and step count of that optimizer are unchanged; the gradients of the others are those that were applied.

    Raises:
        ArgumentError: lists of different lengths, an optimizer named twice, a NaN bound, several devices.
        ExceptionGroup: errors of `step()` of single optimizers, with notes that name them; all others were stepped.
    """
    tenants = _tenants(optimizers, denominators, max_norms)
    if not tenants:
        return torch.zeros(0)
    plan = _Plan.of(tenants)
    fused = [index for index, tenant in enumerate(tenants) if _is_fused(tenant.optimizer)]
    if plan.device.type == "cuda":
        _step_queued(tenants, plan, fused)
        _step_known(tenants, plan, [index for index in range(len(tenants)) if index not in fused], [])
    else:
        _step_known(tenants, plan, range(len(tenants)), fused)
    return plan.norms


@dataclass(frozen=True, slots=True)
class _Tenant:
    optimizer: Optimizer
    grads: list[Tensor]
    denominator: float
    max_norm: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """Norms `[n]` and divisors `[n]` on one device; a divisor is valid where the norm is finite."""

    norms: Tensor
    divisors: Tensor

    @property
    def device(self) -> torch.device:
        return self.norms.device

    @staticmethod
    def of(tenants: Sequence[_Tenant]) -> "_Plan":
        for tenant in tenants:
            if tenant.denominator <= 0 and tenant.grads:
                torch._foreach_zero_(tenant.grads)
        raw = _joint(tenants)
        counts = [_divisible(tenant.denominator) for tenant in tenants]
        bounds = [tenant.max_norm if tenant.max_norm > 0 else math.inf for tenant in tenants]
        wide = torch.float32 if raw.device.type == "mps" else torch.float64
        denominators, limits = _to_device([counts, bounds], wide, raw.device)
        norms = raw.to(wide) / denominators
        return _Plan(norms.to(raw.dtype), denominators * (norms / limits).clamp(min=1))


def _tenants(
    optimizers: Sequence[Optimizer], denominators: Sequence[float], max_norms: Sequence[float]
) -> list[_Tenant]:
    """Validate and pair the arguments, before anything is changed."""
    counts = len(optimizers), len(denominators), len(max_norms)
    if len(set(counts)) > 1:
        raise ArgumentError(
            "clip_and_step: {} optimizers, {} denominators and {} max_norms; give one each".format(*counts)
        )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ArgumentError(
            "clip_and_step: each optimizer must be named once, got one named twice; its gradient would be divided twice"
        )
    if odd := [bound for bound in max_norms if math.isnan(bound)]:
        raise ArgumentError(f"clip_and_step: max_norm must be a number (0 measures without clipping), got {odd[0]}")
    tenants = [
        _Tenant(optimizer, _gradients(optimizer), float(denominator), float(bound))
        for optimizer, denominator, bound in zip(optimizers, denominators, max_norms, strict=True)
    ]
    if len(devices := {grad.device for tenant in tenants for grad in tenant.grads}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ArgumentError(f"clip_and_step: gradients are on {names}; make one call for each device")
    return tenants


def _divisible(denominator: float) -> float:
    """Return a divisor that float32 can represent; NaN, which makes the norm NaN, if there is none."""
    if denominator <= 0:
        return 1.0  # the gradient is already zero
    return denominator if _TINY <= denominator < math.inf else math.nan


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _joint(tenants: Sequence[_Tenant]) -> Tensor:
    """Return the joint norm of each optimizer's gradients, 0 without gradients."""
    norms = measure([grad for tenant in tenants for grad in tenant.grads])
    counts = [len(tenant.grads) for tenant in tenants]
    if all(count == 1 for count in counts):
        return norms
    return torch.stack([torch.linalg.vector_norm(part) for part in torch.split_with_sizes(norms, counts)])


def _row_norms(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a short vector of the same norm."""
    flat = grad.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    return torch.cat([rows, flat[whole:].to(dtype)])


def _to_device(rows: list[list[float]], dtype: torch.dtype, device: torch.device) -> Iterable[Tensor]:
    """Copy numbers to the device from pinned memory; a copy from pageable memory may synchronize."""
    host = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True).unbind()


def _step_known(tenants: Sequence[_Tenant], plan: _Plan, indices: Sequence[int], fused: Sequence[int]) -> None:
    """Step with norms on the host: one kernel call for all optimizers with equal options."""
    if not indices:
        return
    finite, divisors = torch.isfinite(plan.norms).tolist(), plan.divisors.tolist()
    chosen = [index for index in indices if finite[index]]
    together: dict[tuple[Any, ...], list[int]] = {}
    for index in chosen:
        if index in fused:
            together.setdefault(_options(tenants[index]), []).append(index)
    by_kernel = {same[0] for same in together.values() if len(same) == 1 and divisors[same[0]] != 1}
    divided = [(g, divisors[i]) for i in chosen if divisors[i] != 1 and i not in by_kernel for g in tenants[i].grads]
    if divided:
        torch._foreach_div_([grad for grad, _ in divided], [divisor for _, divisor in divided])
    for same in together.values():
        divisor = plan.divisors[same[0]].float() if same[0] in by_kernel else None
        _update([tenants[index] for index in same], divisor, None)
    _step_alone({index: tenants[index].optimizer for index in chosen if index not in fused})


def _step_alone(optimizers: Mapping[int, Optimizer]) -> None:
    """Call each optimizer's own step; if one fails, the others are still stepped."""
    errors = []
    for index, optimizer in optimizers.items():
        try:
            optimizer.step()
        except Exception as error:  # a plugin's optimizer may raise anything
            error.add_note(f"clip_and_step: optimizer {index}, a {type(optimizer).__name__}")
            errors.append(error)
    if errors:
        raise ExceptionGroup("clip_and_step: some optimizers failed; the others were stepped", errors)


def _step_queued(tenants: Sequence[_Tenant], plan: _Plan, fused: Sequence[int]) -> None:
    """Step with norms on the device: the kernel divides, and skips gradients that are not finite."""
    skipped = (~torch.isfinite(plan.norms)).float()
    divisors = plan.divisors.float()
    for index in fused:
        _update([tenants[index]], divisors[index], skipped[index])


def _update(tenants: Sequence[_Tenant], divisor: Tensor | None, skipped: Tensor | None) -> None:
    """Call torch's fused kernel once for optimizers with equal options, as their own `step()` does."""
    optimizers = [tenant.optimizer for tenant in tenants]
    group = optimizers[0].param_groups[0]
    params = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
    states = [optimizer.state[parameter] for optimizer, parameter in zip(optimizers, params, strict=True)]
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        params,
        [tenant.grads[0] for tenant in tenants],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=divisor,
        found_inf=skipped,
    )
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether a step came before them
    if skipped is not None:
        torch._foreach_sub_(steps, [skipped] * len(steps))


def _options(tenant: _Tenant) -> tuple[Any, ...]:
    """Return what must be equal for one kernel call."""
    group = tenant.optimizer.param_groups[0]
    names = ("decoupled_weight_decay", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    return tuple(group[name] for name in names)


def _is_fused(optimizer: Optimizer) -> bool:
    """Return whether calling the fused kernel is equivalent to `optimizer.step()`."""
    groups = optimizer.param_groups
    if type(optimizer) not in _FUSED or len(groups) != 1 or len(groups[0]["params"]) != 1:
        return False
    group = groups[0]
    parameter = group["params"][0]
    plain = all(isinstance(value, int | float) for value in (group["lr"], *group["betas"]))
    grad = parameter.grad
    # The kernel divides by a float32, which is too coarse for wider numbers and too fine for narrower ones.
    ready = grad is not None and grad.dtype == parameter.dtype == torch.float32 and optimizer.state.get(parameter)
    return bool(group["fused"] and plain and ready and not _is_watched(optimizer))


def _is_watched(optimizer: Optimizer) -> bool:
    """Return whether something else than torch's own code runs in `optimizer.step()`."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return True
    own = vars(optimizer)
    if own.get("grad_scale") is not None or own.get("found_inf") is not None:
        return True
    step = own.get("step")  # a scheduler puts a wrapper here that only notes the call
    counted = getattr(step, "_wrapped_by_lr_sched", False)
    return step is not None and not (counted and step.__wrapped__ is type(optimizer).step)
