"""The contract of a preprocessor: columns in, columns out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Sequence[Any]]


class Preprocessor:
    """Turns a batch of raw columns into columns of trajectories (or those that the next step needs).

    Subclasses define `__call__(rows)`; `map_col_to_row` and `map_row_to_col` convert between columns and rows.
    """

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return new columns for the columns `rows`; both map a name to a list with one entry per row."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, rows)")

    @staticmethod
    def map_col_to_row(rows: Columns) -> list[dict[str, Any]]:
        """Return the columns as a list of rows."""
        names = list(rows)
        return [dict(zip(names, values, strict=True)) for values in zip(*rows.values(), strict=True)]

    @staticmethod
    def map_row_to_col(rows: Sequence[Mapping[str, Any]], keys: Iterable[str] | None = None) -> dict[str, list[Any]]:
        """Return rows as columns.

        Args:
            rows: the rows; a key that a row does not have is None.
            keys: the columns to return; by default all, in order of first appearance.
        """
        names = list(keys) if keys is not None else list(dict.fromkeys(key for row in rows for key in row))
        return {name: [row.get(name) for row in rows] for name in names}
