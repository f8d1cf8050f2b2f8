"""What is kept of a step that failed: its rows, to be looked at."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinkle.errors import NonFiniteError
from twinkle.paths import write_text
from twinkle_recipes.show.numbers import plain


@contextmanager
def keep_rows(folder: Path, rows: Any) -> Iterator[None]:
    """Write the rows of a pass whose loss is not finite to `nonfinite_batch.json`, and name the file in the error.

    Args:
        folder: of the run.
        rows: what to keep where the error itself has none.
    """
    try:
        yield
    except NonFiniteError as error:
        kept = folder / "nonfinite_batch.json"
        write_text(kept, json.dumps(error.inputs or rows, default=plain, ensure_ascii=False) + "\n")
        raise NonFiniteError(f"{error}; its rows are kept in {kept}", error.inputs) from error
