"""What a filter must keep: True or False for each row, nothing of the row changed, the same again after `reset`."""

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
    """A filter and the rows that it judges.

    Attributes:
        rows: rows to keep or drop; by default six conversations, the last one equal to the first.
        kept: the expected answers, one a row, if they are known.
    """

    kind = "filter"

    rows: Sequence[Mapping[str, Any]] = field(default_factory=_rows)
    kept: Sequence[bool] | None = None


def call(component: Any, rows: Sequence[Any]) -> list[bool]:
    """Return the answers of one pass, checked to be truth values."""
    found = [component(copy.deepcopy(row)) for row in rows]
    for row, answer in enumerate(found):
        require(type(answer) is bool, f"row {row} got {shown(answer)}; return True or False")
    return found


def decision(case: FilterCase) -> None:
    """It answers each row with True or False, as expected if that is known."""
    found = call(case.build(), case.rows)
    if case.kept is not None:
        require(found == list(case.kept), f"it answered {found}; the example expects {list(case.kept)}")


def second_pass(case: FilterCase) -> None:
    """After `reset` a second pass over the rows gives the same answers."""
    component = case.build()
    first = call(component, case.rows)
    getattr(component, "reset", lambda: None)()
    second = call(component, case.rows)
    require(first == second, f"the first pass gave {first}, the second {second}; forget the rows seen in reset()")


def apart(case: FilterCase) -> None:
    """Two filters are independent: the rows that one has seen do not change the answers of the other."""
    alone = call(case.build(), case.rows)
    one, two = case.build(), case.build()
    call(one, case.rows)
    require(
        call(two, case.rows) == alone, "another instance's rows changed its answers; keep what it remembers in self"
    )


def rows_left_alone(case: FilterCase) -> None:
    """It changes no row."""
    component = case.build()
    for row in case.rows:
        left_alone(component, copy.deepcopy(dict(row)), "the row")


def pickle(case: FilterCase) -> None:
    """It pickles, so that several processes can filter, and answers the same there."""
    component = case.build()
    copied = pickled(component)
    require(call(copied, case.rows) == call(component, case.rows), "after pickling it gives other answers")


CASE = FilterCase
CHECKS = (decision, second_pass, apart, rows_left_alone, pickle)
