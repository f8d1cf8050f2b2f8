"""Brings what a processor may be given into a list of checked rows."""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, TypeAlias

from twinkle.errors import DataError

Row: TypeAlias = Mapping[str, Any]
TARGET_KEYS = ("labels", "loss_scale")
"""Of these a token may have several: `[T, K]`."""
TOKEN_KEYS = ("input_ids", "attention_mask", "position_ids", "labels", "completion_mask", "loss_scale")


def as_rows(inputs: Any) -> list[Row]:
    """Return the rows of `inputs`: a list of rows, one row, or a collated batch (`input_ids` `[B, T]`), cut into rows.

    Raises:
        DataError: there are no rows, or something that is not one; the message names row and key.
    """
    if isinstance(inputs, Mapping):
        rows: list[Row] = _batch_rows(inputs) if _dimensions(inputs.get("input_ids")) == 2 else [inputs]
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        rows = list(inputs)
    else:
        raise DataError(f"a processor takes one row or a list of rows, not {type(inputs).__name__}")
    if not rows:
        raise DataError("there are no rows to collate; is the data set empty, or every row dropped?")
    for number, row in enumerate(rows):
        _check_row(number, row)
    _check_keys(rows)
    return rows


def _batch_rows(batch: Row) -> list[Row]:
    size = len(batch["input_ids"])
    for key, value in batch.items():
        if not hasattr(value, "__len__") or len(value) != size:
            raise DataError(f"{key!r} of the collated batch has no entry for each of its {size} rows")
    return [{key: value[index] for key, value in batch.items()} for index in range(size)]


def _check_row(number: int, row: Any) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f"row {number} is a {type(row).__name__}; a row is a dict with 'input_ids'")
    if "input_ids" not in row:
        raise DataError(f"row {number} has no 'input_ids' (it has: {', '.join(map(str, row))}); {_remedy(row)}")
    length = size_of(row["input_ids"])
    if length is None:
        raise DataError(f"row {number}: 'input_ids' is not a flat sequence of token ids")
    if length == 0:
        raise DataError(f"row {number} has no tokens; drop empty rows before batching (dataset.encode does)")
    for key in TOKEN_KEYS:
        if key == "labels" and of_whole_row(row.get(key), length):
            continue
        if key in TARGET_KEYS and _dimensions(row.get(key)) == 2:
            _check_targets(number, key, row, length)
            continue
        size = size_of(row[key]) if row.get(key) is not None else length
        if size != length:
            found = "no flat sequence" if size is None else f"{size} values"
            raise DataError(f"row {number}: {key!r} is {found}, for {length} tokens; every token needs one")


def _check_targets(number: int, key: str, row: Row, length: int) -> None:
    """Check labels of several targets a token, `[T, K]`, and their weights, which have the same shape."""
    value = row[key]
    if len(value) != length:
        raise DataError(
            f"row {number}: {key!r} is a table of {len(value)} rows, for {length} tokens; give one for each"
        )
    if _dimensions(row.get("labels")) != 2:
        raise DataError(
            f"row {number}: 'loss_scale' has several weights a token, and 'labels' one target; give both one shape"
        )
    if key == "labels" and row.get("loss_scale") is not None and _dimensions(row["loss_scale"]) != 2:
        raise DataError(
            f"row {number}: 'labels' has several targets a token, and 'loss_scale' one weight; give both one shape"
        )


def of_whole_row(labels: Any, length: int) -> bool:
    """Return whether the labels of a row of `length` tokens are one number, or another count of numbers with fractions.

    Such labels are not targets of positions; losses on embeddings or on the values of a whole row read them.
    """
    if labels is None or size_of(labels) == length:
        return False
    if isinstance(labels, Number) or _dimensions(labels) == 0:
        return True
    if size_of(labels) is None:
        return False
    if hasattr(labels, "dtype"):
        return "float" in str(labels.dtype)
    return all(isinstance(value, float) for value in labels)


def _remedy(row: Row) -> str:
    if "positive" in row and "negative" in row:
        return "give preference pairs one after the other: [positive0, negative0, positive1, negative1, ...]"
    if "messages" in row:
        return "encode it with a template first"
    return "a processor takes rows that a template has encoded"


def _check_keys(rows: Sequence[Row]) -> None:
    first = set(rows[0])
    for number, row in enumerate(rows):
        if different := sorted(first ^ set(row), key=str):
            owner, other = (0, number) if different[0] in first else (number, 0)
            raise DataError(
                f"row {owner} has {different[0]!r} and row {other} has not; the rows of a batch need the same keys"
            )


def size_of(value: Any) -> int | None:
    """Return the number of values of a flat sequence (list, NumPy array, tensor); None for anything else."""
    if type(value) is list and value and type(value[0]) in (int, float):  # nearly always, and soon said
        return len(value)
    return len(value) if _dimensions(value) == 1 else None


def _dimensions(value: Any) -> int | None:
    if hasattr(value, "ndim"):
        return int(value.ndim)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    if len(value) == 0:
        return 1
    inner = _dimensions(value[0])
    return (
        1 if inner is None and not isinstance(value[0], str | bytes | Mapping) else None if inner is None else inner + 1
    )
