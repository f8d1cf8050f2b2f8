"""Runs a function over a table with `datasets.map` and `datasets.filter`: which provide batching, processes and cache.

Each batch comes back as one cell that holds an Arrow table of its own. So a batch may have other types, columns and
numbers of rows than the first one, and the whole gets the types that fit all of it.
"""

import atexit
import contextlib
import functools
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import ArgumentError, DataError
from twinkle.filter import Filter
from twinkle_data.dataset.calls import call_on_columns
from twinkle_data.dataset.table import Table, fingerprint, from_columns, join

# Arguments of `datasets` that contradict the contract of `map`: columns in and out, types inferred over all rows.
_OURS = {"function", "batched", "input_columns", "features", "cache_file_name", "new_fingerprint", "on_mixed_types"}
_OURS |= {"try_original_type", "disable_nullable", "suffix_template"}


def map_options() -> set[str]:
    """Return the keywords that `map` passes on, `remove_columns` among them."""
    return _options("map")


def filter_options() -> set[str]:
    """Return the keywords that `filter` passes on."""
    return _options("filter")


def map_table(table: Table, function: Callable[..., Any], what: str, drop: list[str] | None, **options: Any) -> Table:
    """Apply `function` to the columns of `table`, batch by batch.

    Args:
        table: the rows.
        function: takes a dict of columns (and the row numbers with `with_indices=True`, the rank with
            `with_rank=True`, and `fn_kwargs`); returns a dict of columns of any common length.
        what: how errors name it.
        drop: None keeps only the returned columns. Else these columns are removed and the others kept with the returned
            ones, of which there must then be one entry a row.
        **options: of `datasets.Dataset.map`.

    Raises:
        DataError: the function returns something else than columns.
    """
    for name in drop or ():
        require_column(table, name, what)
    call = ColumnsCall(table, function, what, None if drop is None else frozenset(drop))
    cells = _run(table, "map", call, options, batched=True, remove_columns=table.names)
    parts = [_read_cell(*cell) for cell in _cells(cells)]
    full = [part for part in parts if len(part)]
    return join(full or parts[:1], what)


def filter_table(table: Table, function: Callable[..., Any], **options: Any) -> Table:
    """Return the rows for which `function(row)` is true."""
    if isinstance(function, Filter):
        function.reset()
    return table.replaced(_run(table, "filter", RowCall(table, function), options))


def cast_table(table: Table, column: str, decode: bool) -> Table:
    """Return the table with a column of images; see `Dataset.cast_column`."""
    import datasets

    require_column(table, column, "cast_column")
    try:
        return table.replaced(table.hf.cast_column(column, datasets.Image(decode=decode)))
    except (ValueError, TypeError, NotImplementedError) as error:  # pyarrow's own errors are among them
        raise DataError(f"cast_column: column {column!r} cannot hold images: {error}") from error


class ColumnsCall:
    """Calls a function with restored columns and returns its columns as one cell."""

    def __init__(self, table: Table, function: Callable[..., Any], what: str, drop: frozenset[str] | None) -> None:
        # Only the fields needed to restore rows, because the object is hashed and sent to other processes.
        self.restore = functools.partial(Table.restore_columns, Table(None, table.packed))
        self.function, self.what, self.drop = function, what, drop

    def __call__(self, batch: Mapping[str, Sequence[Any]], *extra: Any, **fn_kwargs: Any) -> dict[str, list[Any]]:
        """Return the result of one batch, as columns of one row."""
        columns = self.restore(batch)
        result = call_on_columns(self.function, columns, self.what, self.drop, extra, fn_kwargs)
        part = from_columns(result, self.what, None)
        return {"table": [_write_cell(part)], "packed": [sorted(part.packed)]}


class RowCall:
    """Calls a function with one restored row."""

    def __init__(self, table: Table, function: Callable[..., Any]) -> None:
        self.restore = functools.partial(Table.restore_row, Table(None, table.packed))
        self.function = function

    def __call__(self, row: Mapping[str, Any], *extra: Any, **fn_kwargs: Any) -> bool:
        """Return whether to keep the row."""
        return bool(self.function(self.restore(row), *extra, **fn_kwargs))


@functools.cache
def _options(method: str) -> set[str]:
    import datasets

    return set(inspect.signature(getattr(datasets.Dataset, method)).parameters) - _OURS - {"self"}


def _run(table: Table, method: str, call: Any, options: Mapping[str, Any], **fixed: Any) -> Any:
    cache_options = {"load_from_cache_file": False, **options}
    cache_options |= _where(table, call, cache_options) | fixed
    if method == "map":
        import datasets

        text = datasets.Value("string")
        cache_options["features"] = datasets.Features({"table": datasets.Value("large_binary"), "packed": [text]})
    with _bars_only_on_terminals():
        return getattr(table.hf, method)(call, **cache_options)


def _where(table: Table, call: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache arguments of the result: never a file next to the source, and no file for rows in memory."""
    if options["load_from_cache_file"]:
        from twinkle.paths import cache_dir

        name = _key(table, call, options)
        return {"cache_file_name": str(cache_dir("datasets") / f"{name}.arrow"), "new_fingerprint": name}
    name = fingerprint()
    if table.hf.cache_files and not options.get("keep_in_memory"):
        return {"cache_file_name": str(_scratch(os.getpid()) / f"{name}.arrow"), "new_fingerprint": name}
    return {"new_fingerprint": name}


def _key(table: Table, call: Any, options: Mapping[str, Any]) -> str:
    from datasets.fingerprint import Hasher

    hasher = Hasher()
    for batch in table.hf.with_format("arrow").iter(batch_size=10_000):
        hasher.update(batch.to_pylist())
    try:
        hasher.update([sorted(table.packed), call, options.get("fn_kwargs"), options.get("batch_size")])
    except (TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"load_from_cache_file=True needs a function that can be pickled, but {call.function!r} cannot: {error}"
        ) from error
    return str(hasher.hexdigest())


@functools.cache
def _scratch(pid: int) -> Path:
    """Return this process's folder for results of data sets on disk; it is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="twinkle-datasets-"))
    atexit.register(_remove, folder, pid)
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _bars_only_on_terminals() -> Iterator[None]:
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _write_cell(part: Table) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    table = part.hf.data.table
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _cells(hf: Any) -> Iterator[tuple[Any, list[str]]]:
    table = hf.data.table
    yield from zip(table.column("table"), table.column("packed").to_pylist(), strict=True)


def _read_cell(cell: Any, packed: list[str]) -> Table:
    import datasets
    import pyarrow
    from datasets.table import InMemoryTable

    table = pyarrow.ipc.open_stream(cell.as_buffer()).read_all()
    return Table(datasets.Dataset(InMemoryTable(table), fingerprint=fingerprint()), frozenset(packed))


def require_column(table: Table, name: str, what: str) -> None:
    """Raise `ArgumentError` unless the table has the column."""
    if name not in table.names:
        from twinkle_registry import nearest

        close = nearest(name, table.names, 1)
        hint = f", nearest: {close[0]!r}" if close else ""
        raise ArgumentError(f"{what}: no column {name!r}{hint}; the columns are {', '.join(table.names)}")
