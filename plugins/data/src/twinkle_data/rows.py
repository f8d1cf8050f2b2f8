"""Shared helpers of preprocessors: access to rows, columns and texts, and `user_data`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import pack_value
from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import Preprocessor

Columns = Mapping[str, Sequence[Any]]


def rows_with(columns: Columns, needed: Sequence[str], owner: str) -> list[dict[str, Any]]:
    """Return columns as rows.

    Raises:
        DataError: a column of `needed` is missing; the message names those that are there.
    """
    from twinkle_registry import nearest

    for name in needed:
        if name not in columns:
            close = nearest(name, columns, 1)
            hint = f" (nearest: {close[0]!r})" if close else ""
            raise DataError(
                f"{owner} needs the column {name!r}{hint}; there are: {', '.join(map(str, columns)) or 'no columns'}"
            )
    return Preprocessor.map_col_to_row(columns)


def text_of(row: Mapping[str, Any], column: str, number: int, owner: str) -> str:
    """Return the text in a column of row `number` of the batch.

    Raises:
        DataError: it is no text, or a blank one.
    """
    value = row[column]
    if isinstance(value, str) and value.strip():
        return value
    raise DataError(f"{owner}, row {number} of the batch: column {column!r} is {shown(value)}; it must be text")


def optional_text(row: Mapping[str, Any], column: str, number: int, owner: str) -> str:
    """Return the text in an optional column; the empty text if it is missing, None or blank."""
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return text_of(row, column, number, owner)


def shown(value: Any) -> str:
    """Format a value for errors: abbreviated, and with its type if that is the problem."""
    text = repr(value) if isinstance(value, str | int | float | type(None)) else f"a {type(value).__name__}: {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def pairs(**values: Any) -> list[tuple[str, str]]:
    """Return `user_data`: (key, text) pairs, as `user_data_get` reads them.

    Texts are stored unchanged, so that a reward can compare them. JSON text is stored for other values, and for the few
    texts that `user_data_get` would read as a list, an object, null or another text, such as the interval `[0, 1]`.
    """
    return [(key, value if _reads_back(value) else pack_value(value)) for key, value in values.items()]


def _reads_back(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return isinstance(json.loads(value), int | float)
    except (ValueError, RecursionError):
        return True


def prompt(question: str, system: str) -> list[dict[str, Any]]:
    """Return the messages of a question, after a system message if that is not empty."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


def system_text(system: Any, owner: str, default: str = "") -> str:
    """Return the argument `system` of a preprocessor: a text, `default` for None.

    Raises:
        ArgumentError: it is something else.
    """
    if system is None:
        return default
    if isinstance(system, str):
        return system.strip()
    raise ArgumentError(f"{owner}: system is {shown(system)}; it is a text ('' for no system message) or None")


def flag(value: Any, name: str, owner: str) -> bool:
    """Return an argument that is True or False.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool):
        return value
    raise ArgumentError(f"{owner}: {name} is {shown(value)}; it is True or False")


def key_text(key: Any, name: str, owner: str) -> str:
    """Return an argument that names a column.

    Raises:
        ArgumentError: it is no name.
    """
    if isinstance(key, str) and key:
        return key
    raise ArgumentError(f"{owner}: {name} is {shown(key)}; it is the name of a column")
