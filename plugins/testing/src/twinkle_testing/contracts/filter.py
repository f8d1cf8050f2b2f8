"""Contract checks of filters: True or False for each row, unchanged rows, `reset` clears the state."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.conversations import conversation, trajectories
from twinkle_testing.contracts.values import left_alone, shown


def _rows() -> list[dict[str, Any]]:
    return [{"messages": conversation()}, *trajectories(), {"messages": conversation()}]


@dataclass(kw_only=True)
class FilterCase(Case):
    """A filter and its rows.

    Attributes:
        rows: rows to keep or drop; by default six conversations, the last one equal to the first.
        kept: the expected results, one per row, if known.
    """

    kind = "filter"

    rows: Sequence[Mapping[str, Any]] = field(default_factory=_rows)
    kept: Sequence[bool] | None = None


def call(component: Any, rows: Sequence[Any]) -> list[bool]:
    """Return the results of one pass, and check that they are bools."""
    found = [component(copy.deepcopy(row)) for row in rows]
    for row, answer in enumerate(found):
        require(type(answer) is bool, f"row {row} got {shown(answer)}; return True or False")
    return found


def decision(case: FilterCase) -> None:
    """It returns True or False for each row; the results equal the expected ones, if given."""
    found = call(case.build(), case.rows)
    if case.kept is not None:
        require(found == list(case.kept), f"it answered {found}; the example expects {list(case.kept)}")


def second_pass(case: FilterCase) -> None:
    """After `reset` a second pass over the rows gives the same answers."""
    component = case.build()
    first = call(component, case.rows)
    getattr(component, "reset", lambda: None)()
    second = call(component, case.rows)
    require(
        first == second,
        f"the first pass gave {first}, the second {second}; reset() must clear the rows that it has seen",
    )


def apart(case: FilterCase) -> None:
    """Two filters are independent: the rows that one has seen do not change the results of the other."""
    alone = call(case.build(), case.rows)
    one, two = case.build(), case.build()
    call(one, case.rows)
    require(call(two, case.rows) == alone, "the rows of another instance changed its results; keep its state in self")


def rows_left_alone(case: FilterCase) -> None:
    """It does not change the rows."""
    component = case.build()
    for row in case.rows:
        left_alone(component, copy.deepcopy(dict(row)), "the row")


def pickle(case: FilterCase) -> None:
    """It can be pickled for filtering in several processes, and gives the same results there."""
    component = case.build()
    copied = pickled(component)
    require(call(copied, case.rows) == call(component, case.rows), "after pickling it gives other answers")


CASE = FilterCase
CHECKS = (decision, second_pass, apart, rows_left_alone, pickle)
