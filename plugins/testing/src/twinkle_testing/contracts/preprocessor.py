"""Contract checks of preprocessors: columns of equal length, independent rows, unchanged arguments."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import left_alone, same, shown

Columns = Mapping[str, Sequence[Any]]
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(kw_only=True)
class PreprocessorCase(Case):
    """A preprocessor and the rows that it gets.

    Attributes:
        rows: columns, each a list with one entry per row; at least two rows.
        expected: the columns that these rows become, if they are known.
    """

    kind = "preprocessor"

    rows: Columns = field(default_factory=dict)
    expected: Columns | None = None

    def unfit(self) -> str:
        """Require rows, because every preprocessor reads other columns."""
        from twinkle.preprocessor import Preprocessor

        if self.component is Preprocessor:
            return "it is the base class of preprocessors, and does nothing by itself"
        missing = "its example gives no rows; give rows={column: [one value a row]}, with at least two rows"
        return super().unfit() or ("" if self.rows else missing)


def call(component: Any, rows: Columns) -> dict[str, list[Any]]:
    """Return the new columns, checked to be lists of one length."""
    found = component(copy.deepcopy(dict(rows)))
    require(isinstance(found, Mapping), f"it returned {shown(found)}; return a dict of columns")
    lengths = {name: len(values) for name, values in found.items()}
    require(found, "it returned no columns")
    require(len(set(lengths.values())) == 1, f"its columns differ in length: {lengths}")
    return {name: list(values) for name, values in found.items()}


def columns(case: PreprocessorCase) -> None:
    """It returns columns of one length; they equal the expected ones, if given."""
    found = call(case.build(), case.rows)
    if case.expected is not None:
        wanted = {name: list(values) for name, values in case.expected.items()}
        require(same(found, wanted), f"it returned {shown(found, 400)}; the example expects {shown(wanted, 400)}")


def messages(case: PreprocessorCase) -> None:
    """Conversations in its columns are lists of messages with a known role and content."""
    found = call(case.build(), case.rows)
    names = [name for name in ("messages", "positive", "negative") if name in found]
    if not names:
        raise NotApplicable("it makes no conversations")
    for name in names:
        for row, value in enumerate(found[name]):
            turns = value["messages"] if isinstance(value, Mapping) else value
            require(isinstance(turns, list) and turns, f"{name} of row {row} is {shown(value)}; it must be a list")
            for turn in turns:
                _check_message(turn, f"{name} of row {row}")


def user_data(case: PreprocessorCase) -> None:
    """`user_data`, if present, is a list of (key, text) pairs, or of dicts of plain JSON values, in each row."""
    found = call(case.build(), case.rows)
    if "user_data" not in found:
        raise NotApplicable("it makes no user_data")
    for row, pairs in enumerate(found["user_data"]):
        for pair in pairs:
            fine = isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            require(
                fine or (isinstance(pair, Mapping) and _is_plain(pair)),
                f"user_data of row {row} holds {shown(pair)}; use (key, text), with twinkle.data_format.pack_value for "
                "values that are not text",
            )


def batches(case: PreprocessorCase) -> None:
    """The batch size does not matter: single rows give the same result as all rows at once."""
    component = case.build()
    whole = call(component, case.rows)
    count = len(next(iter(case.rows.values())))
    require(count >= 2, f"its example has {count} row; give at least two")
    single = [call(component, {name: [values[row]] for name, values in case.rows.items()}) for row in range(count)]
    joined = {name: [value for part in single for value in part.get(name, [None])] for name in whole}
    require(same(joined, whole), f"row by row it gives {shown(joined, 300)}, at once {shown(whole, 300)}")


def rows_left_alone(case: PreprocessorCase) -> None:
    """It does not change the rows, and its result does not share their lists."""
    component, rows = case.build(), copy.deepcopy({name: list(values) for name, values in case.rows.items()})
    left_alone(component, rows, "the rows")


def deterministic(case: PreprocessorCase) -> None:
    """The same rows give the same columns, at a later call too."""
    component = case.build()
    first, second = call(component, case.rows), call(component, case.rows)
    require(same(first, second), f"two calls gave {shown(first, 300)} and {shown(second, 300)}")


def tables(case: PreprocessorCase) -> None:
    """Its result can be stored in a table: plain values, of one type in each column."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise NotApplicable("pyarrow is not installed") from error
    for name, values in call(case.build(), case.rows).items():
        if name in ("images", "videos", "audios"):
            continue
        try:
            pa.array(values)
        except (pa.ArrowException, TypeError) as error:
            require(False, f"column {name} fits into no table: {str(error).splitlines()[0]}")


def pickle(case: PreprocessorCase) -> None:
    """It can be pickled for mapping in several processes, and gives the same result there."""
    component = case.build()
    require(same(call(pickled(component), case.rows), call(component, case.rows)), "after pickling it gives other rows")


CASE = PreprocessorCase
CHECKS = (columns, messages, user_data, batches, rows_left_alone, deterministic, tables, pickle)


def _check_message(turn: Any, where: str) -> None:
    require(isinstance(turn, Mapping), f"{where} holds {shown(turn)}; a message is a dict")
    require(turn.get("role") in _ROLES, f"{where} has the role {turn.get('role')!r}; it is one of {', '.join(_ROLES)}")
    said = isinstance(turn.get("content"), str | list) or turn.get("tool_calls")
    require(said, f"{where} has a message without content: {shown(turn)}")


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
