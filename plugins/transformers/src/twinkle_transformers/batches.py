"""Rows of a call and the batches made of them: cut into micro-batches, without padding, with shared prefixes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import SampleResponse
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.logging import get_logger
from twinkle_torch.collate import Layout, Side, unpack
from twinkle_torch.segments import Segments
from twinkle_transformers.segments import Segmenter
from twinkle_transformers.shared_prefixes import PrefixPlan, plan_prefixes

PER_ROW = frozenset(
    {
        "advantages",
        "group_ids",
        "old_logps",
        "ref_logps",
        "ref_outputs",
        "rewards",
        "teacher_logits",
        "teacher_topk_indices",
        "teacher_topk_logprobs",
    }
)
"""Loss arguments with one entry a row, cut by name; a loss adds its own in its attribute `row_inputs`."""

_OF_TOKENS = PER_ROW - {"group_ids", "rewards"} | {"old_values", "returns", "rollout_logps"}
"""Arguments with a value (or several) for each token; an entry is as long as its row or longer."""
_TEXT = frozenset({"input_ids", "attention_mask", "position_ids"})


def as_rows(inputs: Any, encode: Callable[[Any], Any]) -> list[Any]:
    """Return encoded rows for one row, a list of rows, or a collated batch; trajectories pass through `encode`.

    A `SampleResponse` in the list is the rows of its sequences (`new_input_feature`).

    Raises:
        DataError: there are no rows, or a row is neither encoded nor a trajectory.
    """
    if not isinstance(inputs, Mapping) and (isinstance(inputs, str) or not hasattr(inputs, "__iter__")):
        raise DataError(f"inputs must be a row, a list of rows or a collated batch, got a {type(inputs).__name__}")
    rows = list(inputs) if not isinstance(inputs, Mapping) else _unbatch(inputs) if _is_batch(inputs) else [inputs]
    if not rows:
        raise DataError("the batch must have at least one row, got none")
    rows = [row for given in rows for row in _sampled(given)]
    encoded: list[Any] = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} is a {type(row).__name__}; give dicts with `input_ids` or with `messages`")
        if "input_ids" in row:
            encoded.append(row)
        elif "messages" in row:
            feature = encode(row)
            encoded.extend(feature if isinstance(feature, list) else [feature])
        else:
            raise DataError(
                f"row {index} has the keys {sorted(row)}; it needs `input_ids` (encoded) or `messages` (a trajectory)"
            )
    return encoded


def _sampled(given: Any) -> list[Any]:
    """Return the rows of a `SampleResponse`, or what is given."""
    return [one.new_input_feature for one in given.sequences] if isinstance(given, SampleResponse) else [given]


def row_count(name: str, value: Any, rows: int, together: int = 1) -> None:
    """Check that a per-row argument has one entry for each of `rows` rows, or for each `together` of them.

    Raises:
        ArgumentError: its length differs.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            if _is_sized(part):
                row_count(f"{name}[{key!r}]", part, rows, together)
    elif isinstance(value, str):
        raise ArgumentError(
            f"{name} is {value!r:.40}; give one entry a row ('base' is for models with many adapters: here "
            "forward_only(disable_lora=True) returns the values of the base model)"
        )
    elif not _is_sized(value) or len(value) * together != rows:
        description = f"{len(value)} entries" if _is_sized(value) else f"a single {type(value).__name__}"
        each = "a row" if together == 1 else f"for each {together} rows"
        raise ArgumentError(
            f"{name} has {description}, the batch has {rows} rows; give one entry {each}, in the same order"
        )


