"""Which parameter is updated with which options: torch's parameter groups, from rules, from lists, or by default."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from twinkle.errors import ArgumentError
from twinkle.logging import get_logger
from twinkle_registry import nearest

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
        optimizer: the class (or function) that the groups are for; one of torch's own knows which options exist.

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

    A group without members is left out; with `decay` None (an optimizer that has none) there is one group. The key
    `decays` says which is which, so that a later weight decay finds its group.
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
    """Return the groups with bare parameters; torch would keep the names in every checkpoint."""
    return [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]


def _by_rules(named: Named, rules: Sequence[Mapping[str, Any]], decay: float | None) -> list[dict[str, Any]]:
    left, groups = named, []
    for rule in rules:
        matches = _matcher(rule["match"])
        found = [pair for pair in left if matches(pair[0])]
        if not found:
            taken = any(matches(name) for name, _ in named)
            raise ArgumentError(
                f"set_optimizer: the rule {rule['match']!r} "
                + ("gets nothing: earlier rules took all that it matches" if taken else "matches no trained parameter")
                + f"; names look like {', '.join(repr(name) for name in _examples(named))}"
            )
        left = [pair for pair in left if not matches(pair[0])]
        options = {key: value for key, value in rule.items() if key != "match"}
        if "weight_decay" in options:
            groups.append({"params": found, **options, "decays": bool(options["weight_decay"])})
        else:
            groups += [group | options for group in parameter_groups(found, decay)]
    return groups + (parameter_groups(left, decay) if left else [])


def _matcher(match: Any) -> Any:
    patterns = [match] if isinstance(match, str) else match
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as error:
        raise ArgumentError(
            f"set_optimizer: 'match' is {match!r}, which is no regular expression or list of them: {error}"
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
                raise ArgumentError(f"set_optimizer: params= holds a {type(parameter).__name__}; {_FORMS}")
            if id(parameter) not in name_of:
                raise ArgumentError(
                    f"set_optimizer: params= holds a parameter of shape {list(parameter.shape)} that the model (or "
                    "this adapter) does not train; take them from what has requires_grad"
                )
            if id(parameter) in seen:
                raise ArgumentError(f"set_optimizer: params= holds {name_of[id(parameter)]} twice; give it one group")
            seen.add(id(parameter))
            pairs.append((name_of[id(parameter)], parameter))
        groups.append({**group, "params": pairs})
    if len(seen) < len(named):
        get_logger().info("set_optimizer: %d trained parameters are in no group and stay", len(named) - len(seen))
    return groups


def _check_group(group: Any, optimizer: Any) -> None:
    if not isinstance(group, Mapping) or not any(key in group for key in _KEYS):
        raise ArgumentError(f"set_optimizer: params= holds {group!r}; {_FORMS}")
    if all(key in group for key in _KEYS):
        raise ArgumentError("set_optimizer: a group of params= has both 'params' and 'match'; give one of them")
    if not optimizer.__module__.startswith(("torch.optim", "twinkle_transformers")):
        return  # a stranger's optimizer may read options of its own from its groups
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
