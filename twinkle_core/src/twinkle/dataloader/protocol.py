"""The contract of a data loader."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DataLoaderLike(Protocol):
    """Batches of rows for this data rank, in an order that can be resumed."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""

    def get_state(self) -> dict[str, int]:
        """Return the state for `resume_from_checkpoint`: `{"consumed_train_samples": rows over all data ranks}`."""

    def resume_from_checkpoint(self, consumed_train_samples: int, **kwargs: Any) -> None:
        """Continue after the rows that were consumed."""
