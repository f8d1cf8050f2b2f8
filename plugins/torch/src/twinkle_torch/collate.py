"""Turns the values of one key, a value from each row, into one tensor."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal

from twinkle.errors import DataError
from twinkle_torch.rows import size_of

if TYPE_CHECKING:
    import torch

PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100, "completion_mask": 0, "loss_scale": 0.0, "position_ids": 0}
"""What fills the shorter rows. Positions are 0 there, not -1: a model with a table of positions would look up -1."""

_FLOATS = ("loss_scale",)
_FROM_ZERO = ("input_ids", "position_ids")


def pad_tokens(key: str, values: Sequence[Any], width: int, side: Literal["left", "right"]) -> "torch.Tensor":
    """Return one value a token as `[B, width]`: int64, or float32 for weights and for values with a fraction.

    Where rows have several values a token, `[T, K]`, it is `[B, width, K]` with the largest K.

    Raises:
        DataError: values are no numbers, or negative where they index something.
    """
    import torch

    rows = _tensors(key, values)
    if any(row.dim() == 2 for row in rows):
        rows = _as_tables(key, rows)
    floats = any(row.is_floating_point() for row in rows)
    if key == "labels" and floats and rows[0].dim() == 1:
        dtype = torch.float32  # targets of a value head at each token
    elif key in PAD and key not in _FLOATS:
        dtype = torch.int64
    else:
        dtype = torch.float32 if key in _FLOATS or floats else torch.int64
    if dtype is torch.int64 and floats:
        number = next(number for number, row in enumerate(rows) if row.is_floating_point())
        raise DataError(f"row {number}: {key!r} holds fractions; it must hold whole numbers")
    if all(row.shape[0] == width for row in rows):
        padded = torch.stack([row.to(dtype) for row in rows])
    else:
        padded = torch.full((len(rows), width, *rows[0].shape[1:]), PAD.get(key, 0), dtype=dtype)
        for number, row in enumerate(rows):
            place = slice(width - row.shape[0], width) if side == "left" else slice(0, row.shape[0])
            padded[number, place] = row
    if key in _FROM_ZERO and bool((padded < 0).any()):
        number = int((padded < 0).any(-1).int().argmax())
        raise DataError(f"row {number}: {key!r} holds {int(padded[number].min())}; it must not be negative")
    return padded


def _as_tables(key: str, rows: Sequence["torch.Tensor"]) -> "list[torch.Tensor]":
    """Return rows as `[T, K]` with one K; what a row has fewer is filled up like padding."""
    import torch

    tables = [row[:, None] if row.dim() == 1 else row for row in rows]
    most = max(table.shape[1] for table in tables)
    return [torch.nn.functional.pad(table, (0, most - table.shape[1]), value=PAD.get(key, 0)) for table in tables]


def mask_and_positions(
    lengths: Sequence[int], width: int, side: Literal["left", "right"]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the `attention_mask` and `position_ids` of rows that have none: int64 `[B, width]`, positions from 0."""
    import torch

    places = torch.arange(width).expand(len(lengths), width)
    if min(lengths) == width:
        return torch.ones(len(lengths), width, dtype=torch.int64), places.clone()
    sizes = torch.tensor(lengths)[:, None]
    if side == "left":
        places = places - (width - sizes)
    real = ((places >= 0) & (places < sizes)).long()
    return real, places * real


def join(values: Sequence[Any]) -> Any:
    """Return a tensor `[B, ...]` where every row has a number or an array of the same shape; else the list as it is."""
    import torch

    if all(isinstance(value, Number) and not isinstance(value, complex) for value in values):
        return _narrow(torch.tensor(values))
    arrays = [value for value in values if hasattr(value, "ndim") and hasattr(value, "shape")]
    if len(arrays) == len(values) and len({tuple(value.shape) for value in arrays}) == 1:
        return _narrow(torch.stack([torch.as_tensor(value) for value in arrays]))
    return list(values)


def join_labels(values: Sequence[Any]) -> Any:
    """Return the labels of whole rows as `[B]` or `[B, K]`: int64, or float32 where they have fractions.

    Raises:
        DataError: rows have different counts of them, or one has something else.
    """
    rows = [_tensor("labels", number, value) for number, value in enumerate(values)]
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise DataError(
                f"row {number}: 'labels' has the shape {list(row.shape)}, that of row 0 has {list(rows[0].shape)}; "
                "labels of whole rows need one shape"
            )
    return join(rows)


def per_token(values: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Say whether each row has just one number for each of its tokens."""
    return all(size_of(value) == length for value, length in zip(values, lengths, strict=True)) and all(
        hasattr(value, "ndim") or all(isinstance(item, Number) for item in value) for value in values
    )


def _narrow(tensor: "torch.Tensor") -> "torch.Tensor":
    """Numbers come as float64 from Python and NumPy; models compute in float32."""
    return tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() == 8 else tensor


def _tensors(key: str, values: Sequence[Any]) -> "list[torch.Tensor]":
    """Return each row's values; lists become tensors together, which costs hardly more than one of them."""
    import torch

    if all(type(value) is list for value in values):
        with suppress(TypeError, ValueError, RuntimeError):  # one by one they say which row it is
            joined = torch.tensor(values[0] if len(values) == 1 else list(chain.from_iterable(values)))
            if not joined.is_complex() and (key in _FLOATS or not joined.is_floating_point()):
                return list(joined.split_with_sizes([len(value) for value in values]))
    return [_tensor(key, number, value) for number, value in enumerate(values)]


def _tensor(key: str, number: int, value: Any) -> "torch.Tensor":
    import torch

    try:
        found = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"row {number}: {key!r} does not hold numbers: {error}") from error
    if found.is_complex():
        raise DataError(f"row {number}: {key!r} holds complex numbers; give real ones")
    return found
