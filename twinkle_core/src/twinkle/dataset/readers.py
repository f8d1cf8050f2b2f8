"""Local files to tables: jsonl, json, csv, parquet and txt, with errors that name the file and the line."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from twinkle.dataset.table import Table, from_columns, from_rows
from twinkle.errors import DataError


def read_file(path: Path, options: Mapping[str, Any]) -> Table:
    """Read one file by its ending.

    Args:
        path: an existing file.
        options: keywords of the reader, see the functions below.

    Raises:
        DataError: the format is unknown, or the file is malformed.
        ArgumentError: the reader of this format does not take an option.
    """
    from twinkle_registry import check_keywords, nearest

    reader = READERS.get(path.suffix.lower())
    if reader is None:
        close = nearest(path.suffix.lower(), READERS, 1)
        hint = f" (nearest: {close[0]})" if close else ""
        raise DataError(
            f"{path}: unknown format {path.suffix or '(no ending)'!r}{hint}; a data file ends in {', '.join(READERS)}"
        )
    check_keywords(reader, options, what=f"data set {path.name}", args=(path,))
    try:
        return reader(path, **options)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}: {error.reason}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_jsonl(path: Path) -> Table:
    """Read one JSON object a line; empty lines are skipped."""
    return from_rows(_json_lines(path), str(path))


def read_json(path: Path) -> Table:
    """Read a list of objects, an object of columns (lists of one length), or JSON lines after all."""
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
    import warnings

    import pandas  # type: ignore[import-untyped]

    errors = pandas.errors
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", errors.ParserWarning)  # else cells beyond the columns are dropped
            # index_col=False: else a first line with one cell too many moves every column by one.
            frame = pandas.read_csv(path, sep=sep, names=names, dtype=object, keep_default_na=False, index_col=False)
    except (errors.ParserError, errors.EmptyDataError, errors.ParserWarning) as error:
        raise DataError(f"{path}: not a table separated by {sep!r}: {str(error).strip()}") from error
    return from_columns({str(name): _typed(frame[name].tolist()) for name in frame}, str(path))


def read_parquet(path: Path, columns: list[str] | None = None) -> Table:
    """Read a Parquet file.

    Args:
        path: the file.
        columns: the names of the columns wanted; by default all.
    """
    import datasets
    import pyarrow
    import pyarrow.parquet
    from datasets.table import InMemoryTable

    from twinkle.dataset.table import fingerprint

    try:
        names = pyarrow.parquet.read_schema(path).names
        if missing := [name for name in columns or () if name not in names]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(names)}")
        table = pyarrow.parquet.read_table(path, columns=columns)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    return Table(datasets.Dataset(InMemoryTable(table), fingerprint=fingerprint()))


def read_text(path: Path) -> Table:
    """Read one row `{"text": line}` a line; empty lines are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        lines = [line.rstrip("\r\n") for line in file]
    return from_columns({"text": [line for line in lines if line.strip()]}, str(path))


READERS: dict[str, Callable[..., Table]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_text,
}


def _typed(cells: list[Any]) -> list[Any]:
    """Return the cells of a column: None where empty, and numbers where no cell would be written in another way."""
    texts = [cell if isinstance(cell, str) and cell else None for cell in cells]  # NaN: the line ended before
    for number in (int, float):
        try:
            values = [None if text is None else number(text) for text in texts]
        except ValueError:
            continue
        if all(value is None or _kept(value, text) for value, text in zip(values, texts, strict=True)):
            return values
    return list(texts)


def _kept(value: int | float, text: str | None) -> bool:
    """Say whether a number is written like the text, and has a place in Arrow: 64 bits, finite."""
    return repr(value) == text and (math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**63)


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON: {error.msg} (column {error.colno}): {line.strip()[:60]!r}"
                ) from error
            yield _row(row, f"{path}, line {number}")


def _row(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, but this is a {type(value).__name__}")
    return value


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False
