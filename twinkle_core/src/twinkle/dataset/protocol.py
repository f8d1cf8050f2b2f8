"""The contracts of data sets: rows by index, or a stream of rows that several workers can read."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from twinkle.errors import Unsupported


@runtime_checkable
class DatasetLike(Protocol):
    """Rows by index: any object with `__len__` and `__getitem__` is a data set, such as a list of dicts."""

    def __getitem__(self, idx: Any, /) -> Any:
        """Return row `idx`; raises IndexError for an index out of range."""

    def __len__(self) -> int:
        """Return the number of rows."""


@runtime_checkable
class StreamLike(Protocol):
    """Rows in sequence, without a length; each iteration yields the same rows."""

    def chunks(self, worker: int = 0, workers: int = 1) -> Iterator[list[Any]]:
        """Yield every `workers`-th chunk of the rows, starting with chunk `worker`; a chunk may be empty."""

    def in_order(self, chunks: Iterable[list[Any]]) -> Iterator[Any]:
        """Yield the rows of all chunks in order; called in a single process."""


class NotSized(Unsupported, TypeError):
    """A stream has no length and no index. It is also a TypeError, so that `list(stream)` works without a length."""
