"""Encodes batches of rows by a template, and reports rows that fail, are too long or have no trained token."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError, EncodeError, TwinkleError
from twinkle.logging import get_logger
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
    """Return `row_length` of every row, reading only one column if there is `length` or `input_ids`."""
    if "length" in table.names:
        lengths = [int(value) for batch in arrow_batches(table, "length") for value in _numbers(batch)]
    elif "input_ids" in table.names:
        lengths = token_counts(table, "input_ids")
    else:
        lengths = []
    if len(lengths) == len(table):
        return lengths
    return [row_length(row, number) for number, row in enumerate(table.rows())]


def token_counts(table: Table, name: str) -> list[int]:
    """Return the number of entries in each cell of a column of lists; 0 for an empty cell, -1 if it is not a list."""
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


def warn_of_untrained(table: Table, template: Any) -> None:
    """Warn about rows whose labels are all -100; rows without lists of labels are not counted.

    Args:
        table: encoded rows.
        template: which made them; its `max_length` and `truncation_strategy` are the likely cause.
    """
    empty = untrained(table)
    if not empty:
        return
    length, how = getattr(template, "max_length", None), getattr(template, "truncation_strategy", None)
    cut = f"the trained tokens may be beyond max_length {length} (truncation_strategy: {how}), or " if length else ""
    get_logger(__name__).warning(
        "encode: no token is trained in %d of %d rows; %sthe conversations have no assistant turn",
        empty, len(table), cut,
    )  # fmt: skip


def untrained(table: Table) -> int:
    """Return the number of rows whose `labels` contain only -100."""
    import numpy
    import pyarrow

    if "labels" not in table.names:
        return 0
    empty = 0
    for column in arrow_batches(table, "labels"):
        kind = column.type
        if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
            return 0
        lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        values = pyarrow.compute.fill_null(column.flatten(), IGNORE_INDEX).to_numpy(zero_copy_only=False)
        before = numpy.concatenate([[0], numpy.cumsum(values != IGNORE_INDEX)])
        ends = numpy.cumsum(lengths)
        empty += int((before[ends] == before[ends - lengths]).sum())
    return empty


_NUMBERED = re.compile(r"row 0: ")


class EncodeCall:
    """`template.batch_encode` for `map`, without rows that have no tokens.

    With the template's `truncation_strategy="delete"` a row that cannot be encoded is left out too; otherwise it is an
    `EncodeError` with the number of the row in the data set. Errors of ours that are no `DataError` (the template's
    model is missing, or a package) are no row's problem and pass as they are.
    """

    def __init__(self, template: Any, options: Mapping[str, Any]) -> None:
        self.template, self.options = template, dict(options)

    def __call__(self, columns: dict[str, list[Any]], indices: Sequence[int | str]) -> dict[str, list[Any]]:
        """Return the encoded columns; `indices` are the numbers of the rows in the data set."""
        try:
            encoded = self.template.batch_encode(columns, **self.options)
        except Exception as error:
            if _of_template(error):
                raise
            encoded = self._row_by_row(columns, indices, error)
        return _with_tokens(encoded, type(self.template).__name__)

    def _row_by_row(
        self, columns: dict[str, list[Any]], indices: Sequence[int | str], cause: Exception
    ) -> dict[str, list[Any]]:
        from twinkle.preprocessor.base import Preprocessor

        forgiving = getattr(self.template, "truncation_strategy", None) == "delete"
        rows: list[dict[str, Any]] = []
        for place, index in enumerate(indices):
            single = {name: [values[place]] for name, values in columns.items()}
            try:
                rows += Preprocessor.map_col_to_row(self.template.batch_encode(single, **self.options))
            except Exception as error:
                if _of_template(error):
                    raise
                if forgiving and isinstance(error, EncodeError):
                    continue
                raise EncodeError(f"row {index}: {_reason(error)}") from error
        if not forgiving:  # each row can be encoded separately: the error is in encoding them together
            raise EncodeError(f"rows {indices[0]} to {indices[-1]}: {_reason(cause)}") from cause
        return Preprocessor.map_row_to_col(rows) or {"input_ids": []}


class CheckCall:
    """`template.batch_check` for `map`: returns the accepted rows unchanged."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def __call__(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns of the rows that can be encoded."""
        from twinkle.preprocessor.base import Preprocessor

        rows = Preprocessor.map_col_to_row(columns)
        passed = [row for row in self.rows(rows) if row is not None]
        return Preprocessor.map_row_to_col(passed, keys=None if passed else columns)

    def rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Return each row, or None if it cannot be encoded."""
        return list(self.template.batch_check(rows))


def _of_template(error: Exception) -> bool:
    return isinstance(error, TwinkleError) and not isinstance(error, DataError)


def _reason(error: Exception) -> str:
    text = _NUMBERED.sub("", str(error), count=1) if isinstance(error, EncodeError) else ""
    return text or f"{type(error).__name__}: {error}"


def _with_tokens(encoded: Any, template: str) -> dict[str, list[Any]]:
    if not isinstance(encoded, Mapping) or not ("input_ids" in encoded or _pair(encoded)):
        shown = ", ".join(map(str, encoded)) if isinstance(encoded, Mapping) else type(encoded).__name__
        raise EncodeError(f"{template}.batch_encode returned no column input_ids for columns; it returned {shown}")
    keep = [place for place, length in enumerate(_lengths(encoded)) if length]
    return {name: [values[place] for place in keep] for name, values in encoded.items()}


def _pair(encoded: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if all(side in encoded for side in pair)), None)


def _lengths(encoded: Mapping[str, Sequence[Any]]) -> list[int]:
    if "input_ids" in encoded:
        return [0 if ids is None else len(ids) for ids in encoded["input_ids"]]
    sides = [encoded[side] for side in _pair(encoded) or ()]
    return [min(len(side["input_ids"]) for side in row) for row in zip(*sides, strict=True)]
