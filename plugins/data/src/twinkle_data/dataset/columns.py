"""Calls a preprocessor on columns of rows and checks the result; removes the None that Arrow adds to messages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from twinkle.errors import DataError

_CONVERSATION = frozenset({"messages", "tools"})
_PAIRS = frozenset({"positive", "negative", "chosen", "rejected"})


def clean_column(name: str, values: list[Any], *, deep: bool) -> list[Any]:
    """Return the values of one column with the None-valued keys of messages and tools taken away.

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
    """Return the columns that `function` makes of `columns`.

    Args:
        function: takes a dict of columns, then `extra` and `fn_kwargs`; returns a dict of columns.
        columns: the values by name, one entry a row.
        what: how errors name the function.
        drop: None: only the returned columns remain. Else these columns go and the others stay beside the returned
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
    kept = {name: values for name, values in columns.items() if name not in drop and name not in result}
    before, after = len(next(iter(columns.values()))), len(next(iter(result.values())))
    if kept and before != after:
        raise DataError(
            f"{what} turned {before} rows into {after}, so the columns {', '.join(kept)} cannot stay; leave "
            "remove_columns out, and return every column that is wanted"
        )
    return {**kept, **result}
