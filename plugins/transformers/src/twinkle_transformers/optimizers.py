"""Optimizers and schedulers: built from component arguments, over parameter groups with rules."""

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from twinkle import registry
from twinkle.errors import ArgumentError, TrainingStateError, TwinkleError, Unsupported
from twinkle.logging import get_logger
from twinkle_registry import check_keywords, nearest

_NO_DECAY = ("bias", "norm", "ln_")
_KEYS = ("params", "match")
_FORMS = (
    "give parameters, torch groups ({'params': [...], 'lr': 1e-3}) or rules on saved names ({'match': 'lora_B', "
    "'lr': 1e-3})"
)

Named = list[tuple[str, nn.Parameter]]


def make_groups(named: Named, params: Any, decay: float | None, optimizer: Any) -> list[dict[str, Any]]:
    """Return parameter groups whose `params` are pairs of name and parameter.

    Args:
        named: the trained parameters by saved name.
        params: None for the two default groups; parameters; torch groups; or rules.
        decay: the optimizer's weight decay, None if it has none.
        optimizer: the class (or function) of the optimizer; for torch's own, options of groups are checked.

    Raises:
        ArgumentError: a rule that matches nothing, a parameter that is not trained or given twice, an unknown option.
    """
    if params is None:
        return parameter_groups(named, decay)
    given: list[Any] = [params] if isinstance(params, torch.Tensor | Mapping) else list(params)
    if not given:
        raise ArgumentError(f"set_optimizer: params= is empty; {_FORMS}, or leave it out")
    rules = [item for item in given if isinstance(item, Mapping) and "match" in item]
    if rules and len(rules) != len(given):
        raise ArgumentError("set_optimizer: params= mixes rules ('match') with other forms; give one form")
    if any(isinstance(item, Mapping) for item in given):
        for group in given:
            _check_group(group, optimizer)
        return _by_rules(named, rules, decay) if rules else _torch_groups(named, given)
    return _torch_groups(named, [{"params": given}])


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], decay: float | None) -> list[dict[str, Any]]:
    """Return groups of named parameters: matrices with weight decay, biases and norms without.

    Empty groups are left out; with `decay` None (an optimizer without weight decay) there is one group. The key
    `decays` marks the group with weight decay, so that a later change of it reaches this group.
    """
    named = list(named)
    if decay is None:
        return [{"params": named}]
    plain = [pair for pair in named if pair[1].ndim < 2 or any(word in pair[0].lower() for word in _NO_DECAY)]
    kept = {id(p) for _, p in plain}
    groups = [
        {"params": [pair for pair in named if id(pair[1]) not in kept], "weight_decay": decay, "decays": True},
        {"params": plain, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def without_names(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups without names, which torch would add to every checkpoint."""
    return [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]


def _by_rules(named: Named, rules: Sequence[Mapping[str, Any]], decay: float | None) -> list[dict[str, Any]]:
    left, groups = named, []
    for rule in rules:
        matches = _matcher(rule["match"])
        matched = [pair for pair in left if matches(pair[0])]
        if not matched:
            taken = any(matches(name) for name, _ in named)
            raise ArgumentError(
                f"set_optimizer: the rule {rule['match']!r} "
                + (
                    "applies to nothing: earlier rules match all of its parameters"
                    if taken
                    else "matches no trained parameter"
                )
                + f"; names look like {', '.join(repr(name) for name in _examples(named))}"
            )
        left = [pair for pair in left if not matches(pair[0])]
        options = {key: value for key, value in rule.items() if key != "match"}
        if "weight_decay" in options:
            groups.append({"params": matched, **options, "decays": bool(options["weight_decay"])})
        else:
            groups += [group | options for group in parameter_groups(matched, decay)]
    return groups + (parameter_groups(left, decay) if left else [])


def _matcher(match: Any) -> Any:
    patterns = [match] if isinstance(match, str) else match
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as error:
        raise ArgumentError(
            f"set_optimizer: 'match' must be a regular expression or a list of them, got {match!r}: {error}"
        ) from error
    return lambda name: any(pattern.search(name) for pattern in compiled)


def _torch_groups(named: Named, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    name_of = {id(parameter): name for name, parameter in named}
    seen: set[int] = set()
    groups = []
    for group in given:
        members = group["params"]
        pairs = []
        for item in [members] if isinstance(members, torch.Tensor) else members:
            parameter = item[1] if isinstance(item, tuple) else item
            if not isinstance(parameter, torch.Tensor):
                raise ArgumentError(f"set_optimizer: params= contains a {type(parameter).__name__}; {_FORMS}")
            if id(parameter) not in name_of:
                raise ArgumentError(
                    f"set_optimizer: params= holds a parameter of shape {list(parameter.shape)} that the model (or "
                    "this adapter) does not train; take them from what has requires_grad"
                )
            if id(parameter) in seen:
                raise ArgumentError(
                    f"set_optimizer: params= contains {name_of[id(parameter)]} twice; put it into one group"
                )
            seen.add(id(parameter))
            pairs.append((name_of[id(parameter)], parameter))
        groups.append({**group, "params": pairs})
    if len(seen) < len(named):
        get_logger().info(
            "set_optimizer: %d trained parameters are in no group and are not updated", len(named) - len(seen)
        )
    return groups


def _check_group(group: Any, optimizer: Any) -> None:
    if not isinstance(group, Mapping) or not any(key in group for key in _KEYS):
        raise ArgumentError(f"set_optimizer: params= contains {group!r}; {_FORMS}")
    if all(key in group for key in _KEYS):
        raise ArgumentError("set_optimizer: a group of params= has both 'params' and 'match'; give one of them")
    if not optimizer.__module__.startswith(("torch.optim", "twinkle_transformers")):
        return  # an optimizer of another package may read its own options from its groups
    known = [name for name in inspect.signature(optimizer).parameters if name != "params"]
    for key in group:
        if key not in known and key not in _KEYS:
            near = nearest(key, known)
            raise ArgumentError(
                f"set_optimizer: {optimizer.__name__} has no {key!r} for a group of params="
                f"{f', nearest: {near[0]!r}' if near else ''}; it has {', '.join(known)}"
            )


def _examples(named: Named) -> list[str]:
    names = [name for name, _ in named]
    return names[:: max(1, len(names) // 3)][:3]


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
            expressions (one or a list) searched in the saved names. The first rule that matches a parameter applies to
            it; others get the options given here. A rule without `weight_decay` does not decay biases and norms.
        **kwargs: further arguments of the optimizer's constructor.

    Raises:
        ArgumentError: an argument or a value that the optimizer does not take, a rule that matches nothing.
        TrainingStateError: nothing is trainable.
        Unsupported: an optimizer that calls the loss itself (LBFGS) or requires sparse gradients (SparseAdam).
    """
    resolved = registry().resolve(optimizer, "optimizer")
    named = list(named_parameters)
    _refuse_impossible(resolved)
    if isinstance(resolved, torch.optim.Optimizer):
        return _taken_as_it_is(resolved, named, {"lr": lr, "weight_decay": weight_decay, "params": params, **kwargs})
    if not named:
        raise TrainingStateError("set_optimizer: the model has no trainable parameters; add an adapter first")
    name = _name_of(resolved)
    arguments = {"lr": DEFAULT_LR if lr is None else lr, **kwargs}
    if weight_decay is not None or "weight_decay" in inspect.signature(resolved).parameters:
        arguments["weight_decay"] = DEFAULT_WEIGHT_DECAY if weight_decay is None else weight_decay
    check_keywords(resolved, {"params": None, **arguments}, what=f"the optimizer {name}")
    _refuse_texts(resolved, arguments, name)
    if arguments.get("differentiable"):
        raise Unsupported(
            f"set_optimizer: {name}(differentiable=True) is not supported: updates need no gradient in training"
        )
    groups = make_groups(named, params, arguments.get("weight_decay"), resolved)
    if not getattr(resolved, "splits_by_name", False):
        groups = without_names(groups)
    try:
        built = resolved(groups, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ArgumentError(f"set_optimizer: {name} refuses its arguments: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise ArgumentError(
            f"set_optimizer: {optimizer!r} must return a torch.optim.Optimizer, got a {type(built).__name__}"
        )
    return built


def exchanged(params: Any, successors: Mapping[int, nn.Parameter]) -> Any:
    """Return `params` of any published form with each parameter replaced by its successor, by identity."""
    if isinstance(params, torch.Tensor):
        return successors.get(id(params), params)
    if isinstance(params, Mapping):
        return {key: exchanged(value, successors) if key == "params" else value for key, value in params.items()}
    if isinstance(params, str) or not isinstance(params, Iterable):
        return params
    items = (exchanged(item, successors) for item in params)
    return tuple(items) if isinstance(params, tuple) else list(items)


def try_optimizer(optimizer: Any, device: torch.device, kwargs: Mapping[str, Any]) -> None:
    """Make one step of an optimizer on a small matrix.

    Args:
        optimizer: any form of component argument that is not an instance.
        device: where the matrix is.
        kwargs: arguments of `build_optimizer`, without parameters.

    Raises:
        ArgumentError: the optimizer refuses its arguments, or cannot make a step from gradients alone.
    """
    resolved = registry().resolve(optimizer, "optimizer")
    matrix = nn.Parameter(torch.ones(2, 2, device=device))
    matrix.grad = torch.ones_like(matrix)
    options = {name: value for name, value in kwargs.items() if name != "params"}
    try:
        build_optimizer(resolved, [("base_model.model.layer.lora_A.weight", matrix)], **options).step()
    except TwinkleError:
        raise
    except Exception as error:  # of any optimizer
        name = _name_of(resolved)
        raise ArgumentError(f"set_optimizer: {name} cannot make a step with these options: {error}") from error


def build_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None, **kwargs: Any) -> Any:
    """Build a learning-rate scheduler on `optimizer`; an instance is taken as it is.

    Args:
        scheduler: any form of component argument.
        optimizer: the optimizer that it changes.
        **kwargs: arguments of its constructor. In `schedulers` (of `SequentialLR` and `ChainedScheduler`) each item may
            be an instance or a mapping `{"scheduler": "LinearLR", "total_iters": 10}`.

    Raises:
        TrainingStateError: there is no optimizer yet.
        ArgumentError: an argument or a value that the scheduler does not take.
    """
    resolved = registry().resolve(scheduler, "scheduler")
    if not callable(resolved) or isinstance(resolved, torch.optim.lr_scheduler.LRScheduler):
        if kwargs:
            raise ArgumentError(
                f"set_lr_scheduler: {type(resolved).__name__} is an instance and takes no more arguments"
            )
        if resolved.optimizer is not optimizer:
            raise ArgumentError(
                f"set_lr_scheduler: this {type(resolved).__name__} was built on another optimizer; build it on the "
                "model's, model.optimizer_group[name].optimizer, or give its name"
            )
        return resolved
    if optimizer is None:
        raise TrainingStateError("set_lr_scheduler: set the optimizer first; the constructor of a scheduler takes it")
    name = _name_of(resolved)
    arguments = {"optimizer": optimizer, **kwargs}
    check_keywords(resolved, arguments, what=f"the scheduler {name}")
    if "schedulers" in kwargs:
        arguments["schedulers"] = [_part(item, optimizer, name) for item in kwargs["schedulers"]]
    try:
        return resolved(**arguments)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ArgumentError(f"set_lr_scheduler: {name} refuses its arguments: {error}") from error


def override(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Overwrite `lr`, `weight_decay`, `betas` or `eps` of every parameter group; norms and biases never decay.

    An optimizer of two parts (`Muon`) decides itself which groups an option such as `adamw_lr` applies to.

    Raises:
        ArgumentError: the optimizer has no such option, or a value is invalid; nothing is changed.
    """
    key_of = getattr(optimizer, "key_of", _plain_key)
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for name in sorted(
        values, key=lambda name: name.startswith("adamw_")
    ):  # the option of a part has precedence over the common one
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


def _refuse_impossible(resolved: Any) -> None:
    owner = resolved if isinstance(resolved, type) else type(resolved)
    step = getattr(owner, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(
            f"set_optimizer: {owner.__name__} evaluates the loss inside its step, which a loop with a separate "
            "backward cannot offer; choose another, such as AdamW"
        )
    if issubclass(owner, torch.optim.SparseAdam):
        raise Unsupported(
            f"set_optimizer: {owner.__name__} takes only sparse gradients, and those of a language model are dense; "
            "choose Adam or AdamW"
        )


def _refuse_texts(resolved: Any, arguments: Mapping[str, Any], name: str) -> None:
    """Refuse text (or True) in place of a number, such as "1e-3" from a configuration file."""
    parameters = inspect.signature(resolved).parameters
    for key, value in arguments.items():
        default = parameters[key].default if key in parameters else None
        number = key == "lr" or (isinstance(default, int | float) and not isinstance(default, bool))
        if number and isinstance(value, str | bool):
            raise ArgumentError(f"set_optimizer: {key} of {name} must be a number, got {value!r}")


def _taken_as_it_is(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], given: Mapping[str, Any]
) -> torch.optim.Optimizer:
    kind = type(optimizer).__name__
    if extra := sorted(name for name, value in given.items() if value is not None):
        raise ArgumentError(f"set_optimizer: {kind} is an instance, so {extra[0]}= must be given to its constructor")
    trained = {id(parameter) for _, parameter in named}
    if odd := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in trained]:
        raise ArgumentError(
            f"set_optimizer: this {kind} was built over a parameter of shape {list(odd[0].shape)} that the model (or "
            f"this adapter) does not train ({len(odd)} such); build it over model.model's parameters that require a "
            "gradient, or give its name"
        )
    return optimizer


def _part(item: Any, optimizer: torch.optim.Optimizer, owner: str) -> Any:
    if not isinstance(item, Mapping):
        return build_scheduler(item, optimizer)
    options = dict(item)
    if "scheduler" not in options:
        raise ArgumentError(
            f"set_lr_scheduler: {owner}(schedulers=[...]) contains {item!r} without 'scheduler'; write "
            "{'scheduler': 'LinearLR', 'total_iters': 10}"
        )
    return build_scheduler(options.pop("scheduler"), optimizer, **options)


def _plain_key(group: Mapping[str, Any], name: str) -> str | None:
    return name if name in group and name not in _NOT_OPTIONS else None


def _checked(name: str, value: Any) -> Any:
    numbers = value if isinstance(value, list | tuple) else [value]
    for number in numbers:
        if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
            raise ArgumentError(f"step(optim_params=...): {name} must be a number of at least 0, got {value!r}")
    return tuple(value) if isinstance(value, list) else value


def _name_of(resolved: Any) -> str:
    return str(getattr(resolved, "__name__", type(resolved).__name__))
