"""Local files row by row: the rows that `readers` would put into a table, without holding them all."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from twinkle.errors import DataError
from twinkle_data.dataset.readers import Number, converted, csv_cells, fitting, json_lines, open_arrow, read_json
from twinkle_data.dataset.table import from_arrow

Row = Mapping[str, Any]
_ROWS = 1000


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yield one JSON object a line; a row has the keys of its own line."""
    yield from json_lines(path)


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file, which is read whole."""
    yield from read_json(path).rows()


def csv_rows(path: Path, sep: str = ",", names: list[str] | None = None) -> Iterator[Row]:
    """Yield the lines of a table; its types are found in a first pass, so they are those of `readers.read_csv`."""
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
    """Yield one row `{"text": line}` a line; empty lines are skipped."""
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
