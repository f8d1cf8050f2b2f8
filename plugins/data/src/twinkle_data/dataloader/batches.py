"""Between the order of rows and torch's loader: which rows make the next batches, and how rows become a batch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Batches:
    """The row numbers of the batches to come, for torch's loader, which asks anew in each epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Collate:
    """Calls a processor with rows of the same keys: a key that a row lacks is None there, as in a table."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch."""
        if all(isinstance(row, Mapping) for row in rows) and any(row.keys() != rows[0].keys() for row in rows):
            missing = dict.fromkeys(key for row in rows for key in row)
            rows = [{**missing, **row} for row in rows]
        return self.collate(rows)


def as_list(rows: list[Any]) -> list[Any]:
    """Return the rows: what collates where there is no processor."""
    return rows
