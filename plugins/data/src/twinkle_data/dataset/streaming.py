"""From a `DatasetMeta` to a stream of its rows: memory, functions, local files and folders, hubs."""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor.base import Preprocessor
from twinkle_data.dataset.columns import clean_column, require_one_length
from twinkle_data.dataset.readers import ROW_READERS, reader_of, reading
from twinkle_data.dataset.sources import (
    absent,
    check_one_file,
    checked_rows,
    column_of,
    files_of_split,
    hub_reference,
    is_saved,
    load_saved,
    row_number,
)
from twinkle_data.dataset.table import Table, from_arrow

Row = dict[str, Any]
Source = Callable[[], Iterator[Row]]


def open_stream(meta: DatasetMeta, options: Mapping[str, Any]) -> Source:
    """Return a function that begins to read the rows of `meta` anew each time it is called, its slice applied.

    What can be known without reading is checked now: files and folders exist, options fit, the slice goes forwards.

    Args:
        meta: see `DatasetMeta`.
        options: keywords for the hub or the reader of the file format; `streaming=True` may be among them.

    Raises:
        DataError: nothing is there, or it can be read only once.
        ArgumentError: an option that the source does not take.
    """
    options = dict(options)
    if not options.pop("streaming", True):
        raise ArgumentError("IterableDataset streams, so it takes no streaming=False; use Dataset to hold all rows")
    name = meta.dataset_id or "data"
    if meta.data is not None:
        if options:
            raise ArgumentError(
                f"rows in memory (data=) take no options, but {', '.join(map(repr, options))} was given"
            )
        source = _memory(meta.data, meta.split, name)
    elif not meta.dataset_id:
        raise DataError("DatasetMeta names no data: give dataset_id (a file, folder or scheme:// reference) or data=")
    elif (reference := hub_reference(meta)) is not None:
        source = _hub(meta, reference, options)
    else:
        source = _disk(meta, options)
    source = functools.partial(_not_empty, source, name)
    return source if meta.data_slice is None else functools.partial(_sliced, source, checked_slice(meta.data_slice))


def checked_slice(wanted: Any) -> slice | Sequence[int]:
    """Return a `data_slice` that can be read forwards: a slice, or row numbers that never go down.

    Raises:
        DataError: it goes backwards, counts from the end, or holds something else than row numbers.
    """
    if isinstance(wanted, slice):
        if any(part is not None and part < 0 for part in (wanted.start, wanted.stop)) or (wanted.step or 1) < 1:
            raise DataError(
                f"data_slice is {wanted!r}; a stream goes forwards and has no known end: count from its start"
            )
        return wanted
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise DataError(f"data_slice is {wanted!r}; it must be a range, a slice or an iterable of row numbers")
    numbers = wanted if isinstance(wanted, range) else list(map(row_number, wanted))
    if not numbers:
        raise DataError(f"data_slice is {wanted!r} and chooses no rows")
    if numbers[0] < 0 or any(earlier > later for earlier, later in _neighbours(numbers)):
        raise DataError("data_slice goes backwards, and a stream goes forwards: give ascending numbers, or use Dataset")
    return numbers


