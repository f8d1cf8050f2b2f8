"""The tracker that writes one JSON line a step: readable with any tool, complete after every step."""

import json
import math
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from twinkle.errors import ArgumentError, OutputError
from twinkle.paths import write_text
from twinkle.tracker import Tracker
from twinkle_registry import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from twinkle.run import Run


class JsonlTracker(Tracker):
    """Appends `{"step": n, "loss": ..., ...}` to a file of the run's folder and flushes it after each line.

    Every line is valid JSON: a NaN or infinite number is written as `null`. A run that continues in a folder drops the
    lines from its first new step on (and a line cut off by a crash), so that no step stands there twice.

    Args:
        filename: name of the file inside `run.folder`.

    Raises:
        ArgumentError: `filename` is not the bare name of a file.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        if not filename or "/" in filename or "\\" in filename or filename in (".", ".."):
            raise ArgumentError(f"JsonlTracker: filename {filename!r} must be a file name without a folder")
        self.filename = filename
        self._file: IO[str] | None = None

    @hookimpl
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Append the numbers of step `step`."""
        if self._file is None:
            self._file = _open_before(run.folder / self.filename, step)
        line = {"step": step, **{name: plain_number(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def plain_number(value: Any) -> int | float | str | None:
    """Return `value` as JSON can hold it: text and integers as they are, other numbers as float, non-finite as None."""
    if isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _open_before(path: "Path", step: int) -> IO[str]:
    """Open `path` for appending, with only whole lines of steps before `step` left in it."""
    try:
        if path.exists():
            lines = path.read_text(encoding="utf-8").split("\n")
            write_text(path, "".join(f"{line}\n" for line in lines if _is_before(line, step)))
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _is_before(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False
