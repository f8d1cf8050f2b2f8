"""Rows as they are sent: encoded rows with the fields that a model reads, and conversations as they are."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import ArgumentError

FIELDS = ("input_ids", "labels", "attention_mask", "position_ids", "completion_mask", "loss_scale")
_MEDIA = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids"),
    *("images", "videos", "audios", "mm_processor_kwargs"),
)
"""Fields that a model of text cannot read: they are sent, and the service refuses them. All others only describe a row,
such as the columns of its data set, and stay on this machine."""
_EXTENDED = (*FIELDS, "length", "messages")
"""Fields of a prompt that sampling extends; all others are those of the prompt."""


def sendable_rows(inputs: Any) -> list[dict[str, Any]]:
    """Return rows for a request that trains or scores them.

    Raises:
        ArgumentError: see `rows_of`.
    """
    return [_sendable(row) for row in rows_of(inputs)]


def rows_of(inputs: Any) -> list[Mapping[str, Any]]:
    """Return the rows of an argument `inputs`.

    Args:
        inputs: a row; a list of rows; a collated batch, a mapping in which every value has one entry for each row; or
            the result of a sampler, which is the rows of its sequences, in order.

    Raises:
        ArgumentError: it is none of these.
    """
    if isinstance(inputs, Mapping):
        return _rows_of_batch(inputs) if _is_batch(inputs) else [inputs]
    if not isinstance(inputs, list | tuple):
        raise ArgumentError(f"inputs must be a row, a list of rows or a collated batch, got a {type(inputs).__name__}")
    rows = [row for given in inputs for row in _rows_of_response(given)]
    for row in rows:
        if not isinstance(row, Mapping):
            raise ArgumentError(f"a row must be a mapping, got a {type(row).__name__}")
    return rows


def sendable_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a request that samples it: the service appends the sampled turn to its `messages`."""
    sent = _sendable(row)
    if "input_ids" in row and row.get("messages"):
        sent["messages"] = row["messages"]
    return sent


def continued_row(prompt: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a sampled sequence with everything that its prompt has, as a local sampler returns it.

    Args:
        prompt: the row that was sampled; its columns that no model reads, such as `user_data`, stay on this machine.
        sampled: `new_input_feature` of the service.
    """
    row = {**prompt, **sampled}
    row.update({name: value for name, value in prompt.items() if name not in _EXTENDED})
    if turns := prompt.get("messages"):
        row["messages"] = [*turns, *(sampled.get("messages") or ())[len(turns) :]]
    return row


def _is_batch(inputs: Mapping[str, Any]) -> bool:
    ids = inputs.get("input_ids")
    if ids is None or len(ids) == 0:
        return False
    return ids.ndim == 2 if hasattr(ids, "ndim") else isinstance(ids[0], Sequence)


def _rows_of_batch(batch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a collated batch `[B, T]`, padding included, so that outputs have its shape.

    Raises:
        ArgumentError: a value has another number of rows.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    count = len(given["input_ids"])
    for name, value in given.items():
        sized = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 and not _is_plain(value)
        if not sized or len(value) != count:
            found = f"{len(value)} entries" if sized else f"a {type(value).__name__}"
            raise ArgumentError(f"inputs[{name!r}] of a collated batch must have {count} entries, got {found}")
    return [{name: value[index] for name, value in given.items()} for index in range(count)]


def _rows_of_response(given: Any) -> list[Any]:
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


def _sendable(row: Mapping[str, Any]) -> dict[str, Any]:
    if "input_ids" not in row:
        return {name: value for name, value in row.items() if value is not None}
    return {name: value for name in (*FIELDS, *_MEDIA) if (value := row.get(name)) is not None}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bytes | Mapping)
