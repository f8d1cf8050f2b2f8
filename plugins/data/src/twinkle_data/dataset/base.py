"""The data set: rows in memory that are mapped, filtered, mixed, encoded and saved in place."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle._arguments import refuse_unknown
from twinkle.dataset.meta import DatasetMeta, all_readable, readable
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, TrainingStateError
from twinkle.logging import get_logger
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataset import transform
from twinkle_data.dataset.calls import called_with, template_for, template_from
from twinkle_data.dataset.encoding import CheckCall, EncodeCall, table_lengths, warn_of_untrained
from twinkle_data.dataset.mixing import Stopping, checked_mix
from twinkle_data.dataset.saving import Saving
from twinkle_data.dataset.sources import load, mesh_of, not_empty
from twinkle_data.dataset.table import Table, join

_remote = remote_function(dispatch="all", execute="first", collect="first")


@remote_class(execute="first")
class Dataset:
    """Rows with a length, backed by Hugging Face `datasets`.

    Every method works in place, and does not change the data set if it raises. Rows are returned as they were stored:
    dicts keep their own keys, independent of other rows; in messages and tools a key with the value None is absent.

    `Dataset(dataset_meta, streaming=True)` returns an `IterableDataset`.

    Attributes:
        template: what `set_template` built, or None.
    """

    def __new__(cls, dataset_meta: DatasetMeta | None = None, **kwargs: Any) -> Any:
        """Create the data set; a stream has a class of its own."""
        if cls is Dataset and kwargs.get("streaming"):
            from twinkle_data.dataset.iterable import IterableDataset

            return IterableDataset(dataset_meta, **kwargs)
        return super().__new__(cls)

    def __init__(self, dataset_meta: DatasetMeta | None = None, **kwargs: Any) -> None:
        """Load the rows.

        Args:
            dataset_meta: where they are; None makes an empty set for `add_dataset`.
            **kwargs: for the hub (`revision`, `num_proc`, ...) or the reader of a local file (csv: `sep`, `names`;
                parquet: `columns`); `streaming=True` as described for the class; `device_mesh`, the mesh that uses the
                rows, on which they do not depend.

        Raises:
            DataError: nothing is there, it is malformed, or there are no rows.
            ArgumentError: the source does not take a keyword.
        """
        self.template: Any = None
        self.device_mesh = mesh_of(kwargs, type(self).__name__)
        self._parts: dict[str, Table] = {}
        self._mixed: Table | None = None
        self._saving = Saving()
        if dataset_meta is not None:
            self.add_dataset(dataset_meta, **kwargs)
        elif kwargs:
            what = type(self).__name__
            raise ArgumentError(f"{what}() without dataset_meta loads nothing, so it takes no {next(iter(kwargs))!r}")

    # Sources

    @_remote
    def add_dataset(self, dataset_meta: DatasetMeta, **kwargs: Any) -> None:
        """Load a further set; until `mix_dataset`, `map` and `filter` with `dataset_meta=` work on one of them.

        Raises:
            DataError: as in the constructor, or the same set is there already.
            TrainingStateError: the sets were mixed already.
        """
        if not isinstance(dataset_meta, DatasetMeta):
            raise ComponentTypeError(
                f"dataset_meta is a {type(dataset_meta).__name__}; give DatasetMeta('rows.jsonl') or one with data="
            )
        if self._is_mixed:
            raise TrainingStateError("the sets are mixed already; add all of them before mix_dataset()")
        self._refuse_change("add_dataset")
        name = dataset_meta.get_id()
        if name in self._parts:
            raise DataError(f"data set {readable(name)!r} is there already; to repeat rows give it a longer data_slice")
        self._parts[name] = load(dataset_meta, kwargs, type(self).__name__)

    @_remote
    def mix_dataset(
        self,
        interleave: bool = True,
        *,
        probabilities: Sequence[float] | None = None,
        seed: int = 42,
        stopping_strategy: Stopping | None = None,
    ) -> None:
        """Join all added data sets.

        Args:
            interleave: take one row of each set in turn; False puts the sets one after the other.
            probabilities: weights of the sets, in the order in which they were added: each row is taken from a set
                that is drawn with them. None takes one row of each set in turn.
            seed: of these draws. The order is that of `datasets.interleave_datasets`.
            stopping_strategy: `first_exhausted`, the default, stops when the shortest set is used up; the log reports
                the number of rows that are left out. `all_exhausted` stops when every set was used up; shorter sets
                begin again.

        Raises:
            ArgumentError: a weight, the seed or the strategy is not valid.
            DataError: a column has types in two sets that do not fit together.
        """
        if not self._parts:
            raise DataError("there is no data set to mix; call add_dataset first")
        self._refuse_change("mix_dataset")
        parts = list(self._parts.values())
        joined = join(parts, all_readable(self._parts, " + "))
        mix = checked_mix(len(parts), interleave, probabilities, seed, stopping_strategy, "first_exhausted")
        if mix is not None and len(parts) > 1:
            sizes = list(map(len, parts))
            starts = [sum(sizes[:index]) for index in range(len(parts))]
            indices = [starts[part] + row for part, row in mix.places(sizes)]
            if left_out := len(joined) - len(set(indices)):
                get_logger(__name__).warning(
                    "mix_dataset(interleave=True) stops with the shortest of %d sets (%d rows): %d rows are left out; "
                    "interleave=False or stopping_strategy='all_exhausted' keeps all",
                    len(parts), min(sizes), left_out,
                )  # fmt: skip
            joined = joined.select(indices)
        self._mixed = joined

    # Rows

    @_remote
    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._table())

    @_remote
    def __getitem__(self, idx: Any) -> Any:
        """Return row `idx` as a dict; for a slice or a list of indices, columns; for a column's name, its values."""
        table = self._table()
        if isinstance(idx, str):
            transform.require_column(table, idx, "Dataset")
            return table.columns(slice(None))[idx]
        if isinstance(idx, slice | list | tuple | range):
            return table.columns(idx)
        row = table.row(idx)
        self._saving.record(idx % len(table), row)
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every row."""
        return (self[index] for index in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return self._table().names

    @property
    def dataset(self) -> Any:
        """The `datasets.Dataset` behind the rows; columns that hold dicts are JSON text there."""
        return self._table().hf

    # Transformations

    @_remote
    def map(
        self,
        preprocess_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the columns that a preprocessor returns, or replace those of the same name.

        It is called with a batch of columns (`dict[str, list]`) and returns columns. Columns that it does not return
        stay, as in `datasets`; `remove_columns=[...]` removes columns of the input. A preprocessor that returns another
        number of rows must return all columns that stay, so remove the others: `remove_columns=dataset.column_names`.

        Args:
            preprocess_func: a preprocessor in any form of component argument, or any callable.
            dataset_meta: which of several added sets to map; may be left out when there is one, or after mixing.
            init_args: constructor arguments of a preprocessor given by name or class. They may also be given as plain
                keywords, unless `datasets.Dataset.map` has a parameter of that name.
            **kwargs: of `datasets.Dataset.map`: `batch_size`, `num_proc`, `load_from_cache_file` (default False),
                `with_indices`, `fn_kwargs`, ...

        Raises:
            ArgumentError: an unknown keyword.
            DataError: the preprocessor returns no columns, or another number of rows beside columns that stay; or no
                rows remain.
        """
        call = called_with(preprocess_func, "preprocessor", init_args, kwargs, transform.map_options())
        drop = call.options.pop("remove_columns", None) or []
        drop = [drop] if isinstance(drop, str) else list(drop)
        name = self._named(dataset_meta)
        mapped = transform.map_table(self._table(name), call.component, f"map({call.name})", drop, **call.options)
        self._replace(name, mapped, f"map({call.name})")

    @_remote
    def filter(
        self,
        filter_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the rows for which a filter, called with one row, returns true.

        Args:
            filter_func: a filter in any form of component argument, or any callable.
            dataset_meta: as for `map`.
            init_args: as for `map`.
            **kwargs: of `datasets.Dataset.filter`.

        Raises:
            ArgumentError: an unknown keyword.
            DataError: no rows remain.
        """
        call = called_with(filter_func, "filter", init_args, kwargs, transform.filter_options())
        name = self._named(dataset_meta)
        filtered = transform.filter_table(self._table(name), call.component, **call.options)
        self._replace(name, filtered, f"filter({call.name})")

    @_remote
    def cast_column(self, column: str, decode: bool = True) -> None:
        """Convert a column to images.

        Args:
            column: holds paths, bytes, or dicts of them.
            decode: hand out PIL images; False hands out paths and bytes.

        Raises:
            ArgumentError: there is no such column.
            DataError: its values cannot be images.
        """
        self._replace(None, transform.cast_table(self._table(), column, decode), "cast_column")

    # Encoding

    @_remote
    def set_template(self, template_func: Any, **kwargs: Any) -> None:
        """Set the template for `encode` and `check`.

        Args:
            template_func: in any form of component argument; an instance needs `batch_encode`.
            **kwargs: of the template's constructor: `model_id`, `max_length`, `truncation_strategy`, ...

        Raises:
            ComponentTypeError: it is not a template.
            ArgumentError: its constructor does not take a keyword.
        """
        self.template = template_from(template_func, kwargs)

    @_remote
    def encode(self, add_generation_prompt: bool = False, **kwargs: Any) -> None:
        """Encode conversations to tokens and labels.

        Rows without tokens are dropped, and the log counts them. It warns of rows in which no token is trained.

        Args:
            add_generation_prompt: end with the header of an assistant turn, for sampling.
            **kwargs: of `datasets.Dataset.map`: `batch_size`, `num_proc`, `load_from_cache_file`, ...

        Raises:
            TrainingStateError: there is no template.
            EncodeError: a row cannot be encoded; the message names its number and the reason.
            DataError: no rows remain.
        """
        self._check_options(kwargs, "encode")
        table = self._table()
        call = EncodeCall(template_for(self.template, "encode"), {"add_generation_prompt": add_generation_prompt})
        encoded = transform.map_table(table, call, "encode", None, with_indices=True, **kwargs)
        # A template may return several rows for one (`split`); only dropped rows are logged.
        self._drop_note("encode", len(table) - len(encoded), len(table))
        if not add_generation_prompt:
            warn_of_untrained(encoded, self.template)
        self._replace(None, encoded, "encode")

    @_remote
    def check(self, **kwargs: Any) -> None:
        """Drop the rows that the template cannot encode; the log reports their number.

        Args:
            **kwargs: of `datasets.Dataset.map`.

        Raises:
            TrainingStateError: there is no template.
            DataError: no rows remain.
        """
        self._check_options(kwargs, "check")
        table = self._table()
        call = CheckCall(template_for(self.template, "check"))
        checked = transform.map_table(table, call, "check", None, **kwargs)
        self._drop_note("check", len(table) - len(checked), len(table))
        self._replace(None, checked, "check")

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
        """Write the rows to a file, atomically.

        Args:
            output_path: the file; an existing one is replaced.
            format: jsonl, json, csv or parquet; by default the ending of `output_path`. In csv, lists and dicts are
                JSON text.
            batch_size: how many rows are written at a time.
            mode: `immediate` writes all rows now; `training` writes each row when it is first read (by number, in this
                process), and `flush_save` completes the file.
            **kwargs: none; an unknown name is an error.

        Raises:
            ArgumentError: an unknown format, mode or keyword.
            OutputError: the file cannot be written.
        """
        refuse_unknown(Dataset.save_as, kwargs, what="save_as")
        self._saving.save(output_path, format, batch_size, mode, self._saved_columns(), self._every_row)

    @_remote
    def flush_save(self) -> None:
        """Complete the file of `save_as(mode="training")` with the rows read so far, and stop recording.

        A second call has no effect.

        Raises:
            TrainingStateError: `save_as(mode="training")` was never called.
        """
        self._saving.flush()

    # Lengths

    @_remote
    def row_lengths(self) -> list[int]:
        """Return the number of tokens of every row: column `length`, else the size of `input_ids`.

        Raises:
            DataError: the rows are not encoded.
        """
        return table_lengths(self._table())

    # Inside

    def _refuse_change(self, change: str) -> None:
        self._saving.refuse_change(change)

    @property
    def _is_mixed(self) -> bool:
        return self._mixed is not None

    def _table(self, name: str | None = None) -> Table:
        if name is not None:
            return self._parts[name]
        if self._mixed is not None:
            return self._mixed
        if len(self._parts) == 1:
            return next(iter(self._parts.values()))
        if not self._parts:
            raise DataError(f"the data set is empty: give {type(self).__name__} a DatasetMeta, or call add_dataset")
        raise TrainingStateError(
            f"{len(self._parts)} data sets were added ({all_readable(self._parts)}); call mix_dataset() first, or "
            "name one of them by dataset_meta= in map and filter"
        )

    def _named(self, meta: DatasetMeta | None) -> str | None:
        if meta is None:
            return None
        name = meta.get_id()
        if name not in self._parts:
            raise DataError(
                f"no data set {readable(name)!r} was added; there are: {all_readable(self._parts) or 'none'}"
            )
        if self._is_mixed:
            raise TrainingStateError("the sets are mixed already; leave dataset_meta out, or map before mix_dataset()")
        return name

    def _replace(self, name: str | None, table: Table, after: str) -> None:
        not_empty(table, readable(name) if name else all_readable(self._parts, " + "), after)
        self._refuse_change(after)
        if self._mixed is not None:
            self._mixed = table
        else:
            self._parts[name or next(iter(self._parts))] = table

    def _saved_columns(self) -> list[str] | None:
        return self._table().names

    def _every_row(self) -> Iterator[dict[str, Any]]:
        return self._table().rows()

    @staticmethod
    def _check_options(kwargs: Mapping[str, Any], what: str) -> None:
        supported = {"with_indices", "with_rank", "fn_kwargs", "remove_columns"}
        called_with(_nothing, what, None, dict(kwargs), transform.map_options() - supported)

    @staticmethod
    def _drop_note(what: str, dropped: int, total: int) -> None:
        if dropped > 0:
            get_logger(__name__).info("%s dropped %d of %d rows", what, dropped, total)


def _nothing() -> None:
    """Represents a component without arguments."""
