"""Which row comes when: a pure function of the number of rows, the batch sizes, the seed and the epoch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """The order of all epochs over `size` rows.

    Attributes:
        size: rows in the data set.
        batch_size: rows of a global batch.
        min_batch_size: a last batch with fewer rows is dropped.
        shuffle: permute the rows, anew in each epoch.
        seed: of the permutations.
    """

    size: int
    batch_size: int
    min_batch_size: int
    shuffle: bool = False
    seed: int = 42

    @property
    def rows_per_epoch(self) -> int:
        """Rows that an epoch hands out: all but those of a last batch that is too small."""
        rest = self.size % self.batch_size
        return self.size if rest >= self.min_batch_size else self.size - rest

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return -(-self.rows_per_epoch // self.batch_size)

    def position(self, consumed: int) -> tuple[int, int]:
        """Return the epoch, and the rows of it that are done, after `consumed` rows of whole epochs in sequence."""
        epoch, done = divmod(consumed, self.rows_per_epoch)
        return (epoch, done) if self.rows_per_epoch - done >= self.min_batch_size else (epoch + 1, 0)

    def batches(self, epoch: int, done: int = 0) -> list[list[int]]:
        """Return the row numbers of each global batch of an epoch that follows its first `done` rows."""
        rows = self._rows(epoch)[: self.rows_per_epoch]
        starts = range(done, len(rows), self.batch_size)
        batches = [list(map(int, rows[start : start + self.batch_size])) for start in starts]
        return [batch for batch in batches if len(batch) >= self.min_batch_size]

    def _rows(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.size)
        import numpy

        rows: Sequence[int] = numpy.random.default_rng([self.seed, epoch]).permutation(self.size)  # type: ignore[assignment]
        return rows