def _neighbours(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(numbers[:2] if isinstance(numbers, range) else numbers)


def _sliced(source: Source, wanted: slice | Sequence[int]) -> Iterator[Row]:
    """Yield the wanted rows; a number i beyond the n rows of the stream is row i mod n, read in another pass."""
    if isinstance(wanted, slice):
        yield from itertools.islice(source(), wanted.start, wanted.stop, wanted.step)
        return
    numbers, place = iter(wanted), 0
    coming = next(numbers, None)
    while coming is not None:
        for row in source():
            while coming == place:
                coming = next(numbers, None)
                yield copy.deepcopy(row) if coming == place else row
            if coming is None:
                return
            place += 1


def _not_empty(source: Source, name: str) -> Iterator[Row]:
    nothing = True
    for row in source():
        nothing = False
        yield row
    if nothing:
        raise DataError(f"data set {name!r} has no rows after loading")


# Memory


def _memory(data: Any, split: str, name: str) -> Source:
    import pyarrow

    if isinstance(data, Iterator):
        raise DataError(
            f"data set {name!r}: a {type(data).__name__} can be read only once; give the function that makes it: "
            "DatasetMeta(data=function)"
        )
    if isinstance(data, str | bytes | type) or not (isinstance(data, Iterable | pyarrow.Table) or callable(data)):
        raise _no_rows(data, name)
    return functools.partial(_rows_of, data, split, name)


def _no_rows(data: Any, name: str) -> DataError:
    return DataError(
        f"data set {name!r}: data is a {type(data).__name__}; give a list of dicts, a dict of columns, a data set or "
        "stream of `datasets`, a pyarrow.Table, or a function that returns one of these or an iterator of dicts"
    )


def _rows_of(data: Any, split: str, name: str) -> Iterator[Row]:
    import datasets
    import pyarrow

    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        if split not in data:
            raise DataError(f"data set {name!r} has no split {split!r}; it has {', '.join(data)}")
        data = data[split]
    if isinstance(data, datasets.Dataset):
        yield from Table(data.with_format(None)).rows()
    elif isinstance(data, pyarrow.Table):
        yield from from_arrow(data).rows()
    elif isinstance(data, datasets.IterableDataset):
        # Not `iter(data)`: in torch's worker processes that gives each of them a part of the rows.
        for columns in data.with_format(None).iter(batch_size=64):
            yield from (_cleaned(row, deep=True) for row in Preprocessor.map_col_to_row(columns))
    elif isinstance(data, Mapping):
        yield from _columns(data, name)
    elif callable(data) and not isinstance(data, type) and not isinstance(data, Iterable):
        yield from _rows_of(data(), split, name)
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes | type):
        for row in checked_rows(data, name):
            # A copy: what a preprocessor changes in place must not come back changed in the next epoch.
            yield _cleaned(row if isinstance(data, Iterator) else copy.deepcopy(row), deep=False)
    else:
        raise _no_rows(data, name)


def _columns(data: Mapping[str, Any], name: str) -> Iterator[Row]:
    columns = {str(key): column_of(str(key), values, name) for key, values in data.items()}
    require_one_length(columns, f"data set {name!r}")
    for values in zip(*columns.values(), strict=True):
        yield _cleaned(copy.deepcopy(dict(zip(columns, values, strict=True))), deep=False)


def _cleaned(row: Mapping[str, Any], *, deep: bool) -> Row:
    return {name: clean_column(name, [value], deep=deep)[0] for name, value in row.items()}


# Disk and hubs


def _disk(meta: DatasetMeta, options: Mapping[str, Any]) -> Source:
    path = Path(meta.dataset_id).expanduser()
    if path.is_file():
        check_one_file(path, meta)
        return functools.partial(_files_rows, [path], _checked_options([path], options))
    if not path.is_dir():
        raise DataError(absent(str(meta.dataset_id), path))
    folder = path if meta.subset_name == "default" else path / meta.subset_name
    if is_saved(folder):
        return functools.partial(_rows_of, load_saved(folder, meta.split, options), meta.split, str(folder))
    files = files_of_split(folder, meta.split)
    return functools.partial(_files_rows, files, _checked_options(files, options))


def _checked_options(files: list[Path], options: Mapping[str, Any]) -> dict[str, Any]:
    from twinkle_registry import check_keywords

    for file in files[:1]:
        reader = reader_of(file, ROW_READERS)
        check_keywords(reader, options, what=f"data set {file.name}", args=(file,))
    return dict(options)


def _files_rows(files: list[Path], options: Mapping[str, Any]) -> Iterator[Row]:
    for path in files:
        with reading(path):
            for row in ROW_READERS[path.suffix.lower()](path, **options):
                yield _cleaned(row, deep=False)


def _hub(meta: DatasetMeta, reference: str, options: Mapping[str, Any]) -> Source:
    from twinkle.hub import open_hub
    from twinkle.hub.local import about_missing_path
    from twinkle_registry import check_keywords

    with about_missing_path(str(meta.dataset_id)):
        hub = open_hub(reference)
        if "streaming" in inspect.signature(hub.load_dataset).parameters:
            options = {**options, "streaming": True}
        what = f"data set {meta.dataset_id!r}"
        check_keywords(hub.load_dataset, options, what=what, args=(reference, meta.subset_name, meta.split))
        rows = hub.load_dataset(reference, subset_name=meta.subset_name, split=meta.split, **options)
    return _memory(rows, meta.split, reference)
