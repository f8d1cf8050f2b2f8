"""Takes away the None-valued keys that Arrow adds to messages and tools, in the one place where rows leave a table."""

from collections.abc import Mapping
from typing import Any

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
