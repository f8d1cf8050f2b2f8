"""Joins sampled tokens to the prompt they were sampled from; the prompt's tokens are kept exactly."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError


def append_tokens(prompt: Mapping[str, Any], new_tokens: Sequence[int]) -> dict[str, Any]:
    """Return `prompt` with `new_tokens` appended as trained targets.

    Args:
        prompt: one encoded row, `input_ids` `[T]`; its labels and `completion_mask` (earlier turns) are kept.
        new_tokens: the sampled token ids `[N]`.

    Returns:
        A new row of `T + N` tokens: the last prompt position is labelled with the first new token, and so on; the last
        position is -100. `completion_mask` is 1 where the target was sampled.

    Raises:
        DataError: the prompt is no encoded row, or its sequences differ in length.
    """
    ids = _sequence(prompt, "input_ids", None, None)
    if not ids:
        raise DataError("the prompt has no tokens; encode it with add_generation_prompt=True first")
    tokens, size = plain_list(new_tokens), len(ids)
    joined: dict[str, Any] = dict(prompt)
    labels = _sequence(prompt, "labels", size, IGNORE_INDEX)
    sampled = _sequence(prompt, "completion_mask", size, 0)
    joined["input_ids"] = ids + tokens
    if tokens:
        labels = [*labels[:-1], *tokens, IGNORE_INDEX]
        sampled = [*sampled[:-1], *[1] * len(tokens), 0]
    joined["labels"], joined["completion_mask"] = labels, sampled
    joined["attention_mask"] = _sequence(prompt, "attention_mask", size, 1) + [1] * len(tokens)
    positions = _sequence(prompt, "position_ids", size, None) or list(range(size))
    joined["position_ids"] = positions + list(range(positions[-1] + 1, positions[-1] + 1 + len(tokens)))
    if prompt.get("loss_scale") is not None and tokens:
        scale = _sequence(prompt, "loss_scale", size, 1.0)
        joined["loss_scale"] = [*scale[:-1], *[1.0] * len(tokens), scale[-1]]
    joined["length"] = size + len(tokens)
    return joined


def _sequence(row: Mapping[str, Any], key: str, size: int | None, default: Any) -> list[Any]:
    value = row.get(key)
    if value is None:
        return [] if default is None else [default] * (size or 0)
    values = plain_list(value)
    if values and isinstance(values[0], list):
        raise DataError(f"{key} of the prompt is a batch; give one row at a time")
    if size is not None and len(values) != size:
        raise DataError(f"{key} of the prompt has {len(values)} values for {size} tokens")
    return values


def plain_list(value: Any) -> list[Any]:
    """Return a list, NumPy array or tensor as a plain list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple | range) else [value]
