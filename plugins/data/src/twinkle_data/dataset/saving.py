"""What `save_as` and `flush_save` share over all kinds of data sets: all rows at once, or each row when it is read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_data.dataset.writer import RowWriter, output_format

Rows = Iterable[Mapping[str, Any]]


class Saving:
    """Writes the rows of one data set, and remembers which of them `mode="training"` has written."""

    def __init__(self) -> None:
        self._writer: RowWriter | None = None
        self._written: set[int] = set()

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
        """Write all of `rows()` now, or begin to record; arguments and errors are those of `Dataset.save_as`."""
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
        """Complete the file with the rows recorded so far."""
        if self._writer is None:
            raise TrainingStateError("flush_save() completes a save_as(..., mode='training'), but none was begun")
        writer, self._writer = self._writer, None
        writer.commit()

    def refuse_change(self, change: str) -> None:
        """Raise `TrainingStateError` if rows are being recorded: others would now come under their numbers."""
        if self._writer is not None:
            raise TrainingStateError(f"rows are being saved to {self._writer.path}; call flush_save() before {change}")
