"""The lazy data set: raw rows in memory; all steps are applied when a row is read."""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import ArgumentError, DataError, TrainingStateError, Unsupported
from twinkle.logging import get_logger
from twinkle.preprocessor.base import Preprocessor
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataset.base import Dataset
from twinkle_data.dataset.calls import template_for
from twinkle_data.dataset.mixing import Stopping, checked_mix
from twinkle_data.dataset.stages import Chunk, Stage, check_stage, encode_stage, map_stage, run_stages
from twinkle_data.dataset.table import Table
from twinkle_data.dataset.transform import cast_table

_remote = remote_function(dispatch="all", execute="first", collect="first")


@dataclass(frozen=True)
class Mixture:
    """Maps row indices to rows of several data sets."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    places: Sequence[tuple[int, int]] | None

    def __len__(self) -> int:
        return sum(self.sizes) if self.places is None else len(self.places)

    def place(self, number: int) -> tuple[str, int]:
        """Return the set of row `number`, and the row's number in it."""
        if self.places is not None:
            part, row = self.places[number]
            return self.names[part], row
        ends = list(itertools.accumulate(self.sizes))
        part = bisect.bisect_right(ends, number)
        return self.names[part], number - (ends[part] - self.sizes[part])


@remote_class(execute="first")
class LazyDataset(Dataset):
    """A data set whose rows are mapped, checked and encoded one by one, each time they are read.

    For rows that are large once made (images, long token lists), or too many to make before the first step. Its length
    is that of the raw rows, so every step makes exactly one row of one row. A row that `encode` or `check` would drop
    raises `DataError` when it is read; a `DataLoader` puts another in its place and says so.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, **kwargs: Any) -> None:
        """Load the raw rows; arguments and errors are those of `Dataset`."""
        self._stages_of: dict[str, list[Stage]] = {}
        self._stages: list[Stage] = []
        self._mixture: Mixture | None = None
        super().__init__(dataset_meta, **kwargs)

    # Recorded

    @_remote
    def map(
        self,
        preprocess_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a preprocessor, which is called with the columns of one row and must return columns of one row.

        Args:
            preprocess_func: as for `Dataset.map`.
            dataset_meta: which of several added sets to map; may be left out when there is one, or after mixing.
            init_args: as for `Dataset.map`.
            **kwargs: `remove_columns`, `fn_kwargs`, `batch_size` (what is called sees one row in any case).

        Raises:
            ArgumentError: an unknown keyword, or one that needs all rows at once (`num_proc`, `with_indices`).
        """
        self._record(self._named(dataset_meta), map_stage(preprocess_func, init_args, kwargs))

    @_remote
    def filter(
        self,
        filter_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Filter the raw rows immediately: the filter is called with rows as loaded, before any `map`.

        Arguments are those of `Dataset.filter`.

        Raises:
            ArgumentError: an unknown keyword.
            DataError: no rows remain.
            TrainingStateError: the sets are mixed; their numbers of rows are settled.
        """
        if self._is_mixed:
            raise TrainingStateError(
                "the sets are mixed already, and filter() works on raw rows; filter each before mix_dataset()"
            )
        name = self._named(dataset_meta)
        if before := self._stages_of.get(name or self._only()):
            get_logger(__name__).warning(
                "filter() works on raw rows; it does not see the result of %s", ", ".join(s.name for s in before)
            )
        super().filter(filter_func, dataset_meta, init_args, **kwargs)

    @_remote
    def mix_dataset(
        self,
        interleave: bool = True,
        *,
        probabilities: Sequence[float] | None = None,
        seed: int = 42,
        stopping_strategy: Stopping | None = None,
    ) -> None:
        """Join all added data sets, without copying; a row keeps the columns of its own set.

        Args:
            interleave: as for `Dataset.mix_dataset`.
            probabilities: as for `Dataset.mix_dataset`.
            seed: as for `Dataset.mix_dataset`.
            stopping_strategy: as for `Dataset.mix_dataset`, but `all_exhausted` is the default.

        Raises:
            ArgumentError: as for `Dataset.mix_dataset`.
            DataError: no set was added.
            TrainingStateError: the sets are mixed already.
        """
        if not self._parts:
            raise DataError("there is no data set to mix; call add_dataset first")
        if self._is_mixed:
            raise TrainingStateError("the sets are mixed already")
        self._refuse_change("mix_dataset")
        sizes = tuple(map(len, self._parts.values()))
        mix = checked_mix(len(sizes), interleave, probabilities, seed, stopping_strategy, "all_exhausted")
        self._mixture = Mixture(tuple(self._parts), sizes, None if mix is None else list(mix.places(sizes)))

    @_remote
    def cast_column(self, column: str, decode: bool = True) -> None:
        """Convert a column of the raw rows to images; arguments and errors are those of `Dataset.cast_column`.

        Of several sets, all that have the column are cast.
        """
        self._refuse_change("cast_column")
        holders = [name for name, table in self._parts.items() if column in table.names] or [self._only()]
        self._parts |= {name: cast_table(self._parts[name], column, decode) for name in holders}

    @_remote
    def encode(self, add_generation_prompt: bool = False, **kwargs: Any) -> None:
        """Record encoding by the template.

        Args:
            add_generation_prompt: end with the header of an assistant turn, for sampling.
            **kwargs: `batch_size` (one row is encoded at a time in any case).

        Raises:
            TrainingStateError: there is no template.
            Unsupported: the template's `truncation_strategy` is `split`.
        """
        template = template_for(self.template, "encode")
        if getattr(template, "truncation_strategy", None) == "split":
            raise Unsupported(
                "truncation_strategy='split' makes several rows of one, and a LazyDataset has one for each raw row; "
                "use Dataset or IterableDataset, or another strategy"
            )
        self._record(None, encode_stage(template, add_generation_prompt, kwargs))

    @_remote
    def check(self, **kwargs: Any) -> None:
        """Record a check by the template: reading a row that it cannot encode raises `DataError`.

        Args:
            **kwargs: `batch_size` (one row is checked at a time in any case).

        Raises:
            TrainingStateError: there is no template.
        """
        self._record(None, check_stage(template_for(self.template, "check"), kwargs))

    # Rows

    @_remote
    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._table()) if self._mixture is None else len(self._mixture)

    @_remote
    def __getitem__(self, idx: Any) -> Any:
        """Compute row `idx`; for a slice or a list of indices, columns; for the name of a column, its values.

        Raises:
            DataError: a step makes no row of it, or several; the message names the step and the row.
        """
        size = len(self)
        if isinstance(idx, str):
            values = [self._made(number) for number in range(size)]
            for number, value in enumerate(values):
                if idx not in value:
                    raise ArgumentError(f"LazyDataset: row {number} has no column {idx!r}; it has {', '.join(value)}")
            return [row[idx] for row in values]
        if isinstance(idx, slice | list | tuple | range):
            numbers = range(size)[idx] if isinstance(idx, slice) else [range(size)[number] for number in idx]
            return Preprocessor.map_row_to_col([self._made(number) for number in numbers])
        number = range(size)[idx]
        row = self._made(number)
        self._saving.record(number, row)
        return row

    @property
    def column_names(self) -> list[str]:
        """The names of the columns of the first row, which is computed for this."""
        return list(self._made(0))

    @_remote
    def row_lengths(self) -> list[int]:
        """Refuse: lengths are known only after computing rows."""
        raise Unsupported(
            "a LazyDataset knows the length of a row only when it makes it; use Dataset where lengths are needed before"
        )

    # Inside

    def _made(self, number: int) -> dict[str, Any]:
        name, row = (self._only(), number) if self._mixture is None else self._mixture.place(number)
        chunk = Chunk([self._parts[name].row(row)], [number])
        for stage in (*self._stages_of.get(name, ()), *self._stages):
            chunk = run_stages([stage], chunk)
            if len(chunk.rows) != 1:
                raise DataError(
                    f"row {number}: {stage.name} made {len(chunk.rows)} rows of it, and a LazyDataset has one for each "
                    "raw row; use Dataset or IterableDataset to drop or multiply rows"
                )
        return chunk.rows[0]

    def _record(self, name: str | None, stage: Stage) -> None:
        self._refuse_change(stage.name)
        if self._mixture is None:
            self._stages_of.setdefault(name or self._only(), []).append(stage)
        else:
            self._stages.append(stage)

    @property
    def _is_mixed(self) -> bool:
        return self._mixture is not None

    def _only(self) -> str:
        self._table()
        return next(iter(self._parts))

    def _table(self, name: str | None = None) -> Table:
        if self._is_mixed and name is None:
            raise TrainingStateError("the sets are mixed row by row, so there is no one table of raw rows")
        return super()._table(name)

    def _saved_columns(self) -> list[str] | None:
        return None

    def _every_row(self) -> Iterator[dict[str, Any]]:
        return (self._made(number) for number in range(len(self)))
