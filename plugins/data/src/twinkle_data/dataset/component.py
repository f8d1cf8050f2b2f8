"""From what a script passes to `map`, `filter` and `set_template` to something that can be called."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.errors import ArgumentError, ComponentTypeError, TrainingStateError


@dataclass(frozen=True)
class Call:
    """A component ready to be called, its name for messages, and the keywords that are not its own."""

    component: Callable[..., Any]
    name: str
    options: dict[str, Any]


def called_with(
    x: Any, kind: str, init_args: Mapping[str, Any] | None, kwargs: Mapping[str, Any], options: Collection[str]
) -> Call:
    """Build the component `x` and part the keywords into its own and those of `datasets`.

    Args:
        x: any form of component argument, or any callable.
        kind: `preprocessor` or `filter`.
        init_args: constructor arguments.
        kwargs: options of `datasets`; and constructor arguments, where `datasets` has no option of that name.
        options: the names of the options of `datasets`.

    Raises:
        ArgumentError: a keyword that neither takes.
        ComponentTypeError: `x` is no such component.
    """
    from twinkle._registry import registry

    component = registry().resolve(x, kind) if isinstance(x, str | type) else x
    if not callable(component):
        raise ComponentTypeError(f"{kind} is a {type(component).__name__}; give a name, a class or something callable")
    own = _parameters(component) if isinstance(component, type) else set()
    arguments = dict(init_args or {})
    rest: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in options:
            rest[name] = value
        elif name == "batched" and value:
            continue  # what always happens
        elif name in own and name not in arguments:
            arguments[name] = value
        else:
            raise ArgumentError(_unknown(name, kind, own, arguments, options))
    label = getattr(component, "__name__", type(component).__name__)
    if isinstance(component, type):
        return Call(registry().build(x, kind, **arguments), label, rest)
    if arguments:
        raise ArgumentError(
            f"{kind} {label!r} is not a class, so it takes no constructor arguments, but init_args has "
            f"{', '.join(map(repr, arguments))}; give the class, or use fn_kwargs="
        )
    return Call(component, label, rest)


def template_from(x: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the template that `x` names or is.

    Raises:
        ComponentTypeError: it is not a template.
        ArgumentError: keywords beside an instance, or some that the constructor does not take.
    """
    if isinstance(x, str | type):
        from twinkle._registry import registry

        return registry().build(x, "template", **kwargs)
    if not callable(getattr(x, "batch_encode", None)):
        raise ComponentTypeError(
            f"template_func is a {type(x).__name__} without a method batch_encode; give a template, its class, or its "
            "name ('Template')"
        )
    if kwargs:
        raise ArgumentError(
            f"template_func is already an instance ({type(x).__name__}), so {', '.join(map(repr, kwargs))} would be "
            "ignored; give the class or its name"
        )
    return x


def template_for(template: Any, wanted_by: str) -> Any:
    """Return the template that `wanted_by` (`encode` or `check`) needs.

    Raises:
        TrainingStateError: there is none.
        ComponentTypeError: it lacks the method.
    """
    if template is None:
        raise TrainingStateError(f"{wanted_by} needs a template; call set_template('Template', model_id=...) first")
    if not callable(getattr(template, f"batch_{wanted_by}", None)):
        raise ComponentTypeError(f"{wanted_by}: {type(template).__name__} has no method batch_{wanted_by}")
    return template


def _parameters(component: type) -> set[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in inspect.signature(component).parameters.values() if p.kind in by_name}


def _unknown(name: str, kind: str, own: Collection[str], given: Collection[str], options: Collection[str]) -> str:
    from twinkle_registry import nearest

    if name == "batched":
        return (
            f"batched=False: a {kind} always gets a batch of columns (map) or one row (filter); to think in rows, use "
            "Preprocessor.map_col_to_row and map_row_to_col"
        )
    if name in given:
        return f"{name!r} is given twice, in init_args and as a keyword"
    known = sorted({*own, *options})
    close = nearest(name, known, 1)
    hint = f", nearest: {close[0]!r}" if close else ""
    return f"unknown argument {name!r}{hint}; taken are {', '.join(known)}"
