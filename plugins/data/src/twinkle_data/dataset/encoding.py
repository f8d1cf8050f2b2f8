"""Encodes a batch of columns by a template, and says which row could not be encoded and why."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError, EncodeError, TwinkleError

_NUMBERED = re.compile(r"row 0: ")
_PAIRS = (("positive", "negative"), ("chosen", "rejected"))


class EncodeCall:
    """`template.batch_encode` for `map`, less the rows that come out without tokens.

    With the template's `truncation_strategy="delete"` a row that cannot be encoded is left out too; otherwise it is an
    `EncodeError` with the number of the row in the data set. Errors of ours that are no `DataError` (the template's
    model is missing, or a package) are no row's problem and pass as they are.
    """

    def __init__(self, template: Any, options: Mapping[str, Any]) -> None:
        self.template, self.options = template, dict(options)

    def __call__(self, columns: dict[str, list[Any]], indices: Sequence[int | str]) -> dict[str, list[Any]]:
        """Return the encoded columns; `indices` are the numbers of the rows in the data set."""
        try:
            encoded = self.template.batch_encode(columns, **self.options)
        except Exception as error:
            if _of_template(error):
                raise
            encoded = self._row_by_row(columns, indices, error)
        return _with_tokens(encoded, type(self.template).__name__)

    def _row_by_row(
        self, columns: dict[str, list[Any]], indices: Sequence[int | str], cause: Exception
    ) -> dict[str, list[Any]]:
        from twinkle.preprocessor.base import Preprocessor

        forgiving = getattr(self.template, "truncation_strategy", None) == "delete"
        rows: list[dict[str, Any]] = []
        for place, index in enumerate(indices):
            single = {name: [values[place]] for name, values in columns.items()}
            try:
                rows += Preprocessor.map_col_to_row(self.template.batch_encode(single, **self.options))
            except Exception as error:
                if _of_template(error):
                    raise
                if forgiving and isinstance(error, EncodeError):
                    continue
                raise EncodeError(f"row {index}: {_reason(error)}") from error
        if not forgiving:  # each row alone is fine: the fault is in encoding them together
            raise EncodeError(f"rows {indices[0]} to {indices[-1]}: {_reason(cause)}") from cause
        return Preprocessor.map_row_to_col(rows) or {"input_ids": []}


class CheckCall:
    """`template.batch_check` for `map`: the rows that it lets pass, as they are."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def __call__(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns of the rows that can be encoded."""
        from twinkle.preprocessor.base import Preprocessor

        rows = Preprocessor.map_col_to_row(columns)
        passed = [row for row in self.rows(rows) if row is not None]
        return Preprocessor.map_row_to_col(passed, keys=None if passed else columns)

    def rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Return each row, or None where it cannot be encoded."""
        return list(self.template.batch_check(rows))


def _of_template(error: Exception) -> bool:
    return isinstance(error, TwinkleError) and not isinstance(error, DataError)


def _reason(error: Exception) -> str:
    text = _NUMBERED.sub("", str(error), count=1) if isinstance(error, EncodeError) else ""
    return text or f"{type(error).__name__}: {error}"


def _with_tokens(encoded: Any, template: str) -> dict[str, list[Any]]:
    if not isinstance(encoded, Mapping) or not ("input_ids" in encoded or _pair(encoded)):
        shown = ", ".join(map(str, encoded)) if isinstance(encoded, Mapping) else type(encoded).__name__
        raise EncodeError(f"{template}.batch_encode returned no column input_ids for columns; it returned {shown}")
    keep = [place for place, length in enumerate(_lengths(encoded)) if length]
    return {name: [values[place] for place in keep] for name, values in encoded.items()}


def _pair(encoded: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if all(side in encoded for side in pair)), None)


def _lengths(encoded: Mapping[str, Sequence[Any]]) -> list[int]:
    if "input_ids" in encoded:
        return [0 if ids is None else len(ids) for ids in encoded["input_ids"]]
    sides = [encoded[side] for side in _pair(encoded) or ()]
    return [min(len(side["input_ids"]) for side in row) for row in zip(*sides, strict=True)]
