"""Encoded rows of which no token is trained: they cost a pass and teach nothing, so somebody should know."""

from typing import Any

from twinkle.data_format import IGNORE_INDEX
from twinkle.logging import get_logger
from twinkle_data.dataset.lengths import arrow_batches
from twinkle_data.dataset.table import Table


def warn_of_untrained(table: Table, template: Any) -> None:
    """Warn of rows whose labels are all -100, with their number; where there are no lists of labels, nobody knows.

    Args:
        table: encoded rows.
        template: which made them; its `max_length` and `truncation_strategy` are the likely cause.
    """
    empty = untrained(table)
    if not empty:
        return
    length, how = getattr(template, "max_length", None), getattr(template, "truncation_strategy", None)
    cut = (
        f"what would be trained may lie behind max_length {length} (truncation_strategy: {how}), or " if length else ""
    )
    get_logger(__name__).warning(
        "encode: no token is trained in %d of %d rows; %sthe conversations have no assistant turn",
        empty, len(table), cut,
    )  # fmt: skip


def untrained(table: Table) -> int:
    """Return the number of rows whose `labels` are a list of nothing but -100."""
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
