"""Stores rows in Arrow memory, and returns them unchanged.

Arrow wants one type a column, gives every struct the keys of all others (as None), and knows no text beside lists. So a
column with dicts in it is kept as JSON text, and tables are joined by the widest type of each column.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.errors import DataError
from twinkle_data.dataset.calls import clean_column, require_one_length

_CHUNK = 10_000


@dataclass(frozen=True)
class Table:
    """A `datasets.Dataset` and the names of its columns with JSON text."""

    hf: Any
    packed: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.hf)

    @property
    def names(self) -> list[str]:
        """The column names."""
        return list(self.hf.column_names)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row, restored."""
        return self.restore_row(self.hf[index])

    def columns(self, selection: Any) -> dict[str, list[Any]]:
        """Return the columns of a slice or a list of indices, restored."""
        return self.restore_columns(self.hf[selection])

    def batches(self, size: int = 1000) -> Iterator[dict[str, list[Any]]]:
        """Yield all rows as columns, `size` rows at a time."""
        for start in range(0, len(self), size):
            yield self.columns(slice(start, start + size))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows."""
        for columns in self.batches():
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    def restore_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return one row of `hf` in its original form."""
        return {name: values[0] for name, values in self.restore_columns({k: [v] for k, v in row.items()}).items()}

    def restore_columns(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return columns of `hf` in their original form."""
        return {name: self._restore(name, columns[name]) for name in columns}

    def select(self, indices: Iterable[int]) -> "Table":
        """Return the rows of these indices, in this order."""
        return Table(self.hf.select(indices), self.packed)

    def replaced(self, hf: Any) -> "Table":
        """Return the same columns over other rows."""
        return Table(hf, self.packed & set(hf.column_names))

    def _restore(self, name: str, values: Sequence[Any]) -> list[Any]:
        if name in self.packed:
            values = [None if value is None else json.loads(value) for value in values]
        return clean_column(name, list(values), deep=name not in self.packed)


def from_rows(rows: Iterable[Mapping[str, Any]], source: str) -> Table:
    """Return a table of rows; missing keys are None."""
    from twinkle.preprocessor.base import Preprocessor

    tables: list[Table] = []
    chunk: list[Mapping[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK:
            tables.append(from_columns(Preprocessor.map_row_to_col(chunk), source, len(tables) * _CHUNK))
            chunk = []
    if chunk or not tables:
        tables.append(from_columns(Preprocessor.map_row_to_col(chunk), source, len(tables) * _CHUNK))
    return join(tables, source)


def from_columns(columns: Mapping[str, Sequence[Any]], source: str, first: int | None = 0) -> Table:
    """Return a table of columns of equal length.

    Args:
        columns: the values by name.
        source: how errors name where they come from.
        first: the number of the first row, for errors; None where it is not known.

    Raises:
        DataError: lengths differ, one column mixes types that have no common one, or a text is not valid Unicode.
    """
    import datasets

    require_one_length(columns, source)
    packed: dict[str, list[str | None]] = {}
    for name, values in columns.items():
        if any(_has_dict(value) for value in values) and (texts := _pack(values)) is not None:
            packed[name] = texts
    arrow = {str(name): packed.get(name, list(values)) for name, values in columns.items()}
    try:
        hf = datasets.Dataset.from_dict(arrow)
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's own errors are among them
        raise DataError(f"{source}: {_culprit(arrow, first) or error}") from error
    return Table(hf, frozenset(packed))


def from_arrow(table: Any) -> Table:
    """Return a `pyarrow.Table` as it is, without a copy."""
    import datasets
    from datasets.table import InMemoryTable

    return Table(datasets.Dataset(InMemoryTable(table), fingerprint=fingerprint()))


def join(tables: Sequence[Table], source: str) -> Table:
    """Return all rows of the tables, one after the other; columns that a table lacks are None.

    Raises:
        DataError: a column has types that do not fit together.
    """
    import pyarrow

    if len(tables) == 1:
        return tables[0]
    packed = frozenset().union(*(table.packed for table in tables))
    unified = [pack_columns(table, packed) for table in tables]
    parts = [_arrow(table.hf).replace_schema_metadata(None) for table in unified]
    try:
        merged = pyarrow.concat_tables(parts, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise DataError(f"{source}: the columns do not fit together: {error}; bring them to one form by map") from error
    return Table(_from_arrow(merged, [table.hf.features for table in unified]), packed)


def pack_columns(table: Table, names: Iterable[str]) -> Table:
    """Return the table with these columns, if present, stored as JSON text."""
    import pyarrow

    columns = [name for name in names if name in table.names and name not in table.packed]
    if not columns:
        return table
    arrow = _arrow(table.hf)
    restored = {name: clean_column(name, arrow.column(name).to_pylist(), deep=True) for name in columns}
    for name in columns:
        texts = _pack(restored[name])
        if texts is None:
            raise DataError(f"column {name!r} holds values that are not plain JSON in one set and dicts in another")
        arrow = arrow.set_column(arrow.column_names.index(name), name, pyarrow.array(texts, pyarrow.string()))
    features = {k: v for k, v in table.hf.features.items() if k not in columns}
    return Table(_from_arrow(arrow.replace_schema_metadata(None), [features]), table.packed | set(columns))


def fingerprint() -> str:
    """Return a unique fingerprint of rows; hashing a gigabyte of content would take ten seconds."""
    return uuid.uuid4().hex[:16]


def _arrow(hf: Any) -> Any:
    if getattr(hf, "_indices", None) is not None:
        return hf.with_format("arrow")[:]
    return hf.data.table


def _from_arrow(arrow: Any, features: Sequence[Mapping[str, Any]]) -> Any:
    """Return a data set; features (such as images) that all parts agree on are kept."""
    import datasets
    from datasets.table import InMemoryTable

    inferred = datasets.Features.from_arrow_schema(arrow.schema)
    for name in arrow.column_names:
        types = [part[name] for part in features if name in part and part[name] != datasets.Value("null")]
        if types and all(feature == types[0] for feature in types):
            inferred[name] = types[0]
    info = datasets.DatasetInfo(features=inferred)
    return datasets.Dataset(InMemoryTable(arrow.cast(inferred.arrow_schema)), info=info, fingerprint=fingerprint())


def _has_dict(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, list | tuple) and value and (value[0] is None or isinstance(value[0], Mapping | list | tuple)):
        return any(_has_dict(item) for item in value)
    return False


def _pack(values: Sequence[Any]) -> list[str | None] | None:
    """Return each value as JSON text, or None if they are not plain data (images, bytes)."""
    try:
        return [None if value is None else json.dumps(value, ensure_ascii=False, default=_plain) for value in values]
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)  # numpy arrays and torch tensors
    if to_list is None:
        raise TypeError(f"{type(value).__name__} is no JSON")
    return to_list()


def _culprit(columns: Mapping[str, Sequence[Any]], first: int | None) -> str:
    import pyarrow

    for name, values in columns.items():
        try:
            pyarrow.array(values)
        except UnicodeEncodeError:
            return _surrogate(name, values, first)
        except (pyarrow.ArrowException, TypeError, OverflowError) as error:
            kinds = sorted({type(value).__name__ for value in values if value is not None})
            return f"column {name!r} mixes types ({', '.join(kinds)}): {error}"
    return ""


def _surrogate(name: str, values: Sequence[Any], first: int | None) -> str:
    import pyarrow

    for place, value in enumerate(values):
        try:
            pyarrow.array([value])
        except UnicodeEncodeError as error:
            row = f"row {first + place}, " if first is not None else ""
            around = error.object[max(error.start - 20, 0) : error.end + 20]
            return (
                f"{row}column {name!r}: not valid Unicode, a lone surrogate in {around!a}; repair the text, for "
                "example by text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            )
    return ""
