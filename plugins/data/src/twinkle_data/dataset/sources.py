"""Loads the rows of a `DatasetMeta` as a table or a stream, from memory, functions, files, folders and hubs."""

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.mesh import DeviceMesh
from twinkle.preprocessor.base import Preprocessor
from twinkle_data.dataset.calls import clean_column, from_one, require_one_length
from twinkle_data.dataset.readers import READERS, ROW_READERS, read_file, reader_of, reading
from twinkle_data.dataset.table import Table, from_arrow, from_columns, from_rows, join

_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
}
Row = dict[str, Any]
Source = Callable[[], Iterator[Row]]


def load(meta: DatasetMeta, options: Mapping[str, Any], what: str = "Dataset") -> Table:
    """Return the rows of `meta`, with its slice applied.

    Args:
        meta: see `DatasetMeta`.
        options: keywords for the hub or the reader of the file format.
        what: the class that loads, for errors.

    Raises:
        DataError: nothing is there, it is malformed, or no row is left.
        ArgumentError: an option that the source does not take.
    """
    options = _without_streaming(options, what)
    name = meta.dataset_id or "data"
    if meta.data is not None:
        check_of_memory(local_options(options, "rows in memory (data=)"))
        table = _in_memory(meta.data, meta.split, name)
    elif not meta.dataset_id:
        raise DataError("DatasetMeta names no data: give dataset_id (a file, folder or scheme:// reference) or data=")
    else:
        table = _from_place(meta, options)
    not_empty(table, name, "loading")
    if meta.data_slice is None:
        return table
    return not_empty(table.select(slice_indices(meta.data_slice, len(table))), name, "data_slice")


def slice_indices(wanted: Any, size: int) -> list[int]:
    """Return the row numbers of `data_slice` in a set of `size` > 0 rows; an index i means row i mod size.

    Raises:
        DataError: an entry is not an integer, or true or false.
    """
    if isinstance(wanted, slice):
        return list(range(size))[wanted]
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise DataError(f"data_slice is {wanted!r}; it must be a range, a slice or an iterable of row numbers")
    return [row_number(index) % size for index in wanted]


def row_number(index: Any) -> int:
    """Return an entry of `data_slice` as a number.

    Raises:
        DataError: it is not an integer, or true or false.
    """
    if isinstance(index, bool) or "bool" in str(getattr(index, "dtype", "")):
        raise DataError(
            f"data_slice holds {index!r}; it must hold row numbers. To choose rows by true and false, give "
            "[number for number, wanted in enumerate(mask) if wanted]"
        )
    try:
        return int(index.__index__())
    except (AttributeError, TypeError):
        raise DataError(f"data_slice holds {index!r}; it must hold whole row numbers") from None


def not_empty(table: Table, name: str, after: str) -> Table:
    """Return the table if it has rows, else raise `DataError` that names the step after which it is empty."""
    if len(table) == 0:
        raise DataError(f"data set {name!r} has no rows after {after}")
    return table


