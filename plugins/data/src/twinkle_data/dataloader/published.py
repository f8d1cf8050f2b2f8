"""Samplers and fetchers for loops that use torch's `DataLoader`; our own loader does not need them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twinkle.dataset.protocol import DatasetLike, NotSized
from twinkle.errors import DataError
from twinkle.logging import get_logger
from twinkle_data.dataloader.base import at_least
from twinkle_data.dataloader.batches import load_row

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh


class DeviceMeshSampler:
    """A batch sampler that returns this data rank's part of each global batch of another sampler."""

    def __init__(
        self,
        original_sampler: Iterable[Sequence[int]],
        device_mesh: "DeviceMesh | None",
        min_batch_size: int | None = None,
        skip_samples: int = 0,
    ) -> None:
        """Store the arguments.

        Args:
            original_sampler: yields the row indices of each global batch, the same on every rank.
            device_mesh: mesh whose data ranks share a batch; None returns full batches.
            min_batch_size: smaller batches are dropped; by default the number of data ranks.
            skip_samples: number of rows to skip at the beginning, as already consumed.

        Raises:
            ArgumentError: a number outside its range.
        """
        self.original_sampler, self.device_mesh = original_sampler, device_mesh
        ranks = 1 if device_mesh is None else device_mesh.data_world_size
        self.min_batch_size = ranks if min_batch_size is None else at_least("min_batch_size", min_batch_size, ranks)
        self.skip_samples = at_least("skip_samples", skip_samples, 0)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the row indices of this rank's part of each batch."""
        skip = self.skip_samples
        for batch in self.original_sampler:
            remaining = list(batch)[skip:]
            skip = max(0, skip - len(batch))
            if remaining and len(remaining) >= self.min_batch_size:
                yield remaining if self.device_mesh is None else remaining[self.device_mesh.get_slice(len(remaining))]

    def __len__(self) -> int:
        """Return the number of batches; requires a `torch.utils.data.BatchSampler`."""
        of = self.original_sampler
        sampler, size = getattr(of, "sampler", None), getattr(of, "batch_size", 0)
        if not size or not hasattr(sampler, "__len__"):
            raise NotSized(f"how many batches a {type(of).__name__} makes is not known before the end")
        full, rest = divmod(len(sampler), size)  # type: ignore[arg-type]
        sizes = [size] * full + [rest] * (not getattr(of, "drop_last", False))
        starts = range(0, size * len(sizes), size)
        remaining = [rows - max(0, self.skip_samples - start) for start, rows in zip(starts, sizes, strict=True)]
        return sum(rows >= max(1, self.min_batch_size) for rows in remaining)


class RetrySampler:
    """A sampler that replaces rows that cannot be loaded.

    It loads every row to check it, so every row is loaded twice. `DataLoader` loads each row once.
    """

    def __init__(
        self,
        original_sampler: Iterable[int],
        dataset: DatasetLike,
        max_retries: int = 20,
        skip_samples: int = 0,
        seed: int = 42,
    ) -> None:
        """Store the arguments.

        Args:
            original_sampler: yields row indices.
            dataset: the rows.
            max_retries: number of retries for a row that raises.
            skip_samples: number of row indices to skip at the beginning, as already consumed.
            seed: seed of the permutation of replacement rows.

        Raises:
            ArgumentError: a number outside its range.
        """
        self.original_sampler, self.dataset = original_sampler, dataset
        self.max_retries = at_least("max_retries", max_retries, 0)
        self.skip_samples = at_least("skip_samples", skip_samples, 0)
        self.seed = at_least("seed", seed, 0)

    def __iter__(self) -> Iterator[int]:
        """Yield as many row indices as there are rows, without the skipped ones.

        Raises:
            DataError: too few rows can be loaded.
        """
        count, size = 0, len(self.dataset)
        for row in self._loadable():
            count += 1
            if count > self.skip_samples:
                yield row
            if count == size:
                return
        raise DataError(f"only {count} of {size} rows could be loaded, and none in place of the others")

    def __len__(self) -> int:
        """Return the number of row indices."""
        return max(0, len(self.dataset) - self.skip_samples)

    def _loadable(self) -> Iterator[int]:
        import numpy

        failed = 0
        for row in self.original_sampler:
            if self._loads(row):
                yield row
            else:
                failed += 1
        if failed:
            get_logger(__name__).warning("%d rows could not be loaded; others take their places", failed)
        spare = numpy.random.default_rng(self.seed).permutation(len(self.dataset))
        yield from (int(row) for row in spare if self._loads(int(row)))

    def _loads(self, row: int) -> bool:
        try:
            load_row(self.dataset, row, self.max_retries)
        except Exception as error:
            get_logger(__name__).warning("row %d could not be loaded: %s: %s", row, type(error).__name__, error)
            return False
        return True


class DeviceMeshIterableFetcher:
    """Reads global batches from an iterable data set and returns this data rank's part, like torch's fetchers."""

    def __init__(
        self,
        dataset: Iterable[Any],
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        batch_size: int,
        device_mesh: "DeviceMesh | None",
        min_batch_size: int | None = None,
        max_retries: int = 20,
    ) -> None:
        """Start reading.

        Args:
            dataset: the rows.
            auto_collation: fetch batches; False fetches single rows.
            collate_fn: collates this rank's rows.
            drop_last: drop a last batch smaller than `batch_size`.
            batch_size: rows of a global batch.
            device_mesh: mesh whose data ranks share a batch; None returns full batches.
            min_batch_size: a smaller last batch is dropped; by default the number of data ranks.
            max_retries: how often to continue reading after an error, if the iterator can (a generator cannot).

        Raises:
            ArgumentError: a number outside its range.
        """
        self.rows, self.auto_collation, self.collate_fn = iter(dataset), auto_collation, collate_fn
        self.device_mesh = device_mesh
        self.batch_size = at_least("batch_size", batch_size, 1)
        ranks = 1 if device_mesh is None else device_mesh.data_world_size
        smallest = ranks if min_batch_size is None else at_least("min_batch_size", min_batch_size, ranks)
        self.min_batch_size = self.batch_size if drop_last else smallest
        self.max_retries = at_least("max_retries", max_retries, 0)
        self.ended = False

    def fetch(self, possibly_batched_index: Any = None) -> Any:
        """Return this rank's part of the next global batch, collated, or the next row.

        Args:
            possibly_batched_index: argument of torch's fetchers; ignored, because an iterable has no indices.

        Raises:
            StopIteration: there is no further batch, or only one below `min_batch_size`.
        """
        if not self.auto_collation:
            return self.collate_fn(self._next())
        batch: list[Any] = []
        while len(batch) < self.batch_size and not self.ended:
            try:
                batch.append(self._next())
            except StopIteration:
                self.ended = True
        if len(batch) < self.min_batch_size or not batch:
            raise StopIteration
        part = batch if self.device_mesh is None else batch[self.device_mesh.get_slice(len(batch))]
        return self.collate_fn(part)

    def _next(self) -> Any:
        failure: Exception | None = None
        for _ in range(self.max_retries + 1):
            try:
                return next(self.rows)
            except StopIteration:
                break
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        raise StopIteration
