"""The class `DataLoader`: checked arguments, batches in an order that a seed determines, and resuming."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from twinkle._arguments import refuse_unknown
from twinkle.dataset.protocol import DatasetLike, NotSized, StreamLike
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, MeshError, Unsupported
from twinkle.logging import get_logger
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataloader.batches import Batches, Collate, Order, RetryingRows, SampledRows, as_list, deal
from twinkle_data.dataloader.stream import Cutter, PlainStream, shuffled, skip

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh


_OURS = {
    "batch_sampler": "batch_size and min_batch_size determine the batches, so that they can be resumed; use sampler= "
    "for the order of the rows",
}


def rows_of(dataset: Any) -> DatasetLike | StreamLike:
    """Return `dataset`, or its result if it is a function.

    Raises:
        ComponentTypeError: it supports neither indexing nor iteration, or can be iterated only once.
    """
    if not isinstance(dataset, DatasetLike | StreamLike | Iterable) and callable(dataset):
        dataset = dataset()
    if isinstance(dataset, StreamLike):
        return dataset
    if isinstance(dataset, DatasetLike) and not _is_torch_stream(dataset):
        return dataset
    if isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        once = ", which can be read only once" if isinstance(dataset, Iterator) else ""
        raise ComponentTypeError(
            f"dataset is a {type(dataset).__name__}{once}; a data loader needs rows by number: __getitem__ and "
            "__len__, or a stream that can be read again: IterableDataset(DatasetMeta(data=function))"
        )
    if type(dataset).__module__.split(".")[0] == "datasets":
        from twinkle.dataset.meta import DatasetMeta
        from twinkle_data.dataset.iterable import IterableDataset

        return IterableDataset(DatasetMeta("stream", data=dataset))
    return PlainStream(dataset)


def torch_options(kwargs: Mapping[str, Any], own_options: Iterable[str], stream: Any) -> dict[str, Any]:
    """Return the keyword arguments of torch's loader.

    Args:
        kwargs: keywords that are not parameters of this loader.
        own_options: the parameters of the loader.
        stream: the stream to read, or None for indexed rows.

    Raises:
        ArgumentError: an unknown keyword, or one that would change the order of rows.
        Unsupported: a keyword that streams do not support.
    """
    if not kwargs:
        return {}
    import torch

    for name, why in _OURS.items():
        if name in kwargs:
            raise ArgumentError(f"DataLoader takes no {name!r}: {why}")
    if not kwargs.get("in_order", True):
        raise ArgumentError("DataLoader takes no in_order=False: batches in another order cannot be resumed")
    supported = {*own_options, *inspect.signature(torch.utils.data.DataLoader).parameters} - set(_OURS)
    for name in kwargs:
        if name not in supported:
            from twinkle_registry import nearest

            close = nearest(name, supported, 1)
            hint = f", nearest: {close[0]!r}" if close else ""
            raise ArgumentError(f"DataLoader has no argument {name!r}{hint}; it takes {', '.join(sorted(supported))}")
    if stream is not None:
        _check_stream(kwargs, stream)
    return dict(kwargs)


def processor_of(x: Any, kwargs: Mapping[str, Any], mesh: Any) -> Callable[[list[Any]], Any]:
    """Resolve `x` to a processor, and instantiate it with `kwargs` if it is a class.

    Raises:
        ComponentTypeError: it is not a processor.
        ArgumentError: its constructor does not take a keyword, or it is not a class.
    """
    if not isinstance(x, str | type):
        if not callable(x):
            raise ComponentTypeError(f"processor_cls is a {type(x).__name__}; give a name, a class or a callable")
        if kwargs:
            raise ArgumentError(f"processor_cls is not a class, so {', '.join(map(repr, kwargs))} would be ignored")
        return x  # type: ignore[no-any-return]
    from twinkle._registry import registry

    processor = registry().resolve(x, "processor")
    arguments = dict(kwargs)
    if mesh is not None and isinstance(processor, type) and "device_mesh" in inspect.signature(processor).parameters:
        arguments.setdefault("device_mesh", mesh)
    built: Callable[[list[Any]], Any] = registry().build(x, "processor", **arguments)
    return built


def at_least(name: str, value: Any, lowest: int) -> int:
    """Return an integer >= `lowest`, or raise `ArgumentError`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < lowest:
        raise ArgumentError(f"{name} is {value!r}; give a whole number of at least {lowest}")
    return int(value.__index__())


