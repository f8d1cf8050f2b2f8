"""The contract of a preprocessor: columns in, columns out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Sequence[Any]]


class Preprocessor:
    """Turns a batch of raw columns into columns of trajectories (or of whatever the next step wants).

    Subclasses define `__call__(rows)`; `map_col_to_row` and `map_row_to_col` let one think in rows.
    """

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return new columns for the columns `rows`; both map a name to a list, one entry a row."""
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
            rows: the rows; a key that only some of them have is None for the others.
            keys: the columns wanted; by default all, in order of first appearance.
        """
        names = list(keys) if keys is not None else list(dict.fromkeys(key for row in rows for key in row))
        return {name: [row.get(name) for row in rows] for name in names}
