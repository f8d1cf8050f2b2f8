"""Which row of the source an error means: a run divides and chooses rows, and its author looks for them in a file."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from twinkle.errors import EncodeError

_ROW = re.compile(r"row (\d+): ")


@contextmanager
def told_as_in_source(name: str, rows: Sequence[int] | None) -> Iterator[None]:
    """Give the row of an `EncodeError` within the block its number in the source, and its line in a jsonl file.

    Args:
        name: the data set.
        rows: its rows that are encoded, in their order; None where nobody knows.
    """
    try:
        yield
    except EncodeError as error:
        found = _ROW.match(str(error))
        if rows is None or found is None:
            raise EncodeError(f"data set {name}: {error}") from error
        number = rows[int(found[1])]
        line = _line(Path(name).expanduser(), number)
        raise EncodeError(f"data set {name}, {line or f'row {number}'}: {str(error)[found.end() :]}") from error


def _line(path: Path, row: int) -> str:
    """Return where a row stands in a jsonl file, whose empty lines are no rows; nothing for other sources."""
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return ""
    with path.open(encoding="utf-8-sig") as file:
        lines = (number for number, text in enumerate(file, start=1) if text.strip())
        return next((f"row {row} (line {number})" for number in islice(lines, row, None)), "")
