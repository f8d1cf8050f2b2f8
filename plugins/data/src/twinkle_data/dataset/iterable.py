"""The streaming data set: rows from files, functions or hubs that are read one by one, never all in memory."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle._arguments import refuse_unknown
from twinkle.dataset.meta import DatasetMeta, all_readable, readable
from twinkle.dataset.protocol import NotSized
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, TrainingStateError
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataset.calls import template_for, template_from
from twinkle_data.dataset.mixing import Mix, Stopping, checked_mix
from twinkle_data.dataset.saving import Saving
from twinkle_data.dataset.sources import Source, mesh_of, open_stream
from twinkle_data.dataset.stages import (
    Chunk,
    FilterStage,
    ImageStage,
    Row,
    Stage,
    check_stage,
    encode_stage,
    filter_stage,
    map_stage,
    run_stages,
)

CHUNK_ROWS = 64

_remote = remote_function(dispatch="all", execute="first", collect="first")


@dataclass
class Part:
    """One added data set: its source, and the steps before data sets are mixed."""

    source: Source
    stages: list[Stage] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """Begin a pass, and yield the rows after all steps."""
        begin(self.stages)
        for chunk in cut(self.source(), CHUNK_ROWS):
            yield from run_stages(self.stages, chunk).rows


@remote_class(execute="first")
class IterableDataset:
    """Rows that are read, mapped, filtered and encoded during each iteration.

    Every method records what is to be done and returns at once. Rows pass through it in chunks of 64; a `DataLoader`
    with several workers gives each of them every n-th chunk, so the order of rows is the same for any number. The
    source must give the same rows each time it is read, else a resumed run sees others.

    Attributes:
        template: what `set_template` built, or None.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, **kwargs: Any) -> None:
        """Locate the source, without reading rows.

        Args:
            dataset_meta: where the rows are; None makes an empty set for `add_dataset`. `data` may be anything that can
                be iterated again and again, or a function that returns an iterator. `data_slice` must go forwards.
            **kwargs: for the hub or the reader of a local file, and `device_mesh`, as for `Dataset`.

        Raises:
            DataError: nothing is there, or it can be read only once.
            ArgumentError: the source does not take a keyword.
        """
        self.template: Any = None
        self.device_mesh = mesh_of(kwargs, type(self).__name__)
        self._parts: dict[str, Part] = {}
        self._mixed = False
        self._mix: Mix | None = None
        self._stages: list[Stage] = []
        self._saving = Saving()
        if dataset_meta is not None:
            self.add_dataset(dataset_meta, **kwargs)
        elif kwargs:
            what = type(self).__name__
            raise ArgumentError(f"{what}() without dataset_meta loads nothing, so it takes no {next(iter(kwargs))!r}")

    # Sources

    @_remote
    def add_dataset(self, dataset_meta: DatasetMeta, **kwargs: Any) -> None:
        """Add a further stream; errors are those of the constructor.

        Raises:
            TrainingStateError: the sets were mixed already.
        """
        if not isinstance(dataset_meta, DatasetMeta):
            raise ComponentTypeError(
                f"dataset_meta is a {type(dataset_meta).__name__}; give DatasetMeta('rows.jsonl') or one with data="
            )
        if self._mixed:
            raise TrainingStateError("the sets are mixed already; add all of them before mix_dataset()")
        self._refuse_change("add_dataset")
        name = dataset_meta.get_id()
        if name in self._parts:
            raise DataError(f"data set {readable(name)!r} is there already; to repeat rows give it a longer data_slice")
        self._parts[name] = Part(open_stream(dataset_meta, kwargs))

    @_remote
    def mix_dataset(
        self,
        interleave: bool = True,
        *,
        probabilities: Sequence[float] | None = None,
        seed: int = 42,
        stopping_strategy: Stopping | None = None,
    ) -> None:
        """Join all added streams; a row keeps the columns of its own set.

        The order is that of `Dataset.mix_dataset`. It is the same in each pass over the rows, so that a loader can
        resume. Streams that begin again are read from their source again.

        Args:
            interleave: as for `Dataset.mix_dataset`.
            probabilities: as for `Dataset.mix_dataset`.
            seed: as for `Dataset.mix_dataset`.
            stopping_strategy: as for `Dataset.mix_dataset`.

        Raises:
            ArgumentError: as for `Dataset.mix_dataset`.
            DataError: no set was added.
            TrainingStateError: the sets are mixed already.
        """
        if not self._parts:
            raise DataError("there is no data set to mix; call add_dataset first")
        if self._mixed:
            raise TrainingStateError("the sets are mixed already")
        self._refuse_change("mix_dataset")
        count = len(self._parts)
        self._mix = checked_mix(count, interleave, probabilities, seed, stopping_strategy, "first_exhausted")
        self._mixed = True

    # Rows

    def __len__(self) -> int:
        """Refuse: the number of rows is unknown before the end."""
        raise NotSized(f"{type(self).__name__} is a stream and has no length; iterate over it, or use Dataset")

    def __getitem__(self, idx: Any) -> Any:
        """Raise: a stream can only be read forwards."""
        raise NotSized(f"{type(self).__name__} is a stream and has no row {idx!r}; iterate over it, or use Dataset")

    @property
    def column_names(self) -> list[str]:
        """The names of the columns of the first row, which is read for this.

        Raises:
            DataError: there is no row.
        """
        rows = (row for chunk in self._raw_chunks() for row in run_stages(self._plan()[1], chunk).rows)
        first = next(rows, None)
        if first is None:
            raise DataError(f"the stream of {all_readable(self._parts, ' + ')} has no rows after {self._last_stage()}")
        return list(first)

    @_remote
    def __iter__(self) -> Iterator[Row]:
        """Yield every row.

        Raises:
            DataError: a source is malformed, a row cannot be used, or no row is left at all.
        """
        nothing = True
        for row in self.in_order(self.chunks()):
            nothing = False
            yield row
        if nothing:
            raise DataError(f"the stream of {all_readable(self._parts, ' + ')} has no rows after {self._last_stage()}")

    @_remote
    def chunks(self, worker: int = 0, workers: int = 1) -> Iterator[list[Row]]:
        """Yield every `workers`-th chunk of the rows, from number `worker` on, with all recorded steps done.

        The chunks of all workers, taken in turn, are the stream. Every worker reads the whole source, but does the
        steps (after mixing, where sets are mixed) for its own chunks only.
        """
        _, stages = self._plan()
        for number, chunk in enumerate(self._raw_chunks()):
            if number % workers == worker:
                yield run_stages(stages, chunk).rows

    @_remote
    def in_order(self, chunks: Iterable[list[Row]]) -> Iterator[Row]:
        """Yield the rows of all chunks, and apply the steps that need all rows in order (saving, packing)."""
        for number, row in enumerate(self._assembled(itertools.chain.from_iterable(chunks))):
            self._saving.record(number, row)
            yield row

    # Recorded steps

    @_remote
    def map(
        self,
        preprocess_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a preprocessor, from columns to columns, as for `Dataset.map`.

        Args:
            preprocess_func: as for `Dataset.map`.
            dataset_meta: which of several added sets to map; may be left out when there is one, or after mixing.
            init_args: as for `Dataset.map`.
            **kwargs: `batch_size` (the most rows it sees at a time; never more than a chunk), `remove_columns`,
                `fn_kwargs`.

        Raises:
            ArgumentError: an unknown keyword, or one that needs all rows at once (`num_proc`, `with_indices`).
        """
        self._record(dataset_meta, map_stage(preprocess_func, init_args, kwargs))

    @_remote
    def filter(
        self,
        filter_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a filter, called with one row.

        Args:
            filter_func: as for `Dataset.filter`.
            dataset_meta: as for `map`.
            init_args: as for `map`.
            **kwargs: `fn_kwargs`.

        Raises:
            ArgumentError: an unknown keyword.
        """
        self._record(dataset_meta, filter_stage(filter_func, init_args, kwargs))

    @_remote
    def cast_column(self, column: str, decode: bool = True) -> None:
        """Record the conversion of a column to images, as in `Dataset.cast_column`; rows without it are unchanged."""
        self._record(None, ImageStage(column, decode))

    @_remote
    def set_template(self, template_func: Any, **kwargs: Any) -> None:
        """Set the template for `encode` and `check`; arguments and errors are those of `Dataset.set_template`."""
        self.template = template_from(template_func, kwargs)

    @_remote
    def encode(self, add_generation_prompt: bool = False, **kwargs: Any) -> None:
        """Record encoding by the template; rows without tokens are dropped.

        Args:
            add_generation_prompt: end with the header of an assistant turn, for sampling.
            **kwargs: `batch_size`, as for `map`.

        Raises:
            TrainingStateError: there is no template.
        """
        self._record(None, encode_stage(template_for(self.template, "encode"), add_generation_prompt, kwargs))

    @_remote
    def check(self, **kwargs: Any) -> None:
        """Record a check by the template; rows that it cannot encode are dropped.

        Args:
            **kwargs: `batch_size`, as for `map`.

        Raises:
            TrainingStateError: there is no template.
        """
        self._record(None, check_stage(template_for(self.template, "check"), kwargs))

    # Saving

    @_remote
    def save_as(
        self,
        output_path: str | Path,
        format: str | None = None,
        batch_size: int = 1000,
        mode: str = "immediate",
        **kwargs: Any,
    ) -> None:
        """Write the rows to a file, as `Dataset.save_as` does.

        Args:
            output_path: the file.
            format: jsonl, json, csv or parquet; csv and parquet have the columns of the first row.
            batch_size: how many rows are written at a time.
            mode: `immediate` reads the stream to its end now; `training` writes each row when it is first handed out,
                and `flush_save` completes the file.
            **kwargs: none; an unknown name is an error.

        Raises:
            ArgumentError: an unknown format, mode or keyword.
            DataError: a row has a column for which csv or parquet has no place.
        """
        refuse_unknown(IterableDataset.save_as, kwargs, what="save_as")
        self._saving.save(output_path, format, batch_size, mode, None, self._every_row)

    @_remote
    def flush_save(self) -> None:
        """Complete the file of `save_as(mode="training")`, as `Dataset.flush_save` does."""
        self._saving.flush()

    # Inside

    def _assembled(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Return the rows in order, or packs of them."""
        return rows

    def _every_row(self) -> Iterator[Row]:
        return self._assembled(itertools.chain.from_iterable(self.chunks()))

    def _raw_chunks(self) -> Iterator[Chunk]:
        """Start a pass over the rows, and yield them in chunks before their final steps."""
        rows, _ = self._plan()
        begin(self._recorded())
        return cut(rows, CHUNK_ROWS)

    def _plan(self) -> tuple[Iterator[Row], list[Stage]]:
        """Return the rows before chunking, and the steps for each chunk."""
        parts = list(self._parts.values())
        if not parts:
            raise DataError(f"the data set is empty: give {type(self).__name__} a DatasetMeta, or call add_dataset")
        if len(parts) == 1:
            return parts[0].source(), [*parts[0].stages, *self._stages]
        if not self._mixed:
            raise TrainingStateError(
                f"{len(parts)} data sets were added ({all_readable(self._parts)}); call mix_dataset() first, or name "
                "one of them by dataset_meta= in map and filter"
            )
        if self._mix is None:
            return itertools.chain.from_iterable(part.rows() for part in parts), self._stages
        return self._mix.rows([part.rows for part in parts]), self._stages

    def _record(self, meta: DatasetMeta | None, stage: Stage) -> None:
        self._refuse_change(stage.name)
        if meta is not None:
            self._part(meta).stages.append(stage)
        elif self._mixed:
            self._stages.append(stage)
        else:
            self._plan()
            next(iter(self._parts.values())).stages.append(stage)

    def _part(self, meta: DatasetMeta) -> Part:
        name = meta.get_id()
        if name not in self._parts:
            raise DataError(
                f"no data set {readable(name)!r} was added; there are: {all_readable(self._parts) or 'none'}"
            )
        if self._mixed:
            raise TrainingStateError("the sets are mixed already; leave dataset_meta out, or map before mix_dataset()")
        return self._parts[name]

    def _refuse_change(self, change: str) -> None:
        self._saving.refuse_change(change)

    def _last_stage(self) -> str:
        last = self._recorded()[-1:]
        return last[0].name if last else "loading"

    def _recorded(self) -> list[Stage]:
        return [*(stage for part in self._parts.values() for stage in part.stages), *self._stages]


def begin(stages: Iterable[Stage]) -> None:
    """Reset the filters among the steps before a pass over the rows."""
    for stage in stages:
        if isinstance(stage, FilterStage):
            stage.begin()


def cut(rows: Iterable[Row], size: int) -> Iterator[Chunk]:
    """Yield rows in chunks of `size`, numbered through."""
    numbered = iter(rows)
    first = 0
    while part := list(itertools.islice(numbered, size)):
        yield Chunk.of(part, first)
        first += len(part)
