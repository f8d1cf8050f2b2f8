"""Building optimizers and schedulers from names, classes or instances."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from twinkle import registry
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle_registry import check_keywords

DEFAULT_LR = 1e-5
DEFAULT_WEIGHT_DECAY = 0.01
_NO_DECAY = ("bias", "norm", "ln_")


def build_optimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    params: Any = None,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Build an optimizer over the trainable parameters.

    Args:
        optimizer: any form of component argument; an instance is taken as it is, without further arguments.
        named_parameters: the trainable parameters, in a fixed order.
        lr: learning rate, by default 1e-5.
        weight_decay: by default 0.01 where the optimizer has it; biases and norms are never decayed.
        params: parameters or torch parameter groups to use instead of the two groups made here.
        **kwargs: further arguments of the optimizer's constructor.

    Raises:
        ArgumentError: an argument that the optimizer does not take.
        TrainingStateError: nothing is trainable.
        Unsupported: an optimizer that calls the loss itself (LBFGS).
    """
    found = registry().resolve(optimizer, "optimizer")
    if isinstance(found, torch.optim.Optimizer):
        given = {"lr": lr, "weight_decay": weight_decay, "params": params, **kwargs}
        if extra := sorted(name for name, value in given.items() if value is not None):
            raise ArgumentError(
                f"set_optimizer: {type(found).__name__} is an instance; {extra[0]}= goes to its constructor"
            )
        return found
    if _needs_closure(found):
        raise Unsupported(
            f"set_optimizer: {found.__name__} evaluates the loss inside its step, which a loop with a separate "
            "backward cannot offer; choose another, such as AdamW"
        )
    named = list(named_parameters)
    if not named and params is None:
        raise TrainingStateError("set_optimizer: the model has no trainable parameters; add an adapter first")
    arguments = {"lr": DEFAULT_LR if lr is None else lr, **kwargs}
    if weight_decay is not None or "weight_decay" in inspect.signature(found).parameters:
        arguments["weight_decay"] = DEFAULT_WEIGHT_DECAY if weight_decay is None else weight_decay
    check_keywords(found, {"params": None, **arguments}, what=f"the optimizer {found.__name__}")
    groups = params if params is not None else parameter_groups(named, arguments.get("weight_decay"))
    built = found(groups, **arguments)
    if not isinstance(built, torch.optim.Optimizer):
        raise ArgumentError(f"set_optimizer: {optimizer!r} made a {type(built).__name__}, not a torch.optim.Optimizer")
    return built


def _needs_closure(optimizer: Any) -> bool:
    step = getattr(optimizer, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is inspect.Parameter.empty


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], decay: float | None) -> list[dict[str, Any]]:
    """Return torch parameter groups: matrices with weight decay, biases and norms without.

    A group without members is left out; with `decay` None (an optimizer that has none) there is one group. The key
    `decays` says which is which, so that a later weight decay finds its group.
    """
    named = list(named)
    if decay is None:
        return [{"params": [p for _, p in named]}]
    plain = [p for name, p in named if p.ndim < 2 or any(word in name.lower() for word in _NO_DECAY)]
    kept = set(map(id, plain))
    groups = [
        {"params": [p for _, p in named if id(p) not in kept], "weight_decay": decay, "decays": True},
        {"params": plain, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def build_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None, **kwargs: Any) -> Any:
    """Build a learning-rate scheduler on `optimizer`; an instance is taken as it is.

    Raises:
        TrainingStateError: there is no optimizer yet.
        ArgumentError: an argument that the scheduler does not take.
    """
    found = registry().resolve(scheduler, "scheduler")
    if not callable(found) or isinstance(found, torch.optim.lr_scheduler.LRScheduler):
        if kwargs:
            raise ArgumentError(f"set_lr_scheduler: {type(found).__name__} is an instance and takes no more arguments")
        if found.optimizer is not optimizer:
            raise ArgumentError(
                f"set_lr_scheduler: this {type(found).__name__} was built on another optimizer; build it on the "
                "model's, model.optimizer_group[name].optimizer, or give its name"
            )
        return found
    if optimizer is None:
        raise TrainingStateError("set_lr_scheduler: set the optimizer first; a scheduler is built on it")
    check_keywords(found, {"optimizer": None, **kwargs}, what=f"the scheduler {found.__name__}")
    return found(optimizer, **kwargs)


def override(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Overwrite `lr`, `weight_decay`, `betas` or `eps` of every parameter group; norms and biases never decay.

    Raises:
        ArgumentError: a name that the optimizer does not have.
    """
    for group in optimizer.param_groups:
        for name, value in values.items():
            if name not in group:
                raise ArgumentError(
                    f"step(optim_params=...): {type(optimizer).__name__} has no {name!r}; "
                    f"it has {', '.join(sorted(set(group) - {'params'}))}"
                )
            if name != "weight_decay" or group.get("decays", True):
                group[name] = value
