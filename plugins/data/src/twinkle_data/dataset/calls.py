"""Builds the components passed to `map`, `filter` and `set_template`, calls them, and checks their results."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import ArgumentError, ComponentTypeError, DataError, TrainingStateError

_CONVERSATION = frozenset({"messages", "tools"})
_PAIRS = frozenset({"positive", "negative", "chosen", "rejected"})


@dataclass(frozen=True)
class Call:
    """A component to call, its name for messages, and the remaining keywords."""

    component: Callable[..., Any]
    name: str
    options: dict[str, Any]


def called_with(
    x: Any, kind: str, init_args: Mapping[str, Any] | None, kwargs: Mapping[str, Any], options: Collection[str]
) -> Call:
    """Build the component `x`, and separate its keywords from those of `datasets`.

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
    parameters = _parameters(component) if isinstance(component, type) else set()
    arguments = dict(init_args or {})
    rest: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in options:
            rest[name] = value
        elif name == "batched" and value:
            continue  # the only supported values
        elif name in parameters and name not in arguments:
            arguments[name] = value
        else:
            raise ArgumentError(_unknown(name, kind, parameters, arguments, options))
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
    """Resolve `x` to a template.

    Raises:
        ComponentTypeError: it is not a template.
        ArgumentError: keywords were given with an instance, or the constructor does not take one of them.
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
    """Return the template for `wanted_by` (`encode` or `check`).

    Raises:
        TrainingStateError: no template was set.
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
    supported = sorted({*own, *options})
    close = nearest(name, supported, 1)
    hint = f", nearest: {close[0]!r}" if close else ""
    return f"unknown argument {name!r}{hint}; taken are {', '.join(supported)}"


def clean_column(name: str, values: list[Any], *, deep: bool) -> list[Any]:
    """Return the values of one column without None-valued keys of messages and tools.

    Args:
        name: the column; only `messages` and `tools`, also inside preference pairs, are touched.
        values: one entry a row.
        deep: at any depth, because Arrow typed them; else only the keys of a message or tool itself, because what is
            deeper (the arguments of a call, a JSON schema) stands there as its author wrote it.
    """
    if name in _CONVERSATION:
        return [_clean_items(value, deep) for value in values]
    if name in _PAIRS:
        return [_clean_pair(value, deep) for value in values]
    return values


def _clean_pair(value: Any, deep: bool) -> Any:
    if not isinstance(value, Mapping):
        return _clean_items(value, deep)
    return {k: _clean_items(v, deep) if k in _CONVERSATION else v for k, v in value.items()}


def _clean_items(value: Any, deep: bool) -> Any:
    if not isinstance(value, list):
        return value
    if deep:
        return _without_none(value)
    return [_present(item) if isinstance(item, Mapping) else item for item in value]


def _present(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value is not None}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def call_on_columns(
    function: Callable[..., Any],
    columns: Mapping[str, list[Any]],
    what: str,
    drop: Collection[str] | None,
    extra: Sequence[Any] = (),
    fn_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the columns that `function` returns for `columns`.

    Args:
        function: takes a dict of columns, then `extra` and `fn_kwargs`; returns a dict of columns.
        columns: the values by name, one entry a row.
        what: how errors name the function.
        drop: None keeps only the returned columns. Else these columns are removed and the others kept with the returned
            ones, of which there must then be one entry a row.
        extra: further positional arguments.
        fn_kwargs: further keywords.

    Raises:
        DataError: the function returns something else than columns.
    """
    result = _checked(function(dict(columns), *extra, **(fn_kwargs or {})), what)
    return result if drop is None else _beside(columns, result, what, drop)


def require_one_length(columns: Mapping[str, Sequence[Any]], source: str) -> None:
    """Raise `DataError` unless all columns have the same number of entries."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{source}: columns have different lengths: {lengths}")


def _checked(result: Any, what: str) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        shown = "nothing" if result is None else f"a {type(result).__name__}"
        raise DataError(
            f"{what} returned {shown}; it gets columns (a dict of lists, one entry a row) and must return columns"
        )
    columns = {}
    for name, values in result.items():
        if hasattr(values, "tolist") and not isinstance(values, list):
            values = values.tolist()
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise DataError(
                f"{what} returned a {type(values).__name__} for column {name!r}; a column is a list with one entry a "
                "row. To think in rows, use Preprocessor.map_col_to_row and map_row_to_col"
            )
        columns[str(name)] = values
    if not columns:
        raise DataError(f"{what} returned no columns at all; return the columns that the rows shall have")
    return columns


def _beside(
    columns: Mapping[str, list[Any]], result: dict[str, Any], what: str, drop: Collection[str]
) -> dict[str, Any]:
    other_columns = {name: values for name, values in columns.items() if name not in drop and name not in result}
    before, after = len(next(iter(columns.values()))), len(next(iter(result.values())))
    if other_columns and before != after:
        raise DataError(
            f"{what} turned {before} rows into {after}, so the columns {', '.join(other_columns)} cannot stay; return "
            "every column that is wanted, and give remove_columns=dataset.column_names"
        )
    return {**other_columns, **result}


def from_one(name: str, value: Any) -> int:
    """Return an integer >= 1, or raise `ArgumentError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}; give a whole number from 1")
    return value
