"""Reads local files into tables or row by row: jsonl, json, csv, parquet, arrow, txt; errors name file and line."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import DataError
from twinkle_data.dataset.table import Table, from_arrow, from_columns, from_rows


def read_file(path: Path, options: Mapping[str, Any]) -> Table:
    """Read one file by its ending.

    Args:
        path: an existing file.
        options: keywords of the reader, see the functions below.

    Raises:
        DataError: the format is unknown, or the file is malformed.
        ArgumentError: the reader of this format does not take an option.
    """
    from twinkle_registry import check_keywords

    reader = reader_of(path, READERS)
    check_keywords(reader, options, what=f"data set {path.name}", args=(path,))
    with reading(path):
        table: Table = reader(path, **options)
    return table


def reader_of(path: Path, readers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the reader for a file's ending, or raise `DataError`."""
    from twinkle_registry import nearest

    reader = readers.get(path.suffix.lower())
    if reader is None:
        close = nearest(path.suffix.lower(), readers, 1)
        hint = f" (nearest: {close[0]})" if close else ""
        raise DataError(
            f"{path}: unknown format {path.suffix or '(no ending)'!r}{hint}; a data file ends in {', '.join(readers)}"
        )
    return reader


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as a `DataError` that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}: {error.reason}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_jsonl(path: Path) -> Table:
    """Read one JSON object per line; empty lines are skipped."""
    return from_rows(json_lines(path), str(path))


def json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the object of each line; errors name the line."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())  # a column of the next line would be 1
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON: {error.msg} (column {error.colno}): {line.strip()[:60]!r}"
                ) from error
            yield _row(row, f"{path}, line {number}")


