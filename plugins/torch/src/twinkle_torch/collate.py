"""Collates the rows that a processor is given: checks them, and turns them into tensors, padded or packed.

Packed sequences lie one after the other in one row; `unpack` gives back one padded row for each.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from twinkle.errors import DataError

if TYPE_CHECKING:
    import torch


Row: TypeAlias = Mapping[str, Any]
TARGET_KEYS = ("labels", "loss_scale")
"""Of these a token may have several: `[T, K]`."""
TOKEN_KEYS = ("input_ids", "attention_mask", "position_ids", "labels", "completion_mask", "loss_scale")
PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100, "completion_mask": 0, "loss_scale": 0.0, "position_ids": 0}
"""What fills the shorter rows. Positions are 0 there, not -1: a model with a table of positions would look up -1."""
_FLOATS = ("loss_scale",)
_MASKS = ("attention_mask", "completion_mask")
"""Whole numbers, which published scripts also give as floats."""
_FROM_ZERO = ("input_ids", "position_ids")
Side = Literal["left", "right"]
_FILL = {"predictions": -100}


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

    Such labels are not targets of positions; losses on embeddings or on the values of a whole row read them. One number
    may be a list of one, as published preprocessors write it.
    """
    size = None if labels is None else size_of(labels)
    if labels is None or size == length:
        return False
    if isinstance(labels, Number) or _dimensions(labels) == 0 or size == 1:
        return True
    if size is None:
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
    if key in _MASKS:
        rows = [row.long() if row.is_floating_point() and bool((row == row.round()).all()) else row for row in rows]
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
    """Return a tensor `[B, ...]` if every row has a number or an array of the same shape; else the list unchanged."""
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
    if all(not row.is_floating_point() and row.numel() == 1 for row in rows):
        rows = [row.reshape(()) for row in rows]
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise DataError(
                f"row {number}: 'labels' has the shape {list(row.shape)}, that of row 0 has {list(rows[0].shape)}; "
                "labels of whole rows need one shape"
            )
    return join(rows)


