"""Rows as they are sent: encoded rows with the fields that a model reads, and conversations as they are."""

from collections.abc import Mapping
from typing import Any

from twinkle.errors import ArgumentError

FIELDS = ("input_ids", "labels", "attention_mask", "position_ids", "completion_mask", "loss_scale")
_DESCRIBING = (
    *("length", "messages", "user_data", "tools", "prompt", "routed_experts"),
    *("logprobs", "turns", "turn_tokens", "turn_rewards", "stop_reason", "truncated"),  # of a rollout
)


def sendable_rows(inputs: Any) -> Any:
    """Return a row or a list of rows for a request; the result of a sampler is the rows of its sequences, in order.

    Raises:
        ArgumentError: they are neither.
    """
    if isinstance(inputs, Mapping):
        return _sendable(inputs)
    if not isinstance(inputs, list | tuple):
        raise ArgumentError(f"inputs must be a row or a list of rows, got a {type(inputs).__name__}")
    return [_sendable(row) for given in inputs for row in _rows_of(given)]


def _rows_of(given: Any) -> list[Any]:
    """Return a row as it is, and one row for each sequence of a `SampleResponse`.

    Raises:
        ArgumentError: a sequence has no row, because it was sampled from token ids without a template.
    """
    if not hasattr(given, "sequences"):
        return [given]
    rows = [sequence.new_input_feature for sequence in given.sequences]
    if None in rows:
        raise ArgumentError(
            f"sequence {rows.index(None)} has no new_input_feature; give rows with input_ids and labels"
        )
    return rows


def _sendable(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ArgumentError(f"a row must be a mapping, got a {type(row).__name__}")
    if "input_ids" not in row:
        return {name: value for name, value in row.items() if value is not None}
    return {name: value for name, value in row.items() if name not in _DESCRIBING and _counts(value)}


def _counts(value: Any) -> bool:
    """Return whether a model can compute with a value; texts, such as columns of the raw rows, describe the row."""
    if isinstance(value, list | tuple) and value:
        return _counts(value[0])
    return value is not None and not isinstance(value, str | bytes | Mapping)