def split_rows(rows: Sequence[Any], size: int | None, together: int = 1) -> list[Sequence[Any]]:
    """Return the rows in groups of at most `size`; None is one group.

    `together` consecutive rows stay in one group if `size` allows it: `size` is rounded down to a multiple.

    Raises:
        ArgumentError: `size` is not an integer of at least 1.
    """
    if size is None:
        return [rows] if rows else []
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(
            f"micro_batch_size must be an integer of at least 1, or None for the whole batch, got {size!r}"
        )
    size = size - size % together or size
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def share_arguments(
    arguments: Mapping[str, Any], per_row: Mapping[str, int], batches: Sequence[tuple[int, int]], *, left: bool
) -> list[dict[str, Any]]:
    """Return each micro-batch's share of the loss arguments.

    Args:
        arguments: arguments of the loss; those named in `per_row` are cut, the others are passed whole.
        per_row: names of the arguments that are cut, each with the number of rows that share an entry (usually 1).
        batches: rows and padded length of each micro-batch, in order.
        left: whether rows are padded on the left.

    A tensor `[B, T, ...]` as long as the longest micro-batch (for example a result of `forward_only`), or such a list
    of lists, is also narrowed to the length of each micro-batch. Entries of known per-token arguments are narrowed also
    if they are longer, like results of `forward_only` for more rows. The loss could not do this: it knows neither the
    padding side nor the length of the longest micro-batch.

    Raises:
        ArgumentError: an argument has another number of entries, or an entry a length that no row has.
    """
    total, longest = sum(rows for rows, _ in batches), max((length for _, length in batches), default=0)
    for name in sorted(per_row.keys() & arguments.keys()):
        if arguments[name] is not None:
            row_count(name, arguments[name], total, per_row[name])
    shares, start = [], 0
    for rows, length in batches:
        share = dict(arguments)
        for name in per_row.keys() & arguments.keys():
            part = slice(start // per_row[name], (start + rows) // per_row[name])
            share[name] = _Cut(name, part, longest, length, left, name in _OF_TOKENS)(arguments[name])
        shares.append(share)
        start += rows
    return shares


@dataclass(frozen=True, slots=True)
class _Cut:
    """Selects rows of a value, and narrows entries as long as `longest` (or longer, if `of_tokens`) to `length`."""

    name: str
    rows: slice
    longest: int
    length: int
    left: bool
    of_tokens: bool

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._inside(key)(entry) if _is_sized(entry) else entry for key, entry in value.items()}
        if value is None:
            return None
        part = value[self.rows]
        shape: tuple[int, ...] = getattr(part, "shape", ())
        if len(shape) > 1:
            return part[:, self._positions(shape[1], 0)] if len(part) else part
        if isinstance(value, list | tuple) and (self.of_tokens or all(_width(e) == self.longest for e in value)):
            return [e[self._positions(_width(e), row)] if _width(e) else e for row, e in enumerate(part)]
        return part

    def _inside(self, key: Any) -> "_Cut":
        return replace(self, name=f"{self.name}[{key!r}]", of_tokens=self.of_tokens and key == "logps")

    def _positions(self, width: int, row: int) -> slice:
        """Return the slice of an entry of length `width` for this micro-batch; everything if it is not per token."""
        if width == self.longest or (self.of_tokens and width > self.longest):
            return slice(width - self.length, None) if self.left else slice(0, self.length)
        if self.of_tokens and self.length < width:
            raise ArgumentError(
                f"{self.name} of row {self.rows.start + row} has {width} numbers, more than the row has tokens; give "
                f"one for each trained token, or at least {self.longest}, the width of the batch"
            )
        return slice(None)


def _width(entry: Any) -> int:
    """Return the length of an entry; 0 for a scalar, a text or a mapping."""
    return len(entry) if _is_sized(entry) and not isinstance(entry, str | Mapping) else 0


def row_inputs(loss: Any) -> dict[str, int]:
    """Return the names of the arguments of `loss` that are cut with the rows, and how many rows share an entry."""
    own = dict.fromkeys(getattr(loss, "row_inputs", ()), 1)
    return dict.fromkeys(PER_ROW, 1) | own | dict.fromkeys(getattr(loss, "group_inputs", ()), rows_together(loss))


def rows_together(loss: Any) -> int:
    """Return how many consecutive rows of `loss` must stay in one micro-batch."""
    return int(getattr(loss, "rows_together", 1))


