"""Rows of a call: read from the caller's inputs, cut into micro-batches, with their share of per-row arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinkle.errors import ArgumentError, DataError

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


def as_rows(inputs: Any, encode: Callable[[Any], Any]) -> list[Any]:
    """Return encoded rows for one row, a list of rows, or a collated batch; trajectories pass through `encode`.

    Raises:
        DataError: there are no rows, or a row is neither encoded nor a trajectory.
    """
    if not isinstance(inputs, Mapping) and (isinstance(inputs, str) or not hasattr(inputs, "__iter__")):
        raise DataError(f"inputs must be a row, a list of rows or a collated batch, got a {type(inputs).__name__}")
    rows = list(inputs) if not isinstance(inputs, Mapping) else _unbatch(inputs) if _is_batch(inputs) else [inputs]
    if not rows:
        raise DataError("the batch must have at least one row, got none")
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
