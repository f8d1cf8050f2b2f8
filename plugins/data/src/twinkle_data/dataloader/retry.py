"""Rows that survive a failing neighbour: a row that raises is tried again, then another takes its place."""

from typing import Any

from twinkle.dataset.protocol import DatasetLike
from twinkle.errors import DataError
from twinkle.logging import get_logger


class RowFailed(DataError):
    """A row that could not be loaded, however often it was tried."""

    def __init__(self, index: int, attempts: int, cause: Exception) -> None:
        super().__init__(f"row {index} could not be loaded (tried {attempts} times): {type(cause).__name__}: {cause}")
        self.cause = cause


def load_row(dataset: DatasetLike, index: int, max_retries: int) -> Any:
    """Return a row, which is tried again as often as said if it raises (but not after a `DataError`).

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
    """A data set whose rows are loaded once if all goes well.

    A row that raises is tried `max_retries` times more (not so if the error is a `DataError`: the row itself is wrong,
    and stays so). Then rows from a permutation seeded by (seed, row number) are tried once each, and the log says which
    one took its place and why. After `max_retries` of these the error is raised.
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
        chosen = numpy.random.default_rng([self.seed, index]).choice(
            size, size=min(size, self.max_retries + 1), replace=False
        )
        return [int(other) for other in chosen if other != index][: self.max_retries]
