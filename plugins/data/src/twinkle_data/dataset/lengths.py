"""How many tokens a row has: what balancing and packing go by."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from twinkle.errors import DataError
from twinkle_data.dataset.table import Table

_PAIRS = (("positive", "negative"), ("chosen", "rejected"))


def row_length(row: Any, number: int) -> int:
    """Return the number of tokens of a row: its `length`, else that of its `input_ids`, or of both sides of a pair.

    Args:
        row: an encoded row.
        number: of the row, for errors.

    Raises:
        DataError: the row is not encoded.
    """
    if isinstance(row, Mapping):
        length = row.get("length")
        if isinstance(length, int) and not isinstance(length, bool):
            return length
        if row.get("input_ids") is not None:
            return len(row["input_ids"])
        for pair in _PAIRS:
            if all(isinstance(row.get(side), Mapping) for side in pair):
                return sum(row_length(row[side], number) for side in pair)
    raise DataError(
        f"row {number} has neither 'length' nor 'input_ids', so its tokens cannot be counted; encode it first"
    )


def table_lengths(table: Table) -> list[int]:
    """Return `row_length` of every row, without reading more than one column where there is `length` or `input_ids`."""
    if "length" in table.names:
        found = [int(value) for batch in arrow_batches(table, "length") for value in _numbers(batch)]
    elif "input_ids" in table.names:
        found = token_counts(table, "input_ids")
    else:
        found = []
    if len(found) == len(table):
        return found
    return [row_length(row, number) for number, row in enumerate(table.rows())]


def token_counts(table: Table, name: str) -> list[int]:
    """Return the number of entries in each cell of a column of lists; 0 for an empty cell, -1 where it is no list."""
    import pyarrow

    counts: list[int] = []
    for column in arrow_batches(table, name):
        kind = column.type
        if not (
            pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
        ):
            return [-1] * len(table)
        counts += [value or 0 for value in pyarrow.compute.list_value_length(column).to_pylist()]
    return counts


def arrow_batches(table: Table, name: str, size: int = 10_000) -> Iterator[Any]:
    """Yield one column as Arrow arrays of at most `size` rows."""
    import pyarrow.compute  # noqa: F401  (list_value_length lives there)

    for batch in table.hf.select_columns([name]).with_format("arrow").iter(batch_size=size):
        yield batch.column(name).combine_chunks()


def _numbers(column: Any) -> Iterable[Any]:
    values = column.to_pylist()
    return values if all(isinstance(value, int) for value in values) else []