def read_json(path: Path) -> Table:
    """Read a list of objects, an object of columns (lists of equal length), or JSON lines."""
    text = path.read_text("utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if _is_json(text.strip().partition("\n")[0]):
            return read_jsonl(path)
        raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return from_columns(value, str(path))
    rows = value if isinstance(value, list) else [value]
    return from_rows((_row(row, f"{path}, item {number}") for number, row in enumerate(rows)), str(path))


def read_csv(path: Path, sep: str = ",", names: list[str] | None = None) -> Table:
    """Read a table with a header line.

    An empty cell is None; nothing else is, so `NA` and `null` are text. A column becomes whole numbers or decimal
    numbers only where each of its cells is written exactly as Python writes that number, so `01234`, `1.50`, `1e5` and
    `True` stay text, and so does a column that mixes `1` and `0.5`.

    Args:
        path: the file.
        sep: what separates the columns.
        names: column names where the file has no header line.

    Raises:
        DataError: this is no table, or a line has more cells than there are columns.
    """
    columns = {name: cells for frame in csv_cells(path, sep, names) for name, cells in frame.items()}
    return from_columns({name: converted(cells, fitting(cells)[:1]) for name, cells in columns.items()}, str(path))


def csv_cells(
    path: Path, sep: str, names: list[str] | None, lines: int | None = None
) -> Iterator[dict[str, list[str | None]]]:
    """Yield the columns of a table as texts (None: an empty cell), `lines` lines at a time; None is all at once.

    Raises:
        DataError: as in `read_csv`.
    """
    import warnings

    import pandas  # type: ignore[import-untyped]

    errors = pandas.errors
    try:
        # index_col=False: otherwise an extra cell in the first line shifts every column by one.
        options = {"sep": sep, "names": names, "dtype": object, "keep_default_na": False, "index_col": False}
        with pandas.read_csv(path, iterator=True, **options) as reader:
            while True:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", errors.ParserWarning)  # otherwise surplus cells are dropped silently
                    frame = reader.read(lines)
                # NaN: the line ended before this cell.
                yield {
                    str(name): [cell if isinstance(cell, str) and cell else None for cell in frame[name].tolist()]
                    for name in frame
                }
                if lines is None or len(frame) < lines:
                    return
    except StopIteration:
        return
    except (errors.ParserError, errors.EmptyDataError, errors.ParserWarning) as error:
        raise DataError(f"{path}: not a table separated by {sep!r}: {str(error).strip()}") from error


Number = type[int] | type[float]


def fitting(cells: list[str | None], among: Sequence[Number] = (int, float)) -> list[Number]:
    """Return the number types that reproduce the text of every cell."""
    return [number for number in among if _fits(cells, number)]


def converted(cells: list[str | None], number: Sequence[Number]) -> list[Any]:
    """Convert the cells to the given number type; None leaves them unchanged."""
    return [None if cell is None else number[0](cell) for cell in cells] if number else list(cells)


def read_parquet(path: Path, columns: list[str] | None = None) -> Table:
    """Read a Parquet file.

    Args:
        path: the file.
        columns: the names of the columns wanted; by default all.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        if missing := [name for name in columns or () if name not in names]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(names)}")
        table = pyarrow.parquet.read_table(path, columns=columns)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    return from_arrow(table)


def read_arrow(path: Path) -> Table:
    """Read an Arrow IPC file (also called Feather) or stream; it stays on disk and is mapped into memory."""
    import pyarrow

    try:
        return from_arrow(open_arrow(path).read_all())
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not an Arrow file: {error}") from error


def open_arrow(path: Path) -> Any:
    """Return pyarrow's reader of an Arrow IPC file or stream.

    Raises:
        pyarrow.ArrowException: it is neither.
    """
    import pyarrow

    source = pyarrow.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


def read_text(path: Path) -> Table:
    """Read one row `{"text": line}` per line; empty lines are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        lines = [line.rstrip("\r\n") for line in file]
    return from_columns({"text": [line for line in lines if line.strip()]}, str(path))


READERS: dict[str, Callable[..., Table]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".txt": read_text,
}


def _fits(cells: list[str | None], number: Number) -> bool:
    try:
        return all(cell is None or _kept(number(cell), cell) for cell in cells)
    except ValueError:
        return False


def _kept(value: int | float, text: str) -> bool:
    """Return whether a number is written like the text and is representable in Arrow (64 bits, finite)."""
    return repr(value) == text and (math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**63)


def _row(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, but this is a {type(value).__name__}")
    return value


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


Row = Mapping[str, Any]
_ROWS = 1000


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yield one JSON object per line; a row has the keys of its own line."""
    yield from json_lines(path)


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file, after reading all of it."""
    yield from read_json(path).rows()


def csv_rows(path: Path, sep: str = ",", names: list[str] | None = None) -> Iterator[Row]:
    """Yield the lines of a table; a first pass determines the types, so that they equal those of `readers.read_csv`."""
    numbers: dict[str, list[Number]] = {}
    for columns in csv_cells(path, sep, names, _ROWS):
        for name, cells in columns.items():
            numbers[name] = fitting(cells, numbers.get(name, [int, float]))
    for columns in csv_cells(path, sep, names, _ROWS):
        typed = {name: converted(cells, numbers[name][:1]) for name, cells in columns.items()}
        for values in zip(*typed.values(), strict=True):
            yield dict(zip(typed, values, strict=True))


def parquet_rows(path: Path, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, reading some thousand at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    with file:
        names = file.schema_arrow.names
        if missing := [name for name in columns or () if name not in names]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(names)}")
        for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
            yield from from_arrow(pyarrow.Table.from_batches([batch])).rows()


def arrow_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow IPC file or stream."""
    import pyarrow

    try:
        reader = open_arrow(path)
        count = getattr(reader, "num_record_batches", None)
        batches = iter(reader) if count is None else map(reader.get_batch, range(count))
        for batch in batches:
            yield from from_arrow(pyarrow.Table.from_batches([batch])).rows()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not an Arrow file: {error}") from error


def text_rows(path: Path) -> Iterator[Row]:
    """Yield one row `{"text": line}` per line; empty lines are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        lines = (line.rstrip("\r\n") for line in file)
        yield from ({"text": line} for line in lines if line.strip())


ROW_READERS: dict[str, Callable[..., Iterator[Row]]] = {
    ".jsonl": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
    ".feather": arrow_rows,
    ".txt": text_rows,
}
