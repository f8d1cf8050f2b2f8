"""`QualityPreprocessor`: applies filters of conversations one after the other, and logs what they drop."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import Preprocessor

Row = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]
Rows = Columns | Sequence[Mapping[str, Any]]
REASON = "drop_reason"


class RowFilter(ABC):
    """Keeps, changes or drops rows with `messages`.

    A call takes columns or rows, and returns two lists of rows: those that are kept, and those that are dropped, with
    the reason under `drop_reason`. `Dataset.map` takes filters in a `QualityPreprocessor`.
    """

    @abstractmethod
    def judge(self, row: Row) -> Row | str:
        """Return the row that is kept, or the reason for which it is dropped."""

    def __call__(self, rows: Rows) -> tuple[list[Row], list[Row]]:
        """Return the rows that are kept, and those that are dropped.

        Raises:
            DataError: a row has no list `messages`.
        """
        kept: list[Row] = []
        dropped: list[Row] = []
        for number, row in enumerate(as_rows(rows)):
            if not isinstance(row.get("messages"), list):
                raise DataError(
                    f"{type(self).__name__}: row {number} has no list 'messages' (it has: {', '.join(row)})"
                )
            found = self.judge(row)
            if isinstance(found, str):
                dropped.append({**row, REASON: found})
            else:
                kept.append(found)
        return kept, dropped


class QualityPreprocessor(Preprocessor):
    """Applies filters to rows with `messages`, in order; each sees the rows that the ones before kept.

    Args:
        pipeline: filters: each takes rows and returns `(kept, dropped)`.
        dropped_log_path: a jsonl file to which dropped rows are appended; "" writes none.

    Raises:
        ArgumentError: a filter cannot be called.
    """

    def __init__(
        self, pipeline: Iterable[Callable[[list[Row]], tuple[list[Row], list[Row]]]], dropped_log_path: str | Path = ""
    ) -> None:
        self.pipeline = list(pipeline)
        for step in self.pipeline:
            if isinstance(step, type) or not callable(step):
                raise ArgumentError(
                    f"QualityPreprocessor: a filter is {step!r}; give an instance, such as HardFilter()"
                )
        self.dropped_log_path = str(dropped_log_path)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the columns of the rows that all filters keep.

        Raises:
            DataError: a filter does not return two lists.
        """
        kept = as_rows(rows)
        for step in self.pipeline:
            found = step(kept)
            if not isinstance(found, tuple) or len(found) != 2:
                raise DataError(f"{type(step).__name__} returned no pair (kept, dropped) of lists of rows")
            kept = list(found[0])
            self._log(found[1])
        return self.map_row_to_col(kept, keys=None if kept else rows)

    def _log(self, dropped: Sequence[Row]) -> None:
        if not self.dropped_log_path or not dropped:
            return
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in dropped)
        path = Path(self.dropped_log_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write in append mode, so that lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)


def as_rows(rows: Rows) -> list[Row]:
    """Return columns or rows as a list of rows."""
    return Preprocessor.map_col_to_row(rows) if isinstance(rows, Mapping) else [dict(row) for row in rows]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def of_role(row: Mapping[str, Any], role: str) -> list[Mapping[str, Any]]:
    """Return the messages of a role."""
    return [message for message in row["messages"] if message.get("role") == role]


def with_texts(row: Row, change: Callable[[str], str], roles: Sequence[str] | None = None) -> Row:
    """Return a row with changed texts, in messages of `roles` (None are all)."""
    return {
        **row,
        "messages": [_changed(m, change) if roles is None or m.get("role") in roles else m for m in row["messages"]],
    }


def _changed(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed = dict(message)
    for key in ("content", "reasoning_content"):
        if isinstance(changed.get(key), str):
            changed[key] = change(changed[key])
    if isinstance(changed.get("content"), list):
        changed["content"] = [
            {**part, "text": change(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in changed["content"]
        ]
    return changed
