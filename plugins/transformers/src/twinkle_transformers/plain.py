"""Scheduler state as JSON and back, exactly: what JSON would change or cannot hold is marked or refused."""

from collections import Counter
from typing import Any

from twinkle.errors import CheckpointError

_PAIRS, _COUNTER = "__pairs__", "__counter__"


def encode(value: Any, where: str) -> Any:
    """Return `value` as JSON can hold it; mappings with keys that are no text become marked lists of pairs.

    Raises:
        CheckpointError: something in it is no number, text, list or mapping.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(item, where) for item in value]
    if isinstance(value, Counter):
        return {_COUNTER: [[encode(k, where), v] for k, v in value.items()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: encode(item, where) for key, item in value.items()}
        return {_PAIRS: [[encode(k, where), encode(v, where)] for k, v in value.items()]}
    raise CheckpointError(
        f"the state of {where} holds a {type(value).__name__}, which a checkpoint cannot keep; save with "
        "save_optimizer=False, or use a scheduler whose state is numbers"
    )


def decode(value: Any) -> Any:
    """Undo `encode`, except that tuples stay lists."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_COUNTER}:
            return Counter({k: v for k, v in value[_COUNTER]})
        if value.keys() == {_PAIRS}:
            return {decode(k): decode(v) for k, v in value[_PAIRS]}
        return {key: decode(item) for key, item in value.items()}
    return value
