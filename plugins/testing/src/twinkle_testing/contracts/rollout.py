"""Contract checks of rollouts: one finished trajectory for each input, in order, which begins with its turns."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.values import left_alone, same, shown

Rows = Sequence[Mapping[str, Any]]


def _prompts() -> list[dict[str, Any]]:
    questions = ("What is 2 + 3?", "Name a colour.", "Count to three.")
    return [
        {"messages": [{"role": "user", "content": text}], "user_data": [("row", str(row))]}
        for row, text in enumerate(questions)
    ]


@dataclass(kw_only=True)
class RolloutCase(Case):
    """A rollout and its inputs.

    Attributes:
        trajectories: the prompts; by default three questions.
        arguments: further keyword arguments of the call.
    """

    kind = "rollout"

    trajectories: Rows = field(default_factory=_prompts)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def call(case: RolloutCase, rows: Rows) -> list[Any]:
    """Return the finished trajectories, checked to be one for each."""
    found = case.build()(copy.deepcopy(list(rows)), **copy.deepcopy(dict(case.arguments)))
    require(isinstance(found, list), f"it returned {shown(found)}; return a list")
    require(len(found) == len(rows), f"it returned {len(found)} trajectories for {len(rows)}")
    checked: list[Any] = found
    return checked


def finished(case: RolloutCase) -> None:
    """Each trajectory is returned with its messages, followed by at least one turn of the assistant."""
    for row, (given, found) in enumerate(zip(case.trajectories, call(case, case.trajectories), strict=True)):
        before, after = list(given["messages"]), list(found.get("messages", ()))
        require(len(after) > len(before), f"trajectory {row} has {len(after)} messages, as many as before or fewer")
        for place, (old, new) in enumerate(zip(before, after, strict=False)):
            kept = old["role"] == new["role"] and old["content"] == new["content"]
            require(kept, f"message {place} of trajectory {row} became {shown(new)}")
        roles = [message["role"] for message in after[len(before) :]]
        require("assistant" in roles, f"trajectory {row} got the turns {roles}, none of the assistant")


def order(case: RolloutCase) -> None:
    """Trajectories are returned in the given order, with their other keys (`user_data`)."""
    for rows in (list(case.trajectories), list(reversed(case.trajectories))):
        for given, found in zip(rows, call(case, rows), strict=True):
            first = found["messages"][: len(given["messages"])]
            same_start = [m["content"] for m in first] == [m["content"] for m in given["messages"]]
            require(same_start, f"the place of {shown(given['messages'])} holds {shown(first)}")
            for key in ("user_data", "tools"):
                if key in given:
                    require(
                        same(_pairs(found.get(key)), _pairs(given[key])),
                        f"it lost or changed {key}: {shown(found.get(key))}",
                    )


def no_trajectories(case: RolloutCase) -> None:
    """An empty list gives an empty list."""
    call(case, [])


def trajectories_left_alone(case: RolloutCase) -> None:
    """It does not change the trajectories."""
    rollout = case.build()
    rows = copy.deepcopy([dict(row) for row in case.trajectories])
    left_alone(lambda given: rollout(given, **case.arguments), rows, "the trajectories")


def calls_apart(case: RolloutCase) -> None:
    """A second call starts from the beginning, without turns of the first one."""
    rollout = case.build()
    lengths = []
    for _ in range(2):
        found = rollout(copy.deepcopy(list(case.trajectories)), **copy.deepcopy(dict(case.arguments)))
        lengths.append(
            [message["content"] for row in found for message in row["messages"] if message["role"] == "user"]
        )
    require(lengths[0] == lengths[1], "the user turns of a second call differ from those of the first")


CASE = RolloutCase
CHECKS = (finished, order, no_trajectories, trajectories_left_alone, calls_apart)


def _pairs(value: Any) -> Any:
    return [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, list) else value