def _in_memory(data: Any, split: str, name: str) -> Table:
    import datasets
    import pyarrow

    if isinstance(data, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise Unsupported(
            f"data set {name!r} is a stream, and this class holds rows with a length; use IterableDataset, or load it "
            "without streaming"
        )
    if isinstance(data, pyarrow.Table):
        return from_arrow(data)
    if isinstance(data, datasets.Dataset):
        return Table(data.with_format(None))
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(f"data set {name!r} has no split {split!r}; it has {', '.join(data)}")
        return Table(data[split].with_format(None))
    if isinstance(data, Mapping):
        return from_columns({key: column_of(key, values, name) for key, values in data.items()}, f"data set {name!r}")
    if callable(data) and not isinstance(data, type):
        return _in_memory(data(), split, name)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return from_rows(checked_rows(data, name), f"data set {name!r}")
    raise DataError(
        f"data set {name!r}: data is a {type(data).__name__}; give a list of dicts, a dict of columns, a "
        "datasets.Dataset, a pyarrow.Table, or a function that returns one of these"
    )


def column_of(key: str, values: Any, name: str) -> list[Any]:
    """Return one column of a dict of columns as a list, or raise `DataError` if it is not a list."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise DataError(
            f"data set {name!r}: column {key!r} is a {type(values).__name__}; a dict of columns holds lists"
        )
    return list(values)


def checked_rows(data: Iterable[Any], name: str) -> Iterator[Mapping[str, Any]]:
    """Yield rows in memory, or raise `DataError` at the first that is not a dict."""
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise DataError(
                f"data set {name!r}, row {number}: a row must be a dict, but this is a {type(row).__name__}"
            )
        yield row


def _from_place(meta: DatasetMeta, options: Mapping[str, Any]) -> Table:
    from twinkle.hub.local import about_missing_path

    reference = hub_reference(meta)
    if reference is None:
        return _from_disk(meta, local_options(options, str(meta.dataset_id)))
    with about_missing_path(str(meta.dataset_id)):
        return _from_hub(meta, reference, options)


def hub_reference(meta: DatasetMeta) -> str | None:
    """Return the `scheme://...` reference of a data set's id, or None for a local path."""
    from twinkle.hub.local import reference_of, scheme_of

    name = str(meta.dataset_id)
    if scheme_of(name):
        return name
    path = Path(name).expanduser()
    return None if path.exists() or path.suffix.lower() in READERS else reference_of(name, bare=True)


def _from_hub(meta: DatasetMeta, reference: str, options: Mapping[str, Any]) -> Table:
    from twinkle.hub import open_hub
    from twinkle_registry import check_keywords

    hub = open_hub(reference)
    name = f"data set {meta.dataset_id!r}"
    options = hub_options(hub, options)
    check_keywords(hub.load_dataset, options, what=name, args=(reference, meta.subset_name, meta.split))
    rows = hub.load_dataset(reference, subset_name=meta.subset_name, split=meta.split, **options)
    return _in_memory(rows, meta.split, reference)


def _from_disk(meta: DatasetMeta, options: Mapping[str, Any]) -> Table:
    path = Path(meta.dataset_id).expanduser()
    if path.is_file():
        check_one_file(path, meta)
        return read_file(path, options)
    if path.is_dir():
        folder = path if meta.subset_name == "default" else path / meta.subset_name
        if is_saved(folder):
            return _in_memory(load_saved(folder, meta.split, options), meta.split, str(folder))
        return join([read_file(file, options) for file in files_of_split(folder, meta.split)], str(path))
    raise DataError(absent(str(meta.dataset_id), path))


def check_one_file(path: Path, meta: DatasetMeta) -> None:
    """Raise `DataError` if a subset or split of a single file is requested."""
    if meta.subset_name != "default" or meta.split != "train":
        raise DataError(
            f"{path} is one file: it has no subset {meta.subset_name!r} or split {meta.split!r}; leave subset_name "
            "and split out, and choose rows by data_slice"
        )


def is_saved(folder: Path) -> bool:
    """Return whether the folder was written by `save_to_disk` of a `datasets.Dataset` or `DatasetDict`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def load_saved(folder: Path, split: str, options: Mapping[str, Any]) -> Any:
    """Return the `datasets.Dataset` or `DatasetDict` that `save_to_disk` wrote.

    Raises:
        ArgumentError: there are options.
        DataError: it is damaged, or holds one set that is not of this split.
    """
    import datasets

    if options:
        raise ArgumentError(f"{folder} was written by save_to_disk: it takes no options, not even {_named(options)}")
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are among them
        raise DataError(f"{folder} was written by save_to_disk, but cannot be read: {error}") from error
    if isinstance(saved, datasets.Dataset) and split not in ("train", str(saved.split)):
        raise DataError(f"{folder} holds one set and has no split {split!r}; leave split out")
    return saved


def files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the data files of a folder that belong to a split, sorted; a file belongs to one split at most.

    The nearest folder whose name is that of a split decides; else the words in the file's name, else those in the names
    of its folders, the nearest first. Files that name no split at all are the training split.

    Raises:
        DataError: there is no such file, the folder mixes formats, or a name contains the words of two splits.
    """
    if not folder.is_dir():
        raise DataError(f"data set: there is no folder {folder}; subset_name names a sub-folder of a local data set")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in READERS)
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not files:
        raise DataError(f"{folder} holds no data file; a data file ends in {', '.join(READERS)}")
    of_word = {word: name for name, words in _SPLITS.items() for word in words}
    of_word |= dict.fromkeys(_SPLITS.get(split, (split.lower(),)), split)
    splits = {path: _splits_of(path.relative_to(folder), of_word) for path in files}
    matching = [path for path in files if split in splits[path]]
    if not matching and split == "train":
        matching = [path for path in files if not splits[path]]
    names = ", ".join(str(path.relative_to(folder)) for path in files[:8])
    if not matching:
        raise DataError(f"{folder} has no file of split {split!r}; it has {names}")
    if both := [path for path in matching if len(splits[path]) > 1]:
        raise DataError(
            f"{both[0]} names the splits {' and '.join(sorted(splits[both[0]]))}; rename it, put it into a folder that "
            "has the name of its split, or give the file itself as dataset_id"
        )
    if len({path.suffix.lower() for path in matching}) > 1:
        raise DataError(f"{folder} mixes formats ({names}); name one file, or keep one format in the folder")
    return matching


def _splits_of(path: Path, of_word: Mapping[str, str]) -> set[str]:
    """Return the splits in a relative path: none, one, or several if it is ambiguous."""
    folders = [part.lower() for part in path.parent.parts[::-1]]
    for part in folders:
        if part in of_word:
            return {of_word[part]}
    for part in (path.stem.lower(), *folders):
        if splits := {of_word[word] for word in re.split(r"[^a-z]+", part) if word in of_word}:
            return splits
    return set()


def absent(asked: str, path: Path) -> str:
    """Return the error text for a data set that does not exist locally."""
    from twinkle_registry import nearest

    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside, 1)
    hint = f" (nearest: {str(path.parent / close[0])!r})" if close else ""
    return (
        f"data set {asked!r}: there is no file or folder {str(path.absolute())!r}{hint}. A data set of a hub is "
        "hf://owner/name or ms://owner/name"
    )


