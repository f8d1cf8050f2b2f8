"""Batches without padding: sequences one after the other in one row, and back to one padded row a sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal

from twinkle.errors import DataError
from twinkle_torch.collate import PAD, join

if TYPE_CHECKING:
    import torch

Side = Literal["left", "right"]
_FILL = {"predictions": -100}


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
        batch: `input_ids`, `attention_mask`, `position_ids` and whatever else is `[B, T, ...]`; other values have one
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
    """Return a model's outputs with whatever is `[B, T, ...]` (`size`) as `[sequences, longest, ...]`."""
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
