"""All that an adapter is, as tensors and plain values: taken from it, and put in its place whole or not at all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import CheckpointError, TwinkleError
from twinkle_transformers import plain
from twinkle_transformers.checkpoint import compare_optimizers, compare_schedulers, pack_optimizer, unpack_optimizer
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.pool.memory import host_copy
from twinkle_transformers.pool.tenants import Tenant

VERSION = 1
WEIGHTS, GRADIENT, OPTIMIZER = "weights", "gradient", "optimizer/"
_COUNTERS: dict[str, tuple[type, ...]] = {
    "cur_step": (int,), "updates": (int,), "scheduled": (int,), "pending": (int,), "skipped": (int,),
    "gradient_accumulation_steps": (int,), "denominator": (int, float), "loss_sum": (int, float),
    "last_loss": (int, float), "last_grad_norm": (int, float, type(None)), "seed": (int, type(None)),
    "divided": (bool,), "measured": (bool,), "stepped": (bool,), "dropped": (bool,),
}  # fmt: skip
_NOTHING_PENDING: dict[str, Any] = {
    "pending": 0, "denominator": 0.0, "loss_sum": 0.0, "skipped": 0, "divided": False, "measured": False,
    "stepped": False, "dropped": False,
}  # fmt: skip
_WHERE = "the snapshot"


def take(tenant: Tenant, *, gradient: bool = True) -> dict[str, Any]:
    """Return a copy of an adapter's state, which later training does not change.

    Args:
        tenant: the adapter.
        gradient: False leaves pending gradients out, and what was counted for them.

    Components (template, processor, loss, metrics and what metrics have seen) are no part of it, nor is its usage.

    Returns:
        `tensors`: by name, on the host: `weights` float32 `[P]`, `gradient` `[P]` where one is pending, and
        `optimizer/<field>/<parameter>`; `state`: what JSON can hold: shapes, counters, seed, optimizer, scheduler.

    Raises:
        CheckpointError: the state of the optimizer or scheduler holds what JSON cannot.
    """
    group = tenant.group
    tensors = {WEIGHTS: tenant.flat.detach()}
    if gradient and tenant.flat.grad is not None:
        tensors[GRADIENT] = tenant.flat.grad
    state: dict[str, Any] = {
        "version": VERSION,
        "adapter": tenant.name,
        "rank_multiple": tenant.plan.layout.rank_multiple,
        "layout": _layout(tenant),
        "dropout": tenant.plan.dropout,
        "counters": {name: getattr(group, name) for name in _COUNTERS} | ({} if gradient else _NOTHING_PENDING),
        "optimizer": None,
        "scheduler": None,
    }
    if group.optimizer is not None:
        packed, state["optimizer"] = pack_optimizer(group.optimizer, tenant.parameters())
        state["optimizer"]["values"] = plain.encode(state["optimizer"]["values"], state["optimizer"]["class"])
        tensors |= {OPTIMIZER + name: tensor for name, tensor in packed.items()}
    if (scheduler := group.lr_scheduler) is not None:
        name = type(scheduler).__name__
        state["scheduler"] = {"class": name, "state": plain.encode(scheduler.state_dict(), name)}
    return {"tensors": {name: host_copy(tensor) for name, tensor in tensors.items()}, "state": state}


def put(tenant: Tenant, snapshot: Mapping[str, Any]) -> None:
    """Put what `take` returned, of this adapter or of one with the same layout, in place of an adapter's state.

    A snapshot from before an optimizer was set takes the optimizer away again; one from after it wants the same class
    of optimizer (and of scheduler) set, and brings their options with it.

    Raises:
        CheckpointError: it is damaged, or for another layout, dropout, optimizer or scheduler; nothing has changed.
    """
    tensors, state = _read(snapshot)
    group = tenant.group
    _compare_shapes(tenant, state)
    _check_tensors(tenant, tensors)
    counters = _counters(state)
    saved = state["optimizer"]
    if saved is not None:
        if group.optimizer is None:
            raise CheckpointError(
                f"{_WHERE} holds the state of {saved['class']}, and adapter {tenant.name!r} has no optimizer; call "
                f"set_optimizer({saved['class']!r}, ...) first"
            )
        with _undone_on_error(group):
            compare_optimizers(_WHERE, saved, group.optimizer, tenant.parameters())
            compare_schedulers(_WHERE, state["scheduler"], group.lr_scheduler)
            _put_optimizer(tenant, saved, state["scheduler"], tensors)
    group.drop_passes()
    if saved is None:
        group.optimizer, group.lr_scheduler, group.left_out = None, None, [tenant.flat]
    with torch.no_grad():
        tenant.flat.copy_(tensors[WEIGHTS])
    tenant.flat.grad = None
    if GRADIENT in tensors:
        tenant.add_gradient(tensors[GRADIENT].to(tenant.flat.device))
    for name, value in counters.items():
        setattr(group, name, value)


def _layout(tenant: Tenant) -> list[list[Any]]:
    shapes = tenant.plan.layout.shapes.items()
    return [[name, s.rank, s.fan_in, s.fan_out, s.scale, s.experts] for name, s in shapes]


def _read(snapshot: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    tensors, state = (snapshot.get(key) if isinstance(snapshot, Mapping) else None for key in ("tensors", "state"))
    if not isinstance(tensors, Mapping) or not isinstance(state, Mapping):
        raise CheckpointError("a snapshot is a dict of `tensors` and `state`, as snapshot() returns it")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{_WHERE} has version {state.get('version')!r}; this is {VERSION}")
    wanted = ("rank_multiple", "layout", "dropout", "counters", "optimizer", "scheduler")
    if missing := [key for key in wanted if key not in state]:
        raise CheckpointError(f"{_WHERE} has no {missing[0]!r}; it is damaged")
    if odd := [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]:
        raise CheckpointError(f"{_WHERE}: {odd[0]!r} is a {type(tensors[odd[0]]).__name__}, not a tensor")
    return tensors, state


def _compare_shapes(tenant: Tenant, state: Mapping[str, Any]) -> None:
    what = ("rank", "fan_in", "fan_out", "scale", "experts")
    mine = {name: values for name, *values in _layout(tenant)}
    try:
        theirs = {name: values for name, *values in state["layout"]}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{_WHERE}: its layout is no list of shapes; it is damaged") from error
    for name in mine | theirs:
        if name not in mine or name not in theirs:
            has, lacks = (_WHERE, "the adapter") if name in theirs else ("the adapter", _WHERE)
            raise CheckpointError(
                f"{_WHERE} is of another adapter than {tenant.name!r}: {has} adapts {name}, {lacks} not"
            )
        for field, here, there in zip_longest(what, mine[name], theirs[name]):
            if here != there:
                told = f"at {name} its {field} is {there}, here {here}"
                raise CheckpointError(f"{_WHERE} is of another adapter than {tenant.name!r}: {told}")
    for name, here in (("rank_multiple", tenant.plan.layout.rank_multiple), ("dropout", tenant.plan.dropout)):
        if state[name] != here:
            raise CheckpointError(
                f"{_WHERE} is of another adapter than {tenant.name!r}: its {name} is {state[name]}, here {here}"
            )
    if list(mine) != list(theirs):
        raise CheckpointError(f"{_WHERE} is of another adapter than {tenant.name!r}: its matrices lie in another order")


def _check_tensors(tenant: Tenant, tensors: Mapping[str, Tensor]) -> None:
    for name in (WEIGHTS, GRADIENT):
        found = tensors.get(name)
        if found is None and name == GRADIENT:
            continue
        if found is None or found.shape != tenant.flat.shape or found.dtype != tenant.flat.dtype:
            told = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise CheckpointError(
                f"{_WHERE}: {name} is {told}; it should be {tenant.flat.dtype} {list(tenant.flat.shape)}"
            )
    if odd := [n for n in tensors if n not in (WEIGHTS, GRADIENT) and not n.startswith(OPTIMIZER)]:
        raise CheckpointError(f"{_WHERE} holds {odd[0]!r}, which is nothing of an adapter")


def _counters(state: Mapping[str, Any]) -> dict[str, Any]:
    found = state["counters"]
    if not isinstance(found, Mapping) or found.keys() != _COUNTERS.keys():
        raise CheckpointError(f"{_WHERE}: its counters are incomplete; it is damaged")
    for name, kinds in _COUNTERS.items():
        if type(found[name]) not in kinds:
            raise CheckpointError(f"{_WHERE}: {name} is {found[name]!r}; it is damaged")
    return dict(found)


def _put_optimizer(
    tenant: Tenant, saved: Mapping[str, Any], scheduler: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]
) -> None:
    names = tenant.parameters()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(OPTIMIZER):
            continue
        name = name.removeprefix(OPTIMIZER)
        parameter = names.get(name.partition("/")[2])
        if parameter is None:
            raise CheckpointError(f"{_WHERE} holds {name!r} of an optimizer, which is for no parameter of this adapter")
        # Moments lie as their parameter does: products of matrices that lie otherwise would round otherwise.
        like = parameter.shape == tensor.shape
        own[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor) if like else tensor.clone()
    unpack_optimizer(tenant.group.optimizer, {**saved, "values": plain.decode(saved["values"])}, own, names)
    if scheduler is not None:
        tenant.group.lr_scheduler.load_state_dict(plain.decode(scheduler["state"]))


@contextmanager
def _undone_on_error(group: OptimizerGroup) -> Iterator[None]:
    """Put optimizer and scheduler back as they were if what happens inside goes wrong."""
    optimizer, scheduler = group.optimizer, group.lr_scheduler
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    options = [dict(options) for options in optimizer.param_groups]
    fields = {} if scheduler is None else dict(vars(scheduler))
    try:
        yield
    except Exception as error:  # a plugin's optimizer or scheduler may raise anything
        optimizer.state.clear()
        optimizer.state.update(states)
        for mine, old in zip(optimizer.param_groups, options, strict=True):
            mine.clear()
            mine.update(old)
        if scheduler is not None:
            vars(scheduler).clear()
            vars(scheduler).update(fields)
        if isinstance(error, TwinkleError):
            raise
        raise CheckpointError(f"{_WHERE} does not fit: {type(error).__name__}: {error}") from error
