"""The data loader: global batches, each data rank its part, in an order that a checkpoint can continue."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from twinkle._arguments import refuse_unknown
from twinkle.dataloader.order import Order
from twinkle.dataloader.retry import RetryingRows
from twinkle.dataset.protocol import DatasetLike
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, MeshError
from twinkle.runtime import remote_class, remote_function

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh

_remote = remote_function(dispatch="all", execute="first", collect="first")


@remote_class(execute="first")
class DataLoader:
    """Yields batches as lists of rows, or as what the processor makes of them; each data rank gets its part of each.

    Every iteration is a new epoch, in an order that depends on nothing but the seed and the number of the epoch. The
    loader counts the rows that it handed out over all data ranks; `resume_from_checkpoint` with that count continues
    with exactly the rows that come next. (The count says nothing of iterations that were left early: after such a one,
    the epoch it belongs to cannot be told from it.)

    Attributes:
        dataset: the rows.
        batch_size: rows of a global batch, over all data ranks.
        min_batch_size: a last batch with fewer rows is dropped.
        device_mesh: the mesh whose data ranks share a batch, or None for one.
    """

    def __init__(
        self,
        dataset: DatasetLike | Callable[[], DatasetLike],
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: "DeviceMesh | None" = None,
        shuffle: bool = False,
        seed: int = 42,
        drop_last: bool = False,
        max_retries: int = 20,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the sizes; no row is loaded yet.

        Args:
            dataset: anything with a length and an index, or a function that returns such a data set.
            batch_size: rows of a global batch; the number of data ranks must divide it.
            min_batch_size: at least the number of data ranks, which is the default.
            device_mesh: by default the one given to `twinkle.initialize`.
            shuffle: permute the rows, anew in each epoch.
            seed: of the permutations, of worker processes, and of the rows that stand in for failing ones.
            drop_last: drop every last batch smaller than `batch_size`.
            max_retries: how often a row that raises is tried again, and how many other rows are tried in its place.
            collate_fn: makes a batch of this rank's rows; `set_processor` replaces it.
            **kwargs: of `torch.utils.data.DataLoader`: `num_workers`, `pin_memory`, `persistent_workers`, ...

        Raises:
            ArgumentError: an unknown keyword, or a value outside its range.
            MeshError: `batch_size` or `min_batch_size` does not fit the data ranks.
            DataError: there is no row, or not enough for one batch.
        """
        self._torch_options = _torch_options(kwargs)
        self.dataset: DatasetLike = _rows_of(dataset)
        self.device_mesh = device_mesh
        self.batch_size = _at_least("batch_size", batch_size, 1)
        ranks = self._data_ranks
        if batch_size % ranks:
            raise MeshError(
                f"batch_size {batch_size} does not divide by the {ranks} data ranks of {device_mesh}; give a "
                f"multiple of {ranks}, such as {(batch_size // ranks + 1) * ranks}"
            )
        if drop_last and min_batch_size not in (None, batch_size):
            raise ArgumentError(f"drop_last=True means min_batch_size={batch_size}, but {min_batch_size} was given")
        smallest = batch_size if drop_last else ranks if min_batch_size is None else min_batch_size
        self.min_batch_size = _at_least("min_batch_size", smallest, 1)
        if not ranks <= self.min_batch_size <= batch_size:
            raise MeshError(
                f"min_batch_size {self.min_batch_size} must lie between the number of data ranks, {ranks} (each needs "
                f"a row), and batch_size, {batch_size}"
            )
        self.shuffle = bool(shuffle)
        self.seed = _at_least("seed", seed, 0)
        self.max_retries = _at_least("max_retries", max_retries, 0)
        self._collate: Callable[[list[Any]], Any] = collate_fn or _as_list
        self._sampler = _Batches()
        self._loader: Any = None
        self._epoch, self._done, self._consumed = 0, 0, 0
        self._order()

    @_remote
    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, without a last batch that is dropped."""
        return self._order().batches_per_epoch

    @_remote
    def set_processor(self, processor_cls: Any, **kwargs: Any) -> None:
        """Let a processor make each batch, in the worker process that loaded its rows.

        Args:
            processor_cls: in any form of component argument, or any callable that takes a list of rows.
            **kwargs: of its constructor; `device_mesh` is that of the loader unless given.

        Raises:
            ComponentTypeError: it is not a processor.
            ArgumentError: its constructor does not take a keyword, or it is no class.
        """
        self._collate = _processor(processor_cls, kwargs, self.device_mesh)
        self._loader = None

    @_remote
    def __iter__(self) -> Iterator[Any]:
        """Yield this data rank's part of each global batch of the next epoch (after a resume, of the rest of one).

        Raises:
            DataError: a row cannot be loaded, nor any of those tried in its place.
        """
        epoch, done = self._epoch, self._done
        self._epoch, self._done = epoch + 1, 0
        batches = self._order().batches(epoch, done)
        self._sampler.batches = [self._part(batch) for batch in batches]
        loader = self._torch_loader()
        if "generator" not in self._torch_options:
            loader.generator.manual_seed(self.seed + epoch)
        for number, rows in enumerate(loader):
            self._consumed += len(batches[number])
            yield rows

    @_remote
    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Continue behind the first `consumed_train_samples` rows (over all data ranks and epochs)."""
        consumed = _at_least("consumed_train_samples", consumed_train_samples, 0)
        self._epoch, self._done = self._order().position(consumed)
        self._consumed = consumed

    @_remote
    def resume_from_checkpoint(self, consumed_train_samples: int, **kwargs: Any) -> None:
        """Continue where `get_state` was taken: the same rows follow, in this epoch and in those after it.

        Args:
            consumed_train_samples: from `get_state`, of a loader with the same data set, batch sizes and seed.
            **kwargs: none; an unknown name is an error.
        """
        refuse_unknown(DataLoader.resume_from_checkpoint, kwargs, what="resume_from_checkpoint")
        self.skip_consumed_samples(consumed_train_samples)

    @_remote
    def get_state(self) -> dict[str, int]:
        """Return `{"consumed_train_samples": n}`: how many rows were handed out so far, over all data ranks."""
        return {"consumed_train_samples": self._consumed}

    @property
    def _data_ranks(self) -> int:
        return 1 if self.device_mesh is None else int(self.device_mesh.data_world_size)

    def _part(self, batch: list[int]) -> list[int]:
        return batch if self.device_mesh is None else batch[self.device_mesh.get_slice(len(batch))]

    def _order(self) -> Order:
        """Return the order over the rows that the data set has now."""
        size = len(self.dataset)
        if size == 0:
            raise DataError("the data set is empty: there is nothing to make batches of")
        order = Order(size, self.batch_size, self.min_batch_size, self.shuffle, self.seed)
        if order.batches_per_epoch == 0:
            raise DataError(
                f"{size} rows do not make one batch of batch_size {self.batch_size} (a smaller last batch needs "
                f"{self.min_batch_size} rows); give a smaller batch_size or min_batch_size, or leave drop_last out"
            )
        return order

    def _torch_loader(self) -> Any:
        if self._loader is not None and self._loader.persistent_workers:
            return self._loader
        import torch

        options = {"generator": torch.Generator(), **self._torch_options}
        rows = RetryingRows(self.dataset, self.max_retries, self.seed)
        self._loader = torch.utils.data.DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            collate_fn=self._collate,
            **options,
        )
        return self._loader


