"""From what a caller passes to rows, and from rows to micro-batches with their share of the per-row arguments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def as_rows(inputs: Any, encode: Callable[[Any], Any]) -> list[Any]:
    """Return encoded rows for one row, a list of rows, or a collated batch; trajectories pass through `encode`.

    Raises:
        DataError: there are no rows, or a row is neither encoded nor a trajectory.
    """
    rows = list(inputs) if not isinstance(inputs, Mapping) else _unbatch(inputs) if _is_batch(inputs) else [inputs]
    if not rows:
        raise DataError("the batch has no rows; a forward needs at least one")
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


def row_count(name: str, value: Any, rows: int) -> None:
    """Check that a per-row argument has one entry for each of `rows` rows.

    Raises:
        ArgumentError: its length differs.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            if hasattr(part, "__len__"):
                row_count(f"{name}[{key!r}]", part, rows)
    elif not hasattr(value, "__len__") or len(value) != rows:
        found = f"{len(value)} entries" if hasattr(value, "__len__") else f"a single {type(value).__name__}"
        raise ArgumentError(f"{name} has {found}, the batch has {rows} rows; give one entry a row, in the same order")


def micro_batches(
    rows: Sequence[Any], loss_kwargs: Mapping[str, Any], per_row: frozenset[str], size: int | None
) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    """Yield the rows in groups of at most `size`, each with its share of the loss arguments.

    Args:
        rows: encoded rows.
        loss_kwargs: arguments of the loss; those named in `per_row` are cut, the others are passed whole.
        per_row: names of the arguments that have one entry a row.
        size: rows a micro-batch; None is all.
    """
    if size is not None and size < 1:
        raise ArgumentError(f"micro_batch_size={size}; it must be at least 1, or None for the whole batch")
    for name in per_row & loss_kwargs.keys():
        if loss_kwargs[name] is not None:
            row_count(name, loss_kwargs[name], len(rows))
    step = size or len(rows)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        yield rows[part], {k: _cut(v, part) if k in per_row else v for k, v in loss_kwargs.items()}


def _cut(value: Any, part: slice) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(entry, part) if hasattr(entry, "__len__") else entry for key, entry in value.items()}
    return value if value is None else value[part]


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