def per_token(values: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return whether each row has exactly one number per token."""
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences of a batch `[B, T]` lie: a row may hold several, whose positions begin at 0.

    Attributes:
        counts: number of sequences in each row.
        lengths: tokens of each sequence.
        source: int64 `[sum of lengths]`, the places of their tokens in the flattened batch.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    source: "torch.Tensor"

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "Layout":
        """Find the sequences; tokens whose `attention_mask` is 0 belong to none.

        Raises:
            DataError: a row has no tokens, or its positions go back to something else than 0.
        """
        import torch

        ids, mask, positions = (batch.get(key) for key in ("input_ids", "attention_mask", "position_ids"))
        rows, width = ids.shape[:2]  # type: ignore[union-attr]
        real = torch.ones(rows, width, dtype=torch.bool) if mask is None else mask.bool().cpu()
        sizes = tuple(real.sum(-1).tolist())
        if 0 in sizes:
            raise DataError(f"row {sizes.index(0)} of the batch has no tokens that its attention_mask keeps")
        source = real.flatten().nonzero().squeeze(-1)
        if positions is None or positions.ndim != 2 or _counts_up(positions.cpu(), real):
            return cls((1,) * rows, sizes, source)
        row_of = source // width
        first = row_of != torch.cat([row_of.new_tensor([-1]), row_of[:-1]])
        places = positions.cpu().flatten()[source]
        starts = first | (places == 0)
        _check_order(places, starts, row_of, source % width)
        begin = starts.nonzero().squeeze(-1)
        lengths = torch.diff(begin, append=begin.new_tensor([len(source)]))
        counts = torch.bincount(row_of[begin], minlength=rows)
        return cls(tuple(counts.tolist()), tuple(lengths.tolist()), source)

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one sequence."""
        return len(self.lengths) > len(self.counts)

    def places(self, side: Side = "right") -> "torch.Tensor":
        """Return where the tokens lie in `[sequences, longest]`, flattened and padded on `side`: int64, ascending."""
        import torch

        longest, lengths = max(self.lengths), torch.tensor(self.lengths)
        begin = torch.arange(len(lengths)) * longest + (longest - lengths if side == "left" else 0)
        within = torch.arange(len(self.source)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return begin.repeat_interleave(lengths) + within

    def unpack(self, tensor: "torch.Tensor", fill: float, side: Side = "right") -> "torch.Tensor":
        """Return `[sequences, longest, ...]` of `[B, T, ...]`; gradients flow back."""
        rest = tensor.shape[2:]
        tokens = tensor.flatten(0, 1)[self.source.to(tensor.device)]
        shape = (len(self.lengths), max(self.lengths))
        out = tensor.new_full((shape[0] * shape[1], *rest), fill)
        return out.index_put((self.places(side).to(tensor.device),), tokens).view(*shape, *rest)

    def spread(self, key: str, values: Sequence[Any], *, listed: bool = False) -> list[Any]:
        """Return one value a sequence from one value a row.

        A row of several sequences has a list with one entry for each; anything else that is no number belongs to all.

        Args:
            key: what the values are called, for the error.
            values: one a row.
            listed: whether rows of one sequence have such a list too; else they do if rows of several sequences have
                one, or if it holds a number.

        Raises:
            DataError: a row of several sequences has a single number.
        """
        entries = [_entries(value, count) for value, count in zip(values, self.counts, strict=True)]
        listed |= any(entry is not None and count > 1 for entry, count in zip(entries, self.counts, strict=True))
        found: list[Any] = []
        for row, (value, entry, count) in enumerate(zip(values, entries, self.counts, strict=True)):
            if entry is not None and (listed or _is_number(entry[0])):
                found += entry
            elif count > 1 and _is_number(value):
                raise DataError(
                    f"row {row} packs {count} sequences but {key!r} is one number; give a list with one for each"
                )
            else:
                found += [value] * count
        return found


def pack(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a padded batch as one row without padding.

    Args:
        batch: `input_ids`, `attention_mask`, `position_ids` and any other `[B, T, ...]`; other values have one
            entry a row.

    Returns:
        `[1, sum of lengths, ...]` without `attention_mask`; `position_ids` begin at 0 where a sequence begins; other
        values become `[1, sequences, ...]`, or a list that holds one list.

    Raises:
        DataError: a row does not begin at position 0, or a token that is masked has a label.
    """
    layout = Layout.of(batch)
    size = batch["input_ids"].shape[:2]
    _check_first(batch, layout)
    packed: dict[str, Any] = {}
    for key, value in batch.items():
        if key == "attention_mask":
            continue
        if getattr(value, "shape", ())[:2] == size:
            packed[key] = value.flatten(0, 1)[layout.source.to(value.device)][None]
        elif key == "length":
            packed[key] = _row(join(layout.lengths))
        else:
            packed[key] = _row(join(layout.spread(key, list(value))))
    return packed


def unpack(batch: Mapping[str, Any], layout: Layout, side: Side = "right") -> dict[str, Any]:
    """Return a batch `[B, T]` as `[sequences, longest]`, padded as rows are.

    Args:
        batch: as `pack` returns it, or padded with rows that hold several sequences.
        layout: of this batch.
        side: where shorter sequences are filled up.
    """
    size = batch["input_ids"].shape[:2]
    unpacked: dict[str, Any] = {}
    for key, value in batch.items():
        if getattr(value, "shape", ())[:2] == size and key != "length":
            unpacked[key] = layout.unpack(value, PAD.get(key, 0), side)
        elif key == "length":
            unpacked[key] = join(layout.lengths)
        else:
            unpacked[key] = join(layout.spread(key, list(value), listed="attention_mask" not in batch))
    ones = batch["input_ids"].new_ones(size)
    unpacked["attention_mask"] = layout.unpack(ones, 0, side)
    return unpacked


def unpack_outputs(outputs: Mapping[str, Any], layout: Layout, size: Sequence[int], side: Side) -> dict[str, Any]:
    """Return a model's outputs with tensors `[B, T, ...]` (`size`) reshaped to `[sequences, longest, ...]`."""
    return {
        key: layout.unpack(value, _FILL.get(key, 0), side) if getattr(value, "shape", ())[:2] == size else value
        for key, value in outputs.items()
    }


def _counts_up(positions: "torch.Tensor", real: "torch.Tensor") -> bool:
    """Return whether the positions of each row's real tokens are 0, 1, 2, ...: it is one sequence."""
    return not bool(((positions != real.cumsum(-1) - 1) & real).any())


def _check_order(
    places: "torch.Tensor", starts: "torch.Tensor", row_of: "torch.Tensor", column: "torch.Tensor"
) -> None:
    back = (places[1:] <= places[:-1]) & ~starts[1:]
    if bool(back.any()):
        index = int(back.nonzero()[0]) + 1
        raise DataError(
            f"row {int(row_of[index])} of the batch: position_ids go from {int(places[index - 1])} to "
            f"{int(places[index])} at {int(column[index])}; they count up, and begin at 0 where a packed "
            "sub-sequence begins"
        )


def _check_first(batch: Mapping[str, Any], layout: Layout) -> None:
    width = batch["input_ids"].shape[1]
    rows = layout.source // width
    first = rows.diff(prepend=rows.new_tensor([-1])) != 0
    begin = batch["position_ids"].flatten()[layout.source][first]
    if bool(begin.any()):
        row = int(begin.nonzero()[0])
        raise DataError(
            f"row {row}: position_ids begin at {int(begin[row])}; without padding they tell where a row begins, so "
            "they must begin at 0"
        )
    labels, mask = batch.get("labels"), batch["attention_mask"]
    if labels is None or getattr(labels, "shape", ())[:2] != mask.shape:
        return
    targets = (labels != -100).flatten(2).any(-1) if labels.ndim == 3 else labels != -100
    if bool((targets & (mask == 0)).any()):
        row = int((targets & (mask == 0)).nonzero()[0, 0])
        raise DataError(f"row {row}: a token whose attention_mask is 0 has a label; such tokens are left out")


def _row(values: Any) -> Any:
    return [values] if isinstance(values, list) else values[None]


def _entries(value: Any, count: int) -> list[Any] | None:
    """Return the entries of a list, tuple, array or tensor that has `count` of them."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        return None
    return list(value) if len(value) == count else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or getattr(value, "ndim", None) == 0
