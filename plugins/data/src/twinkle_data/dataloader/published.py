"""Pieces for loops that drive torch's own `DataLoader`; ours needs none of them."""

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
    """A batch sampler that gives this data rank its part of each global batch of another one."""

    def __init__(
        self,
        original_sampler: Iterable[Sequence[int]],
        device_mesh: "DeviceMesh | None",
        min_batch_size: int | None = None,
        skip_samples: int = 0,
    ) -> None:
        """Remember what to divide.

        Args:
            original_sampler: gives the row numbers of each global batch, the same on every rank.
            device_mesh: whose data ranks share a batch; None gives all of it.
            min_batch_size: smaller batches are dropped; by default the number of data ranks.
            skip_samples: rows at the beginning that are left out, as consumed before.

        Raises:
            ArgumentError: a number outside its range.
        """
        self.original_sampler, self.device_mesh = original_sampler, device_mesh
        ranks = 1 if device_mesh is None else device_mesh.data_world_size
        self.min_batch_size = ranks if min_batch_size is None else at_least("min_batch_size", min_batch_size, ranks)
        self.skip_samples = at_least("skip_samples", skip_samples, 0)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the row numbers of this rank's part of each batch."""
        skip = self.skip_samples
        for batch in self.original_sampler:
            left = list(batch)[skip:]
            skip = max(0, skip - len(batch))
            if left and len(left) >= self.min_batch_size:
                yield left if self.device_mesh is None else left[self.device_mesh.get_slice(len(left))]

    def __len__(self) -> int:
        """Return the number of batches that come, which a `torch.utils.data.BatchSampler` lets one know."""
        of = self.original_sampler
        sampler, size = getattr(of, "sampler", None), getattr(of, "batch_size", 0)
        if not size or not hasattr(sampler, "__len__"):
            raise NotSized(f"how many batches a {type(of).__name__} makes is not known before the end")
        whole, rest = divmod(len(sampler), size)  # type: ignore[arg-type]
        sizes = [size] * whole + [rest] * (not getattr(of, "drop_last", False))
        starts = range(0, size * len(sizes), size)
        left = [rows - max(0, self.skip_samples - start) for start, rows in zip(starts, sizes, strict=True)]
        return sum(rows >= max(1, self.min_batch_size) for rows in left)


class RetrySampler:
    """A sampler that leaves out rows which cannot be loaded, and gives others in their place.

    It loads every row to find out, so every row is loaded twice. `DataLoader` loads each once.
    """

    def __init__(
        self,
        original_sampler: Iterable[int],
        dataset: DatasetLike,
        max_retries: int = 20,
        skip_samples: int = 0,
        seed: int = 42,
    ) -> None:
        """Remember what to try.

        Args:
            original_sampler: row numbers.
            dataset: the rows.
            max_retries: how often a row that raises is tried again.
            skip_samples: how many row numbers at the beginning are left out, as consumed before.
            seed: of the permutation from which the numbers are filled up to the number of rows.

        Raises:
            ArgumentError: a number outside its range.
        """
        self.original_sampler, self.dataset = original_sampler, dataset
        self.max_retries = at_least("max_retries", max_retries, 0)
        self.skip_samples = at_least("skip_samples", skip_samples, 0)
        self.seed = at_least("seed", seed, 0)

    def __iter__(self) -> Iterator[int]:
        """Yield as many row numbers as there are rows, less those that are skipped.

        Raises:
            DataError: too few rows can be loaded.
        """
        given, size = 0, len(self.dataset)
        for row in self._loadable():
            given += 1
            if given > self.skip_samples:
                yield row
            if given == size:
                return
        raise DataError(f"only {given} of {size} rows could be loaded, and none in place of the others")

    def __len__(self) -> int:
        """Return how many row numbers come."""
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
    """Takes global batches from an iterable data set and hands out this data rank's part, as torch's fetchers do."""

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
        """Begin to read.

        Args:
            dataset: the rows.
            auto_collation: fetch batches; False fetches single rows.
            collate_fn: makes a batch of this rank's rows.
            drop_last: drop a last batch smaller than `batch_size`.
            batch_size: rows of a global batch.
            device_mesh: whose data ranks share a batch; None gives all of it.
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
            possibly_batched_index: what torch passes; an iterable has no indices, so it is not looked at.

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
