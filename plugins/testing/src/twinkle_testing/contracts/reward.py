"""Contract checks of rewards: one finite number for each trajectory, in order, for any text."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, Violation, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.conversations import ODD_TEXTS, trajectories
from twinkle_testing.contracts.values import left_alone, same, shown


@dataclass(kw_only=True)
class RewardCase(Case):
    """A reward and trajectories to score.

    Attributes:
        trajectories: conversations to score; by default four with a question, an answer and `ground_truth`.
        arguments: further keyword arguments of the call, each with one entry per trajectory.
        scores: the expected scores, if they are known.
    """

    kind = "reward"

    trajectories: Sequence[Mapping[str, Any]] = field(default_factory=trajectories)
    arguments: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    scores: Sequence[float] | None = None


def call(reward: Any, rows: Sequence[Any], arguments: Mapping[str, Any]) -> list[float]:
    """Return the scores, and check that there is one finite number per trajectory."""
    found: list[float] = reward(copy.deepcopy(list(rows)), **copy.deepcopy(dict(arguments)))
    require(isinstance(found, list), f"it returned {shown(found)}; return a list with one number a trajectory")
    require(len(found) == len(rows), f"it gave {len(found)} scores for {len(rows)} trajectories")
    for place, score in enumerate(found):
        plain = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
        require(plain, f"score {place} is {shown(score)}; it must be a finite Python number")
    return found


def scores(case: RewardCase) -> None:
    """It returns a list of finite Python numbers, one per trajectory; they equal the expected ones, if given."""
    found = call(case.build(), case.trajectories, case.arguments)
    if case.scores is not None:
        require(
            same(found, [float(s) for s in case.scores], tolerance=1e-6) or found == list(case.scores),
            f"the scores are {found}; the example expects {list(case.scores)}",
        )


def order(case: RewardCase) -> None:
    """Trajectories in another order get the same scores in that order."""
    found = call(case.build(), case.trajectories, case.arguments)
    backwards = {name: list(reversed(values)) for name, values in case.arguments.items()}
    turned = call(case.build(), list(reversed(case.trajectories)), backwards)
    require(same(turned, list(reversed(found)), tolerance=1e-9), f"scores {found} became {turned} in reversed order")


def one_by_one(case: RewardCase) -> None:
    """A score does not depend on other trajectories of the call; a reward that compares them uses `skip`."""
    together = call(case.build(), case.trajectories, case.arguments)
    for place, row in enumerate(case.trajectories):
        arguments = {name: [values[place]] for name, values in case.arguments.items()}
        (score,) = call(case.build(), [row], arguments)
        require(
            math.isclose(score, together[place], rel_tol=1e-6, abs_tol=1e-6),
            f"trajectory {place} gets {together[place]} among {len(together)} and {score} alone; a reward meant "
            'to compare them gives skip={"one_by_one": "..."} in its example',
        )


def no_trajectories(case: RewardCase) -> None:
    """An empty list of trajectories gives an empty list of scores."""
    call(case.build(), [], {name: [] for name in case.arguments})


def any_text(case: RewardCase) -> None:
    """Every text gets a score: empty text, half a tag, broken JSON, very long text."""
    reward, row = case.build(), case.trajectories[0]
    arguments = {name: [values[0]] for name, values in case.arguments.items()}
    for text in ODD_TEXTS:
        try:
            call(reward, [_saying(row, text)], arguments)
        except Violation:
            raise
        except Exception as error:  # a reward may raise any exception
            raise Violation(f"the answer {shown(text, 30)} makes it raise {type(error).__name__}: {error}") from error


def other_arguments(case: RewardCase) -> None:
    """Arguments for other rewards are ignored, as the `**kwargs` of the contract define."""
    more = {**case.arguments, "column_of_another_reward": [None] * len(case.trajectories)}
    call(case.build(), case.trajectories, more)


def deterministic(case: RewardCase) -> None:
    """The same trajectories get the same scores in every call."""
    reward = case.build()
    first, second = (call(reward, case.trajectories, case.arguments) for _ in range(2))
    require(first == second, f"two calls gave {first} and {second}")


def trajectories_left_alone(case: RewardCase) -> None:
    """It does not change the trajectories."""
    reward = case.build()
    left_alone(lambda rows: reward(rows, **case.arguments), copy.deepcopy(list(case.trajectories)), "the trajectories")


def pickle(case: RewardCase) -> None:
    """It can be pickled, and gives the same scores in another process."""
    reward = case.build()
    expected = call(reward, case.trajectories, case.arguments)
    require(call(pickled(reward), case.trajectories, case.arguments) == expected, "after pickling it scores otherwise")


CASE = RewardCase
CHECKS = (
    scores,
    order,
    one_by_one,
    no_trajectories,
    any_text,
    other_arguments,
    deterministic,
    trajectories_left_alone,
    pickle,
)


def _saying(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    *before, last = row["messages"]
    return {**row, "messages": [*before, {**last, "content": text}]}
