"""Building optimizers and schedulers from names, classes or instances."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from twinkle import registry
from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle_registry import check_keywords
from twinkle_transformers.parameter_groups import make_groups, without_names

DEFAULT_LR = 1e-5
DEFAULT_WEIGHT_DECAY = 0.01
_NOT_OPTIONS = frozenset({"params", "param_names", "initial_lr", "decays", "algorithm", "follows"})


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
        named_parameters: the trainable parameters by saved name, in a fixed order.
        lr: learning rate, by default 1e-5.
        weight_decay: by default 0.01 where the optimizer has it; biases and norms are never decayed.
        params: parameters, torch parameter groups, or rules `[{"match": "lora_B", "lr": 1e-3}, ...]`: regular
            expressions (one or a list) searched in the saved names. The first rule that matches a parameter takes it;
            what none matches keeps the options given here. A rule without `weight_decay` spares biases and norms.
        **kwargs: further arguments of the optimizer's constructor.

    Raises:
        ArgumentError: an argument or a value that the optimizer does not take, a rule that matches nothing.
        TrainingStateError: nothing is trainable.
        Unsupported: an optimizer that calls the loss itself (LBFGS) or wants sparse gradients (SparseAdam).
    """
    found = registry().resolve(optimizer, "optimizer")
    named = list(named_parameters)
    _refuse_impossible(found)
    if isinstance(found, torch.optim.Optimizer):
        return _taken_as_it_is(found, named, {"lr": lr, "weight_decay": weight_decay, "params": params, **kwargs})
    if not named:
        raise TrainingStateError("set_optimizer: the model has no trainable parameters; add an adapter first")
    name = _name_of(found)
    arguments = {"lr": DEFAULT_LR if lr is None else lr, **kwargs}
    if weight_decay is not None or "weight_decay" in inspect.signature(found).parameters:
        arguments["weight_decay"] = DEFAULT_WEIGHT_DECAY if weight_decay is None else weight_decay
    check_keywords(found, {"params": None, **arguments}, what=f"the optimizer {name}")
    _refuse_texts(found, arguments, name)
    if arguments.get("differentiable"):
        raise Unsupported(f"set_optimizer: {name}(differentiable=True) gives updates a gradient; training needs none")
    groups = make_groups(named, params, arguments.get("weight_decay"), found)
    if not getattr(found, "splits_by_name", False):
        groups = without_names(groups)
    try:
        built = found(groups, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ArgumentError(f"set_optimizer: {name} refuses its arguments: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise ArgumentError(f"set_optimizer: {optimizer!r} made a {type(built).__name__}, not a torch.optim.Optimizer")
    return built


def exchanged(params: Any, successors: Mapping[int, nn.Parameter]) -> Any:
    """Return `params` of any published form with each parameter exchanged for its successor, by identity."""
    if isinstance(params, torch.Tensor):
        return successors.get(id(params), params)
    if isinstance(params, Mapping):
        return {key: exchanged(value, successors) if key == "params" else value for key, value in params.items()}
    if isinstance(params, str) or not isinstance(params, Iterable):
        return params
    items = (exchanged(item, successors) for item in params)
    return tuple(items) if isinstance(params, tuple) else list(items)


def build_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None, **kwargs: Any) -> Any:
    """Build a learning-rate scheduler on `optimizer`; an instance is taken as it is.

    Args:
        scheduler: any form of component argument.
        optimizer: what it follows.
        **kwargs: arguments of its constructor. In `schedulers` (of `SequentialLR` and `ChainedScheduler`) each item may
            be an instance or a mapping `{"scheduler": "LinearLR", "total_iters": 10}`.

    Raises:
        TrainingStateError: there is no optimizer yet.
        ArgumentError: an argument or a value that the scheduler does not take.
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
    name = _name_of(found)
    arguments = {"optimizer": optimizer, **kwargs}
    check_keywords(found, arguments, what=f"the scheduler {name}")
    if "schedulers" in kwargs:
        arguments["schedulers"] = [_part(item, optimizer, name) for item in kwargs["schedulers"]]
    try:
        return found(**arguments)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ArgumentError(f"set_lr_scheduler: {name} refuses its arguments: {error}") from error


def override(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Overwrite `lr`, `weight_decay`, `betas` or `eps` of every parameter group; norms and biases never decay.

    An optimizer of two parts (`Muon`) says itself which groups an option such as `adamw_lr` is for.

    Raises:
        ArgumentError: a name that the optimizer does not have, or a value that makes no sense; nothing is changed.
    """
    key_of = getattr(optimizer, "key_of", _plain_key)
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for name in sorted(values, key=lambda name: name.startswith("adamw_")):  # the part's own value over the common one
        places = [(group, key) for group in optimizer.param_groups if (key := key_of(group, name)) is not None]
        if not places:
            known = sorted({key for group in optimizer.param_groups for key in group} - _NOT_OPTIONS)
            raise ArgumentError(
                f"step(optim_params=...): {type(optimizer).__name__} has no {name!r}; it has {', '.join(known)}"
            )
        value = _checked(name, values[name])
        changes += [(g, key, value) for g, key in places if key != "weight_decay" or g.get("decays", True)]
    for group, key, value in changes:
        group[key] = value


def _refuse_impossible(found: Any) -> None:
    owner = found if isinstance(found, type) else type(found)
    step = getattr(owner, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(
            f"set_optimizer: {owner.__name__} evaluates the loss inside its step, which a loop with a separate "
            "backward cannot offer; choose another, such as AdamW"
        )
    if issubclass(owner, torch.optim.SparseAdam):
        raise Unsupported(
            f"set_optimizer: {owner.__name__} takes sparse gradients alone, and those of a language model are dense; "
            "choose Adam or AdamW"
        )


def _refuse_texts(found: Any, arguments: Mapping[str, Any], name: str) -> None:
    """Refuse a text (or True) where a number belongs, as a configuration file that says "1e-3" would give it."""
    parameters = inspect.signature(found).parameters
    for key, value in arguments.items():
        default = parameters[key].default if key in parameters else None
        number = key == "lr" or (isinstance(default, int | float) and not isinstance(default, bool))
        if number and isinstance(value, str | bool):
            raise ArgumentError(f"set_optimizer: {name}({key}={value!r}); {key} is a number, so write it as one")


def _taken_as_it_is(
    found: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], given: Mapping[str, Any]
) -> torch.optim.Optimizer:
    kind = type(found).__name__
    if extra := sorted(name for name, value in given.items() if value is not None):
        raise ArgumentError(f"set_optimizer: {kind} is an instance; {extra[0]}= goes to its constructor")
    trained = {id(parameter) for _, parameter in named}
    if odd := [p for group in found.param_groups for p in group["params"] if id(p) not in trained]:
        raise ArgumentError(
            f"set_optimizer: this {kind} was built over a parameter of shape {list(odd[0].shape)} that the model (or "
            f"this adapter) does not train ({len(odd)} such); build it over model.model's parameters that require a "
            "gradient, or give its name"
        )
    return found


def _part(item: Any, optimizer: torch.optim.Optimizer, owner: str) -> Any:
    if not isinstance(item, Mapping):
        return build_scheduler(item, optimizer)
    options = dict(item)
    if "scheduler" not in options:
        raise ArgumentError(
            f"set_lr_scheduler: {owner}(schedulers=[...]) holds {item!r} without 'scheduler'; write "
            "{'scheduler': 'LinearLR', 'total_iters': 10}"
        )
    return build_scheduler(options.pop("scheduler"), optimizer, **options)


def _plain_key(group: Mapping[str, Any], name: str) -> str | None:
    return name if name in group and name not in _NOT_OPTIONS else None


def _checked(name: str, value: Any) -> Any:
    numbers = value if isinstance(value, list | tuple) else [value]
    for number in numbers:
        if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
            raise ArgumentError(f"step(optim_params=...): {name}={value!r}; it must be a number of at least 0")
    return tuple(value) if isinstance(value, list) else value


def _name_of(found: Any) -> str:
    return str(getattr(found, "__name__", type(found).__name__))