class _Batches:
    """The row numbers of the batches to come, for torch's loader, which asks anew in each epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _as_list(rows: list[Any]) -> list[Any]:
    return rows


def _rows_of(dataset: Any) -> DatasetLike:
    if not isinstance(dataset, DatasetLike) and callable(dataset):
        dataset = dataset()
    if not isinstance(dataset, DatasetLike):
        raise ComponentTypeError(
            f"dataset is a {type(dataset).__name__}; a data loader needs rows by number: __getitem__ and __len__"
        )
    return dataset


def _at_least(name: str, value: Any, lowest: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < lowest:
        raise ArgumentError(f"{name} is {value!r}; give a whole number of at least {lowest}")
    return int(value.__index__())


def _torch_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if not kwargs:
        return {}
    import torch

    for name in ("sampler", "batch_sampler"):
        if name in kwargs:
            raise ArgumentError(
                f"DataLoader takes no {name!r}: the order is a function of seed and epoch, so that it can be resumed; "
                "use shuffle= and seed=, or order the rows in the data set"
            )
    own = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "kwargs"}
    known = own | set(inspect.signature(torch.utils.data.DataLoader).parameters) - {"sampler", "batch_sampler"}
    for name in kwargs:
        if name not in known:
            from twinkle_registry import nearest

            close = nearest(name, known, 1)
            hint = f", nearest: {close[0]!r}" if close else ""
            raise ArgumentError(f"DataLoader has no argument {name!r}{hint}; it takes {', '.join(sorted(known))}")
    return dict(kwargs)


def _processor(x: Any, kwargs: Mapping[str, Any], mesh: Any) -> Callable[[list[Any]], Any]:
    if not isinstance(x, str | type):
        if not callable(x):
            raise ComponentTypeError(f"processor_cls is a {type(x).__name__}; give a name, a class or a callable")
        if kwargs:
            raise ArgumentError(f"processor_cls is not a class, so {', '.join(map(repr, kwargs))} would be ignored")
        return x  # type: ignore[no-any-return]
    from twinkle._registry import registry

    found = registry().resolve(x, "processor")
    arguments = dict(kwargs)
    if mesh is not None and isinstance(found, type) and "device_mesh" in inspect.signature(found).parameters:
        arguments.setdefault("device_mesh", mesh)
    built: Callable[[list[Any]], Any] = registry().build(x, "processor", **arguments)
    return built