def batch_size(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of rows and the padded length of a collated batch."""
    rows, length = batch["input_ids"].shape[:2]
    return rows, length


def _is_sized(value: Any) -> bool:
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0  # a 0-dimensional tensor has a __len__ too


def _is_batch(inputs: Mapping[str, Any]) -> bool:
    ids = inputs.get("input_ids")
    if ids is None or len(ids) == 0:
        return False
    return ids.ndim == 2 if hasattr(ids, "ndim") else isinstance(ids[0], Sequence)


def _unbatch(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = len(batch["input_ids"])
    for key, value in batch.items():
        row_count(f"inputs[{key!r}]", value, count)
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


class PackedBatch(dict[str, Any]):
    """A padded batch `[sequences, longest]` that runs through the model as one row without padding.

    Attributes:
        lengths: number of tokens of each sequence.
        places: int64 `[sum of lengths]`, ascending indices of the tokens in the flattened batch.
    """

    def __init__(self, batch: Mapping[str, Any], layout: Layout, side: Side) -> None:
        super().__init__(unpack(batch, layout, side))
        self.lengths = layout.lengths
        self.places = layout.places(side)

    @property
    def width(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    def segments(self, device: torch.device) -> Segments:
        """Return the boundaries of the sequences in the row."""
        return Segments.of(self.lengths, device)

    def join(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of a forward as one row: `[1, T, ...]` of `[sequences, longest, ...]`.

        Raises:
            Unsupported: an argument has no entry for each token (images, say).
        """
        size = self["input_ids"].shape[:2]
        for name, value in arguments.items():
            if value.shape[:2] != size:
                raise Unsupported(
                    f"{name!r} {list(value.shape)} has no entry for each token; batches without padding hold text "
                    "alone: leave padding_free out and give each sequence as a row of its own"
                )
        kept = {name: value for name, value in arguments.items() if name != "attention_mask"}
        return {name: value.flatten(0, 1)[self.places.to(value.device)][None] for name, value in kept.items()}

    def find(self, places: Tensor) -> Tensor:
        """Return the indices in the joined row of tokens at `places` (int64 `[N]`, on the CPU) of the padded batch."""
        return torch.searchsorted(self.places, places)

    def pad_rows(self, values: Tensor) -> Tensor:
        """Return `[sequences, longest, ...]` of `[1, T, ...]`, with 0 where nothing was computed."""
        size, rest = self["input_ids"].shape[:2], values.shape[2:]
        out = values.new_zeros((size.numel(), *rest))
        return out.index_put((self.places.to(values.device),), values[0]).view(*size, *rest)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a pass: number of positions, length of the longest sequence, and whether it is masked or packed."""

    tokens: int
    width: int
    masked: bool
    packed: bool = False


def positions(batch: Mapping[str, Any]) -> Size:
    """Return the size of the pass of a batch."""
    if isinstance(batch, PackedBatch):
        return Size(sum(batch.lengths), batch.width, False, True)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return Size(ids.numel(), ids.shape[1], mask is not None and not bool(mask.all()))


def without_padding(batch: Any, *, left: bool) -> Any:
    """Return a batch as losses and metrics see it, with one padded row for each sequence and an `attention_mask`.

    Args:
        batch: collated tensors; if rows hold several sequences, or there is no mask, each becomes a row of its own.
        left: whether sequences are padded on the left.

    Returns:
        a `PackedBatch` if there are more sequences than rows; the model then processes them in one row.

    Raises:
        DataError: positions within a row restart at another number than 0.
    """
    layout = Layout.of(batch)
    side: Side = "left" if left else "right"
    if layout.packed:
        return PackedBatch(batch, layout, side)
    return batch if "attention_mask" in batch else unpack(batch, layout, side)


class SharedBatch(PackedBatch):
    """A padded batch `[rows, longest]` that runs through the model as one row, with shared prefixes only once.

    Attributes:
        lengths: number of tokens of each segment of the row: a shared prefix, or the rest of a sequence after one.
        index: int64 `[sum of the rows' lengths]`, index in the row of each token of the sequences.
    """

    def __init__(self, batch: dict[str, Any], plan: PrefixPlan, places: Tensor) -> None:
        dict.__init__(self, batch)
        self._plan = plan
        self.lengths, self.places = plan.lengths, places
        self.index = torch.cat([torch.from_numpy(indices) for indices in plan.index])

    @property
    def width(self) -> int:
        """Length of the longest row."""
        return max(len(indices) for indices in self._plan.index)

    def segments(self, device: torch.device) -> Segments:
        """Return the boundaries of the segments, and the prefix that each continues."""
        return Segments.of(self.lengths, device, parents=self._plan.parents)

    def join(self, arguments: Any) -> dict[str, Tensor]:
        """Return the stream with its positions, `[1, T]` each."""
        ids = arguments["input_ids"]
        stream = ids.new_empty(sum(self.lengths))
        stream[self.index.to(ids.device)] = ids.flatten()[self.places.to(ids.device)]
        return {"input_ids": stream[None], "position_ids": self.segments(ids.device).positions[None]}

    def find(self, places: Tensor) -> Tensor:
        """Return the indices in the stream of tokens at `places` of the padded batch."""
        return self.index[torch.searchsorted(self.places, places)]

    def pad_rows(self, values: Tensor) -> Tensor:
        """Return `[rows, longest, ...]` of `[1, T, ...]`, with 0 where nothing was computed."""
        return super().pad_rows(values[:, self.index.to(values.device)])


def check_sharing(share_prefixes: bool | str) -> bool | str:
    """Return the option `share_prefixes`, or refuse an invalid value."""
    if not isinstance(share_prefixes, bool) and share_prefixes != "auto":
        raise ArgumentError(f'share_prefixes must be True, False or "auto", got {share_prefixes!r}')
    return share_prefixes


def sharing_prefixes(
    batch: dict[str, Any], segmenter: Segmenter, taken: Collection[str], *, required: bool = False
) -> dict[str, Any]:
    """Return a batch that computes shared prefixes once, or the batch itself if that saves nothing.

    Args:
        batch: a batch that `without_padding` returned.
        segmenter: segmenter of the model.
        taken: names of the tensors that the model takes.
        required: raise an error if the model cannot share prefixes.

    Raises:
        Unsupported: sharing is required, and the model cannot do it.
    """
    others = [name for name in taken if name in batch and name not in _TEXT and isinstance(batch[name], Tensor)]
    if others or len(batch["input_ids"]) < 2:
        return batch
    lengths, places = _rows(batch)
    if places is None or not _counts_from_zero(batch.get("position_ids"), lengths, places):
        return batch
    plan = plan_prefixes(batch["input_ids"].flatten()[places].split(lengths))
    if not plan.saved:
        return batch
    if refusal := segmenter.check_prefixes():
        if required:
            raise Unsupported(f'{refusal}, or use share_prefixes="auto", which computes rows whole here')
        get_logger().debug("%s; rows are computed whole", refusal)
        return batch
    return SharedBatch(batch, plan, places)


def _rows(batch: dict[str, Any]) -> tuple[list[int], Tensor | None]:
    """Return the rows' lengths and the indices of their tokens; None if the mask of a row has holes or is empty."""
    if isinstance(batch, PackedBatch):
        return list(batch.lengths), batch.places
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1)
    runs = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    whole = bool((runs == 1).all())
    return lengths.tolist(), mask.flatten().nonzero().squeeze(-1) if whole else None


def _counts_from_zero(positions: Tensor | None, lengths: list[int], places: Tensor) -> bool:
    if positions is None:
        return True
    if positions.ndim != 2:
        return False
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    plain = torch.cat([torch.arange(past - first) for first, past in pairwise(ends)])
    return bool((positions.flatten()[places].cpu() == plain).all())
