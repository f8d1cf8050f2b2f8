"""Rows of native calls: checked, encoded if they are conversations, and the outputs of their tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from twinkle_server.engine.errors import UserError

Array = np.ndarray[Any, Any]
Encode = Callable[[Any], Any]
_IDS: Final = ("input_ids", "labels")
_KEPT: Final = ("input_ids", "labels", "attention_mask", "position_ids", "completion_mask", "loss_scale")
"""Fields of encoded rows that the engine reads."""
_IGNORED: Final = ("length", "messages", "user_data", "tools", "prompt")
"""Fields of encoded rows that describe where they come from."""
_CONVERSATION: Final = ("messages", "tools", "user_data", "prompt", "images", "videos", "audios")
_MAX_CELLS: Final = 2**24
_NO_TARGET: Final = -100
_HIDDEN: Final = ("loss", "loss_sum", "num_tokens", "loss_metrics", "predictions")
"""Entries of outputs that are not sent: numbers of the whole batch, and what only metrics need."""


def read_rows(
    inputs: Any, encode: Encode, context: int, vocabulary: int, *, row_labels: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of a call as encoded rows.

    Args:
        inputs: a row or a list of rows: each encoded (`input_ids`, ...) or a conversation (`messages`, ...).
        encode: encodes a conversation.
        context: maximum number of tokens of a row.
        vocabulary: number of token ids.
        row_labels: whether `labels` may be one number for a whole row, or a list of one, as losses of embeddings have
            them.

    Raises:
        UserError: there are no rows, or one is invalid.
    """
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, list) or not rows:
        raise UserError("inputs must be a row or a list with at least one row")
    encoded: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        where = f"row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where} must be a mapping with input_ids or messages, got a {type(row).__name__}")
        if "input_ids" in row:
            label = _row_label(row.get("labels")) if row_labels else None
            if label is None:
                encoded.append(_feature(where, row, context, vocabulary))
            else:
                rest = {name: value for name, value in row.items() if name != "labels"}
                encoded.append({**_feature(where, rest, context, vocabulary), "labels": label})
        else:
            encoded += [_feature(where, part, context, vocabulary) for part in _encoded(where, row, encode)]
    if not encoded:
        raise UserError("inputs has no row that the template keeps; see its max_length and truncation_strategy")
    return encoded


def _row_label(labels: Any) -> int | None:
    """Return the one number that labels are, or None."""
    if isinstance(labels, np.ndarray) and labels.shape == (1,) and labels.dtype.kind in "iu":
        return int(labels[0])
    if isinstance(labels, list) and len(labels) == 1:
        labels = labels[0]
    return labels if isinstance(labels, int) and not isinstance(labels, bool) else None


def _encoded(where: str, row: Mapping[str, Any], encode: Encode) -> list[Mapping[str, Any]]:
    unknown = sorted(set(row) - set(_CONVERSATION))
    if "messages" not in row or unknown:
        found = ", ".join(sorted(row)) or "nothing"
        raise UserError(f"{where} must have input_ids, or messages of a conversation, got {found}")
    result = encode({name: value for name, value in row.items() if value is not None})
    return list(result) if isinstance(result, list | tuple) else [result] if result else []


def _feature(where: str, row: Mapping[str, Any], context: int, vocabulary: int) -> dict[str, Any]:
    if extra := sorted(set(row) - set(_KEPT) - set(_IGNORED)):
        raise UserError(f"{where} must contain only text, got {extra[0]!r}; fields of rows are {', '.join(_KEPT)}")
    feature = {name: _array(f"{where}: {name}", row[name]) for name in _KEPT if row.get(name) is not None}
    tokens = feature["input_ids"]
    if tokens.ndim != 1 or not len(tokens):
        raise UserError(f"{where}: input_ids must be a list of at least one token, got the shape {list(tokens.shape)}")
    if len(tokens) > context:
        raise UserError(f"{where} must have at most {context} tokens (the model's context), got {len(tokens)}")
    for name, values in feature.items():
        if len(values) != len(tokens) or values.ndim > (2 if name in ("labels", "loss_scale") else 1):
            raise UserError(
                f"{where}: {name} must have an entry for each of {len(tokens)} tokens, got the shape "
                f"{list(values.shape)}"
            )
    for name in _IDS:
        if name in feature:
            _check_ids(f"{where}: {name}", feature[name], vocabulary, masked=name == "labels")
    return feature