def _without_streaming(options: Mapping[str, Any], what: str) -> dict[str, Any]:
    if options.get("streaming"):
        raise Unsupported(
            f"{what} holds rows with a length and does not stream; use IterableDataset, or Dataset(dataset_meta, "
            "streaming=True)"
        )
    return {name: value for name, value in options.items() if name != "streaming"}


def mesh_of(kwargs: dict[str, Any], what: str) -> DeviceMesh | None:
    """Remove and return `device_mesh` from the keywords of a constructor.

    Raises:
        ArgumentError: it is not a mesh.
    """
    mesh = kwargs.pop("device_mesh", None)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"{what}: device_mesh must be a DeviceMesh or None, got {mesh!r}")
    return mesh


def local_options(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options for rows of this machine, without those of a download.

    `num_proc` is checked and has no effect: a file is read by one process.

    Raises:
        ArgumentError: there is a `revision` or a `token`, or `num_proc` is not a number from 1.
    """
    if (processes := options.get("num_proc")) is not None:
        from_one("num_proc", processes)
    given = [option for option in ("revision", "token") if options.get(option) is not None]
    if given:
        raise ArgumentError(
            f"{name}: {given[0]}= is for data sets of a hub, and these rows are on this machine; leave it out"
        )
    return {option: value for option, value in options.items() if option not in ("num_proc", "revision", "token")}


def hub_options(hub: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a hub, without those of a download that are None, or that a folder as a hub lacks."""
    known = inspect.signature(hub.load_dataset).parameters
    absent = [option for option in ("num_proc", "revision", "token") if options.get(option) is None]
    if (processes := options.get("num_proc")) is not None:
        from_one("num_proc", processes)
        absent += [] if "num_proc" in known else ["num_proc"]
    return {option: value for option, value in options.items() if option not in absent}


def check_of_memory(options: Mapping[str, Any]) -> None:
    """Refuse options for rows in memory, which nothing reads.

    Raises:
        ArgumentError: there are any.
    """
    if options:
        raise ArgumentError(f"rows in memory (data=) take no options, but {_named(options)} was given")


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, options))


def open_stream(meta: DatasetMeta, options: Mapping[str, Any]) -> Source:
    """Return a function that starts a new iteration over the rows of `meta`, with its slice applied.

    Checks that need no reading are made now: files and folders exist, options are valid, the slice is ascending.

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
        check_of_memory(local_options(options, "rows in memory (data=)"))
        source = _stream_of_memory(meta.data, meta.split, name)
    elif not meta.dataset_id:
        raise DataError("DatasetMeta names no data: give dataset_id (a file, folder or scheme:// reference) or data=")
    elif (reference := hub_reference(meta)) is not None:
        source = _stream_of_hub(meta, reference, options)
    else:
        source = _stream_of_files(meta, local_options(options, str(meta.dataset_id)))
    source = functools.partial(_stream_not_empty, source, name)
    return source if meta.data_slice is None else functools.partial(_sliced, source, checked_slice(meta.data_slice))


def checked_slice(wanted: Any) -> slice | Sequence[int]:
    """Return a `data_slice` for forward reading: a slice, or ascending row indices.

    Raises:
        DataError: the slice is not ascending, counts from the end, or has values other than row indices.
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
    """Yield the selected rows; an index i beyond the n rows of the stream is row i mod n, read in another pass."""
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


def _stream_not_empty(source: Source, name: str) -> Iterator[Row]:
    nothing = True
    for row in source():
        nothing = False
        yield row
    if nothing:
        raise DataError(f"data set {name!r} has no rows after loading")


# Memory


def _stream_of_memory(data: Any, split: str, name: str) -> Source:
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
        # Not `iter(data)`: in torch's worker processes, it would yield only a part of the rows.
        for columns in data.with_format(None).iter(batch_size=64):
            yield from (_cleaned(row, deep=True) for row in Preprocessor.map_col_to_row(columns))
    elif isinstance(data, Mapping):
        yield from _columns(data, name)
    elif callable(data) and not isinstance(data, type) and not isinstance(data, Iterable):
        yield from _rows_of(data(), split, name)
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes | type):
        for row in checked_rows(data, name):
            # A copy, so that in-place changes by a preprocessor do not affect the next epoch.
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


def _stream_of_files(meta: DatasetMeta, options: Mapping[str, Any]) -> Source:
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


def _stream_of_hub(meta: DatasetMeta, reference: str, options: Mapping[str, Any]) -> Source:
    from twinkle.hub import open_hub
    from twinkle.hub.local import about_missing_path
    from twinkle_registry import check_keywords

    with about_missing_path(str(meta.dataset_id)):
        hub = open_hub(reference)
        if "streaming" in inspect.signature(hub.load_dataset).parameters:
            options = {**options, "streaming": True}
        name, options = f"data set {meta.dataset_id!r}", hub_options(hub, options)
        check_keywords(hub.load_dataset, options, what=name, args=(reference, meta.subset_name, meta.split))
        rows = hub.load_dataset(reference, subset_name=meta.subset_name, split=meta.split, **options)
    return _stream_of_memory(rows, meta.split, reference)
