"""The step of several adapters at once."""

from collections.abc import Sequence

from twinkle.errors import NonFiniteError, OperationsFailed, TrainingStateError
from twinkle.logging import get_logger
from twinkle_transformers import losses
from twinkle_transformers.flat_step import clip_and_step
from twinkle_transformers.group import OptimizerGroup, check_clipping
from twinkle_transformers.parallel import Replicated
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.stepping import clip_group, schedule, set_accumulation, step_group


def step_together(
    tenants: Sequence[Tenant],
    parallel: Replicated,
    max_norm: float,
    norm_type: float,
    policy: str,
    *,
    gradient_accumulation_steps: int | None = None,
    flush: bool = False,
) -> list[float]:
    """Divide, clip and step the adapters whose accumulation is complete, and clear their gradients.

    Args:
        tenants: the adapters, each once.
        parallel: the ranks.
        max_norm: maximum norm of each adapter's gradient; 0 or less measures only.
        norm_type: p of the p-norm; norms with p=2 are computed in one call for all adapters.
        policy: "raise" or "skip", for norms that are not finite.
        gradient_accumulation_steps: change the number of backward calls a step.
        flush: step an unfinished accumulation too.

    Returns:
        the norm of each adapter's gradient before clipping; 0 if no step was due.

    Raises:
        TrainingStateError: an adapter has no gradients; nothing is stepped.
        OperationsFailed: a norm is not finite and `policy` is "raise"; the other adapters are stepped.
    """
    check_clipping(max_norm, norm_type)
    for tenant in tenants:
        set_accumulation(tenant.group, gradient_accumulation_steps)
        check_pending(tenant, flush)
    due = [tenant for tenant in tenants if tenant.group.due(flush)]
    results = step_each(due, [max_norm] * len(due), parallel, policy, norm_type=norm_type, flush=flush)
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        if len(tenants) == 1:
            raise errors[0]
        raise OperationsFailed(f"{len(errors)} of {len(due)} steps failed; the others were made", errors, [])
    norms = {id(tenant): norm for tenant, norm in zip(due, results, strict=True) if not isinstance(norm, Exception)}
    return [norms.get(id(tenant), 0.0) for tenant in tenants]


def check_pending(tenant: Tenant, flush: bool = False) -> None:
    """Refuse a step without gradients.

    Raises:
        TrainingStateError: nothing was accumulated, or there is no optimizer.
    """
    if not tenant.group.pending and not flush:
        raise TrainingStateError(f"step: adapter {tenant.name!r} has no accumulated gradients; call backward first")
    if tenant.group.optimizer is None:
        raise TrainingStateError(f"step: adapter {tenant.name!r} has no optimizer; call set_optimizer first")


def step_each(
    tenants: Sequence[Tenant],
    max_norms: Sequence[float],
    parallel: Replicated,
    policy: str,
    *,
    norm_type: float = 2.0,
    flush: bool = False,
) -> list[float | Exception]:
    """Step adapters; return the norm of each gradient before clipping, or the error that prevented the step."""
    plain = [i for i, t in enumerate(tenants) if norm_type == 2 and parallel.ranks.alone and not t.group.divided]
    norms: dict[int, float] = {}
    if plain:
        groups = [tenants[i].group for i in plain]
        group_norms = clip_and_step(
            [group.optimizer for group in groups],
            [group.denominator for group in groups],
            [max_norms[i] for i in plain],
        )
        norms = dict(zip(plain, group_norms.tolist(), strict=True))
    results: list[float | Exception] = []
    for index, tenant in enumerate(tenants):
        group = tenant.group
        try:
            if index in norms:
                _stepped(group, norms[index], policy)
            else:
                norms[index] = clip_group(group, parallel, max_norms[index], norm_type, policy)
                step_group(group, parallel, None, flush, policy)
                group.clear_gradients()
                schedule(group, None)
            results.append(norms[index])
        except NonFiniteError as error:
            error.add_note(f"in the step of adapter {tenant.name!r}")
            results.append(error)
        except Exception as error:  # a metric or a scheduler may raise anything, and the other adapters must go on
            group.train_status.unseen.clear()
            group.clear_gradients()
            error.add_note(
                f"in its metrics or scheduler, after step {group.updates} of adapter {tenant.name!r} was made"
            )
            results.append(error)
    return results


def _stepped(group: OptimizerGroup, norm: float, policy: str) -> None:
    """Update counters and metrics after a step that was made, or skipped because its norm is not finite."""
    group.last_loss = group.loss_sum / group.denominator if group.denominator else 0.0
    group.last_grad_norm, group.measured = norm, True
    what = f"step {group.updates + 1} of adapter {group.adapter_name!r}"
    if group.denominator <= 0 and not group.skipped:
        get_logger().warning("%s has no effect: the denominator of its losses is 0, so its gradient is zero", what)
    if norm - norm != 0.0:
        text = f"the gradient norm of {what} is {norm}"
        if policy == "raise":
            group.drop_passes()
            raise NonFiniteError(f"{text}; the weights are untouched (on_nonfinite='skip' leaves such steps out)")
        get_logger().warning("%s; this step is left out", text)
        group.train_status.skipped += 1
    else:
        group.updates += 1
    losses.feed_metrics(group, group.train_status)
    group.clear_gradients()
    schedule(group, None)