def read_tokens(where: str, value: Any, vocabulary: int) -> list[int]:
    """Return the tokens of a prompt.

    Args:
        where: name of the field, for messages.
        value: of the field: a list or an array of integers.
        vocabulary: of the model; 0 is not known.

    Raises:
        UserError: it is not a list of at least one token of the vocabulary.
    """
    ids = _array(where, value)
    if ids.ndim != 1 or not len(ids):
        raise UserError(f"{where} must be a list of at least one token, got the shape {list(ids.shape)}")
    _check_ids(where, ids, vocabulary or np.iinfo(np.int64).max, masked=False)
    return [int(token) for token in ids]


def _array(where: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UserError(f"{where} must be a list of numbers: {error}") from error
    if array.dtype.kind not in "iufb" or not array.ndim:
        raise UserError(f"{where} must be a list of numbers, got {array.dtype}")
    return np.array(array, np.float32 if array.dtype.kind == "f" else np.int64)  # a copy: torch refuses read-only ones


def _check_ids(where: str, ids: Array, vocabulary: int, *, masked: bool) -> None:
    if ids.dtype != np.int64:
        raise UserError(f"{where} must contain integers, got {ids.dtype}")
    wrong = (ids < 0) | (ids >= vocabulary)
    if masked:
        wrong &= ids != _NO_TARGET
    if wrong.any():
        raise UserError(f"{where} must contain tokens between 0 and {vocabulary - 1}, got {ids[wrong][0]}")


def check_cells(options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], vocabulary: int) -> None:
    """Refuse a call whose outputs would be too large.

    Raises:
        UserError: they would.
    """
    tokens = sum(len(row["input_ids"]) for row in rows)
    topk = options.get("topk_logprobs") or 0
    for name, width in (("return_logits", vocabulary if options.get("return_logits") else 0), ("topk_logprobs", topk)):
        if tokens * width > _MAX_CELLS:
            raise UserError(
                f"{name} must request at most {_MAX_CELLS} numbers, got {tokens} tokens of {width}; send fewer rows"
            )


def writable(value: Any) -> Any:
    """Return a value with copies of its arrays: those of a frame are read-only, which torch does not support."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [writable(item) for item in value]
    if isinstance(value, dict):
        return {name: writable(item) for name, item in value.items()}
    return value


def batch_of(outputs: Sequence[Mapping[str, Any]], *, left: bool, apart: bool = False) -> dict[str, Any]:
    """Return the outputs of rows as arrays `[B, T, ...]`, padded with 0 on the right or on the left.

    With `apart`, return each as a list of one array `[T, ...]` for each row.
    """
    batch: dict[str, Any] = {}
    for name in outputs[0]:
        if name in _HIDDEN:
            continue
        values = [on_host(row[name]) for row in outputs]
        if all(isinstance(value, np.ndarray) for value in values):
            batch[name] = values if apart else _stack(values, left=left)
    return batch


def on_host(value: Any) -> Any:
    """Return a tensor of torch as an array; bfloat16 as float32."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) in ("torch.bfloat16", "torch.float16") else value).numpy()


def _stack(values: Sequence[Array], *, left: bool) -> Array:
    """Stack arrays of the same or of ragged sizes."""
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    widest = [int(size) for size in np.max([value.shape for value in values], axis=0)]
    stacked = np.zeros((len(values), *widest), values[0].dtype)
    for row, value in enumerate(values):
        first = widest[0] - len(value) if left else 0
        stacked[row][first : first + len(value)][tuple(slice(0, size) for size in [len(value), *value.shape[1:]])] = (
            value
        )
    return stacked
