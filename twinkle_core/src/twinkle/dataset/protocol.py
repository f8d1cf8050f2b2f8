"""The contract of a data set with a length."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DatasetLike(Protocol):
    """Rows by number: anything with a length and an index is a data set (a list of dicts, too)."""

    def __getitem__(self, idx: Any, /) -> Any:
        """Return row `idx`; an index outside the set is an IndexError."""

    def __len__(self) -> int:
        """Return the number of rows."""
