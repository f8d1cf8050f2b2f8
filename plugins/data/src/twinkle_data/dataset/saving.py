"""Saves rows to a file: all at once or while they are read; the file has a temporary name until it is complete."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from twinkle.errors import ArgumentError, DataError, OutputError, TrainingStateError

FORMATS = ("jsonl", "json", "csv", "parquet")


def output_format(path: Path, wanted: str | None) -> str:
    """Return the format of an output file: the requested one, or that of its ending.

    Raises:
        ArgumentError: neither names a known format.
    """
    name = (wanted or path.suffix.removeprefix(".")).lower()
    if name not in FORMATS:
        from twinkle_registry import nearest

        close = nearest(name, FORMATS, 1)
        hint = f" (nearest: {close[0]!r})" if close else ""
        raise ArgumentError(f"cannot save {path}: unknown format {name!r}{hint}; format is one of {', '.join(FORMATS)}")
    return name


class RowWriter:
    """Collects rows in batches of `batch_size`, appends them to a temporary sibling, and renames that at `commit`.

    Where the columns are not known before (`columns=None`), csv and parquet take those of the first row.
    """

    def __init__(self, path: Path, file_format: str, columns: Sequence[str] | None, batch_size: int) -> None:
        self.path, self.format = path, file_format
        self.columns, self.batch_size = None if columns is None else list(columns), batch_size
        self._work = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._rows: list[Mapping[str, Any]] = []
        self._tables: list[Any] = []
        self._count = 0
        self._owner = os.getpid()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self._work.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}; choose another output file") from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row.

        Raises:
            DataError: called in another process, whose rows would be lost or doubled; or the row has a column for
                which csv or parquet has no place any more.
        """
        if os.getpid() != self._owner:
            raise DataError(
                f"saving {self.path} as rows are read works in one process only; use num_workers=0, or "
                "save_as(mode='immediate')"
            )
        if self.columns is None:
            self.columns = list(row)
        if self.format in ("csv", "parquet") and (late := [name for name in row if name not in self.columns]):
            raise DataError(
                f"{self.path}: a row has the column {late[0]!r}, but the file has {', '.join(self.columns)} as the "
                "first row does; save the rows as jsonl"
            )
        self._rows.append(row)
        if len(self._rows) >= self.batch_size:
            self._drain()

    def commit(self) -> None:
        """Write the remaining rows, and rename the file to its final name."""
        try:
            self._drain()
            if self.format == "json":
                self._file.write("\n]\n" if self._count else "[]\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self.format == "parquet":
                self._write_parquet()
            self._work.replace(self.path)
        except OSError as error:
            self.discard()
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close and remove the file."""
        if os.getpid() == self._owner:
            self._file.close()
            self._work.unlink(missing_ok=True)

    def _drain(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self.format == "parquet":
            self._tables.append(_arrow_table(rows, self.columns or [], str(self.path)))
        elif self.format == "csv":
            self._write_csv(rows)
        else:
            self._write_json(rows)
        self._count += len(rows)

    def _write_json(self, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [_json(row, self.path) for row in rows]
        if self.format == "jsonl":
            self._file.write("".join(text + "\n" for text in texts))
        else:
            self._file.write((",\n" if self._count else "[\n") + ",\n".join(texts))

    def _write_csv(self, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = self.columns or []
        table = csv.DictWriter(self._file, columns, lineterminator="\n")
        if not self._count:
            table.writeheader()
        for row in rows:
            table.writerow({name: self._cell(row.get(name)) for name in columns})

    def _cell(self, value: Any) -> Any:
        return _json(value, self.path) if isinstance(value, list | tuple | Mapping) else value

    def _write_parquet(self) -> None:
        import pyarrow
        import pyarrow.parquet

        tables = self._tables or [_arrow_table([], self.columns or [], str(self.path))]
        table = pyarrow.concat_tables(tables, promote_options="permissive")
        pyarrow.parquet.write_table(table, self._work)


def _arrow_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], target: str) -> Any:
    import pyarrow

    try:
        return pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's own errors are among them
        raise DataError(f"{target}: the rows have no common Arrow types ({error}); save them as jsonl") from error


def _json(value: Any, target: Path) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"{target}: a row has a value that is not JSON ({error}); save it as parquet") from error


Rows = Iterable[Mapping[str, Any]]


class Saving:
    """Writes the rows of one data set, and records which of them `mode="training"` has written."""

    def __init__(self) -> None:
        self._writer: RowWriter | None = None
        self._written: set[int] = set()
        self._flushed = False

    @property
    def recording(self) -> bool:
        """Whether rows are to be recorded as they are read."""
        return self._writer is not None

    def save(
        self,
        output_path: str | Path,
        file_format: str | None,
        batch_size: int,
        mode: str,
        columns: Sequence[str] | None,
        rows: Callable[[], Rows],
    ) -> None:
        """Write all of `rows()`, or start recording; arguments and errors are those of `Dataset.save_as`."""
        if mode not in ("immediate", "training"):
            raise ArgumentError(f"save_as: mode is {mode!r}; use 'immediate' or 'training'")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(f"save_as: batch_size is {batch_size!r}; give a number of rows above 0")
        if self._writer is not None and mode == "training":
            raise TrainingStateError(f"rows are being saved to {self._writer.path}; call flush_save() first")
        path = Path(output_path)
        writer = RowWriter(path, output_format(path, file_format), columns, batch_size)
        if mode == "training":
            self._writer, self._written = writer, set()
            return
        try:
            for row in rows():
                writer.write(row)
        except BaseException:
            writer.discard()
            raise
        writer.commit()

    def record(self, index: int, row: Mapping[str, Any]) -> None:
        """Write row `index`, unless it was written already or nothing is being recorded."""
        if self._writer is not None and index not in self._written:
            self._writer.write(row)
            self._written.add(index)

    def flush(self) -> None:
        """Complete the file with the rows recorded so far; without effect if it is complete."""
        if self._writer is None and self._flushed:
            return
        if self._writer is None:
            raise TrainingStateError("flush_save() completes a save_as(..., mode='training'), but none was begun")
        writer, self._writer = self._writer, None
        writer.commit()
        self._flushed = True

    def refuse_change(self, change: str) -> None:
        """Raise `TrainingStateError` if rows are being recorded, because their indices would change."""
        if self._writer is not None:
            raise TrainingStateError(f"rows are being saved to {self._writer.path}; call flush_save() before {change}")
