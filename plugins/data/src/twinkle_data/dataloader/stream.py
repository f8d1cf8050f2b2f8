"""Streams in a data loader: rows in order from any number of workers, shuffle buffer, and global batches."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


class PlainStream:
    """Adapts a repeatable iterable to a stream; each worker reads all of it and keeps its chunks."""

    def __init__(self, rows: Iterable[Any], chunk_rows: int = 64) -> None:
        self.rows, self.chunk_rows = rows, chunk_rows

    def chunks(self, worker: int = 0, workers: int = 1) -> Iterator[list[Any]]:
        """Yield every `workers`-th chunk."""
        rows = iter(self.rows)
        for number in itertools.count():
            chunk = list(itertools.islice(rows, self.chunk_rows))
            if not chunk:
                return
            if number % workers == worker:
                yield chunk

    def in_order(self, chunks: Iterable[list[Any]]) -> Iterator[Any]:
        """Yield the rows."""
        return itertools.chain.from_iterable(chunks)


def shuffled(rows: Iterator[Any], buffer_size: int, seed: int, epoch: int) -> Iterator[Any]:
    """Yield the rows in an order drawn from a buffer: a function of seed and epoch only.

    The buffer is filled; then each further row replaces a random one, which is returned. A row can be at most
    `buffer_size` rows early, and any number of rows late.
    """
    import numpy

    drawing = numpy.random.default_rng([seed, epoch])
    buffer = list(itertools.islice(rows, buffer_size))
    for row in rows:
        place = int(drawing.integers(len(buffer)))
        out, buffer[place] = buffer[place], row
        yield out
    yield from (buffer[place] for place in drawing.permutation(len(buffer)))


@dataclass
class Cutter:
    """Splits rows into global batches, and counts the dropped rows.

    Attributes:
        batch_size: rows of a global batch.
        min_batch_size: a last batch with fewer rows is dropped.
        left: rows of a last batch that was dropped.
    """

    batch_size: int
    min_batch_size: int
    left: int = 0

    def batches(self, rows: Iterator[Any]) -> Iterator[list[Any]]:
        """Yield the batches."""
        while batch := list(itertools.islice(rows, self.batch_size)):
            if len(batch) < self.min_batch_size:
                self.left = len(batch)
                return
            yield batch

    def rows_per_epoch(self, size: int) -> int:
        """Return the number of rows of an epoch of `size` rows."""
        rest = size % self.batch_size
        return size if rest >= self.min_batch_size else size - rest


def skip(rows: Iterator[Any], count: int) -> int:
    """Read `count` rows, and return how many there were."""
    return sum(1 for _ in itertools.islice(rows, count))