def _is_torch_stream(dataset: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dataset, torch.utils.data.IterableDataset)


def _check_stream(kwargs: Mapping[str, Any], stream: Any) -> None:
    if kwargs.get("pin_memory"):
        raise Unsupported(
            "a stream's batches are made in this process, where pin_memory=True has no effect; leave it out"
        )
    if kwargs.get("num_workers", 0) and getattr(stream, "packing_num_proc", 1) > 1:
        raise ArgumentError(
            f"packing_num_proc={stream.packing_num_proc} starts processes, and so does "
            f"num_workers={kwargs['num_workers']}; give one of the two"
        )
    if isinstance(stream, PlainStream) and kwargs.get("num_workers", 0) > 1:
        raise Unsupported(
            f"num_workers={kwargs['num_workers']}: a {type(stream.rows).__name__} may divide its rows among workers by "
            "itself; use num_workers=1, or IterableDataset(DatasetMeta(data=...)) over rows that do not"
        )


_remote = remote_function(dispatch="all", execute="first", collect="first")


@remote_class(execute="first")
class DataLoader:
    """Yields batches as lists of rows, or collated by a processor; each data rank gets its part of every batch.

    Every iteration is a new epoch, in an order that depends only on the seed and the number of the epoch. The loader
    counts the rows that it returned over all data ranks; `resume_from_checkpoint` with that count continues with
    exactly the next rows. (This requires that no iteration was abandoned early: the count does not determine the epoch
    then.)

    Over a stream every data rank reads all rows and keeps its part of each global batch; resuming reads the
    consumed rows again. A stream has no length, so `len(loader)` is an error.

    Attributes:
        dataset: the rows, or a stream of them.
        batch_size: rows of a global batch, over all data ranks.
        min_batch_size: a last batch with fewer rows is dropped, with a message in the log.
        device_mesh: the mesh whose data ranks share a batch, or None for one.
    """

    def __init__(
        self,
        dataset: DatasetLike | StreamLike | Iterable[Any] | Callable[[], Any],
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: "DeviceMesh | None" = None,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        seed: int = 42,
        drop_last: bool = False,
        balance: Literal["rows", "tokens"] = "rows",
        shuffle_buffer: int | None = None,
        max_retries: int = 20,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the sizes, without loading rows.

        Args:
            dataset: anything with a length and an index; a stream (`IterableDataset`, one of `datasets` or of torch, or
                any object that can be iterated repeatedly); or a function that returns one of these.
            batch_size: rows of a global batch; the number of data ranks must divide it.
            min_batch_size: at least the number of data ranks, which is the default.
            device_mesh: by default the mesh of `twinkle.initialize`.
            shuffle: permute the rows, differently in each epoch; streams use a shuffle buffer.
            sampler: yields the row numbers of an epoch each time it is iterated, such as a `torch.utils.data.Sampler`
                or a list. It must yield the same numbers on every data rank; the loader divides the batches. To
                resume, it must yield the same numbers for the same epoch: by `set_epoch`, or with a seeded generator.
            seed: seed of the permutations, of worker processes, and of the rows that replace failing ones.
            drop_last: drop every last batch smaller than `batch_size`.
            balance: how a global batch is divided among data ranks: `rows`, into consecutive parts of as many rows
                (but for one); or `tokens`, so that the longest part has as few tokens as the largest differencing
                method finds. Parts then have different numbers of rows, at least one.
            shuffle_buffer: size of the shuffle buffer of a stream, in rows; by default 1000.
            max_retries: number of retries for a row that raises, and number of replacement rows to try. A stream cannot
                go back: its errors are raised immediately.
            collate_fn: collates this rank's rows; `set_processor` replaces it.
            **kwargs: arguments of `torch.utils.data.DataLoader`: `num_workers`, `pin_memory`, `persistent_workers`, ...

        Raises:
            ArgumentError: an unknown keyword, or a value outside its range.
            MeshError: `batch_size` or `min_batch_size` does not fit the data ranks.
            DataError: there are not enough rows for one batch; or `balance="tokens"` and rows are not encoded.
            Unsupported: a keyword or a sampler with a stream, or `balance="tokens"` with a `LazyDataset`.
        """
        self.dataset: Any = rows_of(dataset)
        stream = self.dataset if isinstance(self.dataset, StreamLike) else None
        own_options = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "kwargs"}
        self._torch_options = torch_options(kwargs, own_options, stream)
        self.device_mesh = device_mesh
        self._set_sizes(batch_size, min_batch_size, drop_last)
        self.shuffle = bool(shuffle)
        self.seed = at_least("seed", seed, 0)
        self.shuffle_buffer = _buffer(shuffle_buffer, self.shuffle, stream)
        if balance not in ("rows", "tokens"):
            raise ArgumentError(f"balance is {balance!r}; use 'rows' or 'tokens'")
        self.balance = balance
        self.sampler = sampler
        self._sampled = self._checked_sampler(sampler, stream)
        self.max_retries = at_least("max_retries", max_retries, 0)
        self._collate: Callable[[list[Any]], Any] = collate_fn or as_list
        self._sampler = Batches()
        self._loader: Any = None
        self._lengths: list[int] | None = None
        self._told: int | None = None
        self._epoch, self._done, self._consumed = 0, 0, 0
        if stream is None:
            self._order()
            self._row_lengths()

    @_remote
    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, without a last batch that is dropped.

        Raises:
            Unsupported: the rows are a stream of unknown length.
        """
        if isinstance(self.dataset, StreamLike):
            raise NotSized("this loader reads a stream, which has no length; iterate over it, and stop when you want")
        return self._order().batches_per_epoch

    @_remote
    def set_processor(self, processor_cls: Any, **kwargs: Any) -> None:
        """Set the processor that collates each batch, in the worker process that loaded it (streams: in this process).

        Args:
            processor_cls: in any form of component argument, or any callable that takes a list of rows.
            **kwargs: arguments of its constructor; `device_mesh` is by default that of the loader.

        Raises:
            ComponentTypeError: it is not a processor.
            ArgumentError: its constructor does not take a keyword, or it is not a class.
        """
        self._collate = processor_of(processor_cls, kwargs, self.device_mesh)
        self._loader = None

    @_remote
    def __iter__(self) -> Iterator[Any]:
        """Yield this data rank's part of each global batch of the next epoch (after resuming: of the rest of one).

        Raises:
            DataError: a row and its replacements cannot be loaded; or a stream is too short for a batch.
        """
        if isinstance(self.dataset, StreamLike):
            yield from self._stream_epoch(self.dataset)
            return
        epoch, done = self._epoch, self._done
        self._epoch, self._done = epoch + 1, 0
        order = self._order()
        self._tell(order.size - order.rows_per_epoch)
        batches = order.batches(epoch, done)
        self._sampler.batches = [self._part(batch, self._lengths_of(batch)) for batch in batches]
        loader = self._torch_loader()
        if "generator" not in self._torch_options:
            loader.generator.manual_seed(self.seed + epoch)
        try:
            for number, rows in enumerate(loader):
                self._consumed += len(batches[number])
                yield rows
        except Exception as error:  # whatever a data set or a processor raises
            if not self._torch_options.get("num_workers"):
                raise
            # The message has the traceback of the worker. That of torch here would keep its iterator alive until the
            # garbage collector finds it, which then waits 5 seconds for each worker process.
            raise error.with_traceback(None) from error.__cause__

    @_remote
    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Continue after the first `consumed_train_samples` rows (over all data ranks and epochs)."""
        consumed = at_least("consumed_train_samples", consumed_train_samples, 0)
        stream = isinstance(self.dataset, StreamLike)
        self._epoch, self._done = (0, consumed) if stream else self._order().position(consumed)
        self._consumed = consumed

    @_remote
    def resume_from_checkpoint(self, consumed_train_samples: int, **kwargs: Any) -> None:
        """Continue from `get_state`: the same rows follow, in this epoch and in later ones.

        Args:
            consumed_train_samples: from `get_state` of a loader with the same data set, batch sizes and seed.
            **kwargs: none; an unknown name is an error.
        """
        refuse_unknown(DataLoader.resume_from_checkpoint, kwargs, what="resume_from_checkpoint")
        self.skip_consumed_samples(consumed_train_samples)

    @_remote
    def get_state(self) -> dict[str, int]:
        """Return `{"consumed_train_samples": n}`: number of rows returned so far, over all data ranks."""
        return {"consumed_train_samples": self._consumed}

    # Sizes

    def _set_sizes(self, batch_size: Any, min_batch_size: Any, drop_last: bool) -> None:
        self.batch_size = at_least("batch_size", batch_size, 1)
        ranks = self._data_ranks
        if batch_size % ranks:
            raise MeshError(
                f"batch_size {batch_size} does not divide by the {ranks} data ranks of {self.device_mesh}; give a "
                f"multiple of {ranks}, such as {(batch_size // ranks + 1) * ranks}"
            )
        if drop_last and min_batch_size not in (None, batch_size):
            raise ArgumentError(f"drop_last=True means min_batch_size={batch_size}, but {min_batch_size} was given")
        smallest = batch_size if drop_last else ranks if min_batch_size is None else min_batch_size
        self.min_batch_size = at_least("min_batch_size", smallest, 1)
        if not ranks <= self.min_batch_size <= batch_size:
            raise MeshError(
                f"min_batch_size {self.min_batch_size} must lie between the number of data ranks, {ranks} (each needs "
                f"a row), and batch_size, {batch_size}"
            )

    def _checked_sampler(self, sampler: Any, stream: Any) -> SampledRows | None:
        if sampler is None:
            return None
        if stream is not None:
            raise Unsupported("sampler= chooses rows by number, and a stream has none; use shuffle=True, or Dataset")
        if self.shuffle:
            raise ArgumentError("give sampler= or shuffle=True, not both: each determines the order of the rows")
        if isinstance(sampler, Iterator) or not isinstance(sampler, Iterable):
            raise ArgumentError(
                f"sampler must be an object that can be iterated once for each epoch, got {type(sampler).__name__}"
            )
        if (ranks := getattr(sampler, "num_replicas", 1)) != 1:
            raise ArgumentError(
                f"sampler divides the rows among {ranks} ranks, and the loader divides each batch; give a sampler of "
                "all rows, and device_mesh="
            )
        return SampledRows(sampler, len(self.dataset))

    @property
    def _data_ranks(self) -> int:
        return 1 if self.device_mesh is None else int(self.device_mesh.data_world_size)

    def _part(self, batch: list[Any], lengths: list[int] | None) -> list[Any]:
        """Return this rank's part of the rows of a global batch, or of their indices."""
        if self.device_mesh is None:
            return batch
        if lengths is None:
            return batch[self.device_mesh.get_slice(len(batch))]
        return [batch[place] for place in deal(lengths, self._data_ranks)[self.device_mesh.data_rank]]

    def _tell(self, left: int) -> None:
        """Log once how many rows an epoch drops."""
        if left and left != self._told:
            get_logger(__name__).info(
                "the last %d rows of an epoch are dropped: a batch needs %d", left, self.min_batch_size
            )
            self._told = left

    # Rows by number

    def _order(self) -> Order:
        """Return the order for the current rows of the data set."""
        size = len(self.dataset)
        if size == 0:
            raise DataError("the data set is empty: there is nothing to make batches of")
        if self._sampled is not None:
            size = len(self._sampled)
        order = Order(size, self.batch_size, self.min_batch_size, self.shuffle, self.seed, self._sampled)
        if order.batches_per_epoch == 0:
            raise DataError(
                f"{size} rows do not make one batch of batch_size {self.batch_size} (a smaller last batch needs "
                f"{self.min_batch_size} rows); give a smaller batch_size or min_batch_size, or leave drop_last out"
            )
        return order

    def _row_lengths(self) -> list[int] | None:
        """Return the numbers of tokens of all rows, if the division among ranks depends on them."""
        if self.balance == "rows" or self._data_ranks == 1:
            return None
        if self._lengths is None or len(self._lengths) != len(self.dataset):
            dataset_lengths: Callable[[], list[int]] | None = getattr(self.dataset, "row_lengths", None)
            self._lengths = _all_lengths(self.dataset) if dataset_lengths is None else dataset_lengths()
        return self._lengths

    def _lengths_of(self, batch: list[int]) -> list[int] | None:
        lengths = self._row_lengths()
        return None if lengths is None else [lengths[row] for row in batch]

    def _torch_loader(self) -> Any:
        if self._loader is not None and self._loader.persistent_workers:
            return self._loader
        import torch

        options = {"generator": torch.Generator(), **self._torch_options}
        rows = RetryingRows(self.dataset, self.max_retries, self.seed)
        self._loader = torch.utils.data.DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            collate_fn=Collate(self._collate),
            **options,
        )
        return self._loader

    # Streams

    def _stream_epoch(self, stream: StreamLike) -> Iterator[Any]:
        epoch, done = self._epoch, self._done
        while True:
            self._epoch, self._done = epoch + 1, 0
            cutter, batches_made = Cutter(self.batch_size, self.min_batch_size), 0
            rows = self._stream_rows(stream, epoch)
            read = skip(rows, done)
            if read < done:  # the epoch ended within the consumed rows, so its length is known now
                self._check_made(cutter.rows_per_epoch(read), read)
                epochs, done = divmod(done, cutter.rows_per_epoch(read))
                epoch += epochs
                continue
            for batch in cutter.batches(rows):
                batches_made += 1
                self._consumed += len(batch)
                yield Collate(self._collate)(self._part(batch, self._stream_lengths(batch)))
            self._tell(cutter.left)
            if batches_made or not done:
                self._check_made(batches_made, read + cutter.left)
                return
            epoch, done = epoch + 1, 0

    def _stream_rows(self, stream: StreamLike, epoch: int) -> Iterator[Any]:
        import torch

        from twinkle_data.dataloader.torch_stream import Chunks

        if self._loader is None or not self._loader.persistent_workers:
            options = {"generator": torch.Generator(), **self._torch_options}
            self._loader = torch.utils.data.DataLoader(Chunks(stream), batch_size=None, collate_fn=as_list, **options)
        if "generator" not in self._torch_options:
            self._loader.generator.manual_seed(self.seed + epoch)
        rows = stream.in_order(self._loader)
        return shuffled(rows, self.shuffle_buffer, self.seed, epoch) if self.shuffle else rows

    def _stream_lengths(self, batch: list[Any]) -> list[int] | None:
        if self.balance == "rows" or self._data_ranks == 1:
            return None
        return _all_lengths(batch)

    def _check_made(self, batches: int, rows: int) -> None:
        if not batches:
            raise DataError(
                f"the stream gave {rows} rows, which do not make one batch of batch_size {self.batch_size} (a smaller "
                f"last batch needs {self.min_batch_size} rows); give more rows, or a smaller batch_size"
            )


def _all_lengths(rows: Any) -> list[int]:
    from twinkle_data.dataset.encoding import row_length

    return [row_length(rows[number], number) for number in range(len(rows))]


def _buffer(size: int | None, shuffle: bool, stream: Any) -> int:
    if size is None:
        return 1000
    if stream is None or not shuffle:
        raise ArgumentError(
            "shuffle_buffer goes with shuffle=True over a stream; rows by number are permuted as a whole"
        )
    return at_least("shuffle_buffer", size, 1)
