"""The contracts of data sets: rows by number, or a stream of rows that several workers can read together."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from twinkle.errors import Unsupported


@runtime_checkable
class DatasetLike(Protocol):
    """Rows by number: anything with a length and an index is a data set (a list of dicts, too)."""

    def __getitem__(self, idx: Any, /) -> Any:
        """Return row `idx`; an index outside the set is an IndexError."""

    def __len__(self) -> int:
        """Return the number of rows."""


@runtime_checkable
class StreamLike(Protocol):
    """Rows one after the other, without a length; they are the same each time they are read."""

    def chunks(self, worker: int = 0, workers: int = 1) -> Iterator[list[Any]]:
        """Yield every `workers`-th chunk of the rows, from number `worker` on; a chunk may be empty."""

    def in_order(self, chunks: Iterable[list[Any]]) -> Iterator[Any]:
        """Yield what the chunks of all workers, taken in turn, amount to; called in one process."""


class NotSized(Unsupported, TypeError):
    """A stream has no length and no index (a TypeError too: `list(stream)` asks for a length and goes on without)."""
