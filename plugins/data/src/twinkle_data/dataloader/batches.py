"""Composition of batches: order of rows, balance between ranks, and replacement of rows that fail to load."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.dataset.protocol import DatasetLike
from twinkle.errors import DataError
from twinkle.logging import get_logger


@dataclass(frozen=True)
class Order:
    """The order of all epochs over `size` rows.

    Attributes:
        size: rows in the data set.
        batch_size: rows of a global batch.
        min_batch_size: a last batch with fewer rows is dropped.
        shuffle: permute the rows, differently in each epoch.
        seed: seed of the permutations.
        sampled: returns the `size` row indices of an epoch, instead of all rows.
    """

    size: int
    batch_size: int
    min_batch_size: int
    shuffle: bool = False
    seed: int = 42
    sampled: Callable[[int], Sequence[int]] | None = None

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows per epoch, without those of a last batch that is too small."""
        rest = self.size % self.batch_size
        return self.size if rest >= self.min_batch_size else self.size - rest

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch."""
        return -(-self.rows_per_epoch // self.batch_size)

    def position(self, consumed: int) -> tuple[int, int]:
        """Return the number of the epoch, and the rows of it that are consumed, after `consumed` rows in total."""
        epoch, done = divmod(consumed, self.rows_per_epoch)
        return (epoch, done) if self.rows_per_epoch - done >= self.min_batch_size else (epoch + 1, 0)

    def batches(self, epoch: int, done: int = 0) -> list[list[int]]:
        """Return the row indices of each global batch of an epoch after its first `done` rows."""
        rows = self._rows(epoch)[: self.rows_per_epoch]
        starts = range(done, len(rows), self.batch_size)
        batches = [list(map(int, rows[start : start + self.batch_size])) for start in starts]
        return [batch for batch in batches if len(batch) >= self.min_batch_size]

    def _rows(self, epoch: int) -> Sequence[int]:
        if self.sampled is not None:
            return self.sampled(epoch)
        if not self.shuffle:
            return range(self.size)
        import numpy

        rows: Sequence[int] = numpy.random.default_rng([self.seed, epoch]).permutation(self.size)  # type: ignore[assignment]
        return rows


class SampledRows:
    """The row indices that a sampler yields, epoch by epoch.

    A sampler with `set_epoch` gets the number of the epoch. Any other is read once for each epoch before, so that a
    sampler with a seed gives the same rows when a run resumes.
    """

    def __init__(self, sampler: Any, rows: int) -> None:
        self._sampler, self._count = sampler, rows
        self._epoch, self._read, self._indices = -1, 0, list[int]()

    def __len__(self) -> int:
        """Return the number of indices of an epoch."""
        return len(self._sampler) if hasattr(self._sampler, "__len__") else len(self(max(0, self._epoch)))

    def __call__(self, epoch: int) -> list[int]:
        """Return the indices of an epoch.

        Raises:
            DataError: an index is not that of a row, or the number of indices is not that of `len(sampler)`.
        """
        if epoch != self._epoch:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            else:
                for _ in range(self._read, epoch):
                    self._draw()
            self._indices, self._epoch = self._draw(), epoch
        return self._indices

    def _draw(self) -> list[int]:
        self._read += 1
        indices = [self._checked(index) for index in self._sampler]
        if hasattr(self._sampler, "__len__") and len(indices) != len(self._sampler):
            raise DataError(f"the sampler has {len(self._sampler)} rows by its len(), but yielded {len(indices)}")
        return indices

    def _checked(self, index: Any) -> int:
        if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= index.__index__() < self._count:
            raise DataError(f"the sampler yielded {index!r}; it must yield row numbers from 0 to {self._count - 1}")
        return int(index.__index__())


Pile = tuple[int, list[int]]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide rows among ranks by the largest differencing method (Karmarkar and Karp 1982).

    Initially every row is a partition with one pile per rank. The two partitions with the largest difference between
    their fullest and emptiest pile are merged, full piles with empty ones, until one partition remains.

    Args:
        lengths: tokens of each row, not negative.
        ranks: number of piles.

    Returns:
        For each rank the indices of its rows, ascending, at least one; ranks in the order of their first rows. The
        result depends on the lengths only, so every rank can compute it without communication.

    Raises:
        DataError: there are fewer rows than ranks.
    """
    if len(lengths) < ranks:
        raise DataError(f"{len(lengths)} rows cannot be dealt to {ranks} data ranks, each of which needs one")
    divisions: list[tuple[int, int, list[Pile]]] = []
    for place, length in enumerate(lengths):
        piles: list[Pile] = [(length, [place]), *((0, []) for _ in range(ranks - 1))]
        divisions.append((-length if ranks > 1 else 0, place, piles))
    heapq.heapify(divisions)
    for number in range(len(lengths), 2 * len(lengths) - 1):
        _, _, one = heapq.heappop(divisions)
        _, _, other = heapq.heappop(divisions)
        laid = [(a + b, [*rows, *more]) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        laid.sort(key=lambda pile: (-pile[0], pile[1]))
        heapq.heappush(divisions, (laid[-1][0] - laid[0][0], number, laid))
    return sorted(map(sorted, _without_empty([rows for _, rows in divisions[0][2]], lengths)))


def _without_empty(piles: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Move the shortest row of the fullest pile with several rows to each empty pile; no pile becomes fuller."""
    for pile in piles:
        if not pile:
            giver = max((p for p in piles if len(p) > 1), key=lambda p: sum(lengths[row] for row in p))
            shortest = min(giver, key=lambda row: lengths[row])
            giver.remove(shortest)
            pile.append(shortest)
    return piles


class RowFailed(DataError):
    """A row that failed to load in all attempts."""

    def __init__(self, index: int, attempts: int, cause: Exception) -> None:
        super().__init__(f"row {index} could not be loaded (tried {attempts} times): {type(cause).__name__}: {cause}")
        self.cause = cause


def load_row(dataset: DatasetLike, index: int, max_retries: int) -> Any:
    """Load a row, with retries if it raises (except for a `DataError`).

    Raises:
        RowFailed: it raised each time.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            return dataset[index]
        except Exception as error:
            if attempts > max_retries or isinstance(error, DataError):
                raise RowFailed(index, attempts, error) from error


class RetryingRows:
    """A data set that replaces rows which fail to load.

    A row that raises is retried `max_retries` times (except for a `DataError`, which is permanent). Then rows from a
    permutation seeded by (seed, row index) are tried once each, and the replacement is logged with the reason. After
    `max_retries` failed replacements the error is raised.
    """

    def __init__(self, dataset: DatasetLike, max_retries: int, seed: int) -> None:
        self.dataset, self.max_retries, self.seed = dataset, max_retries, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return load_row(self.dataset, index, self.max_retries)
        except RowFailed as failed:
            return self._replacement(index, failed)

    def _replacement(self, index: int, failed: RowFailed) -> Any:
        reason = str(failed)
        others = self._others(index)
        last = failed.cause
        for other in others:
            try:
                row = self.dataset[other]
            except Exception as error:
                last = error
                continue
            get_logger(__name__).warning("%s; row %d takes its place", reason, other)
            return row
        tried = f"; so did {len(others)} rows tried in its place, at last with {type(last).__name__}: {last}"
        raise DataError(reason + (tried if others else "")) from last

    def _others(self, index: int) -> list[int]:
        import numpy

        size = len(self.dataset)
        indices = numpy.random.default_rng([self.seed, index]).choice(
            size, size=min(size, self.max_retries + 1), replace=False
        )
        return [int(other) for other in indices if other != index][: self.max_retries]


class Batches:
    """The row indices of the remaining batches, for torch's loader, which iterates once per epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Collate:
    """Calls a processor with rows of the same keys: missing keys are None, as in a table."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch."""
        if all(isinstance(row, Mapping) for row in rows) and any(row.keys() != rows[0].keys() for row in rows):
            missing = dict.fromkeys(key for row in rows for key in row)
            rows = [{**missing, **row} for row in rows]
        return self.collate(rows)


def as_list(rows: list[Any]) -> list[Any]:
    """Return the rows unchanged; used as collate function without a processor."""
    return rows
