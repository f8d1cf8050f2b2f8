"""What an advantage estimator must keep: one float32 a row, group by group, for rewards in any form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.testing.contracts.case import Case, refusal, require
from twinkle.testing.contracts.common import pickled
from twinkle.testing.contracts.values import left_alone, same, shown

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("group", "batch", "none")


@dataclass(kw_only=True)
class AdvantageCase(Case):
    """An estimator and the rewards that it gets.

    Attributes:
        rewards: one number a row.
        num_generations: rows a group.
        arguments: further keyword arguments of the call.
    """

    kind = "advantage"

    rewards: Sequence[float] = (1.0, 0.0, 0.5, 2.0, 0.0, 0.0, 1.0, 0.25)
    num_generations: int = 4
    arguments: Mapping[str, Any] = field(default_factory=dict)


def call(case: AdvantageCase, rewards: Any, **options: Any) -> "Tensor":
    """Return the advantages, checked to be float32 `[B]`, finite and without gradient."""
    import torch

    found: Tensor = case.build()(rewards, **{"num_generations": case.num_generations, **case.arguments, **options})
    require(isinstance(found, torch.Tensor), f"it returned {shown(found)}; return a tensor")
    require(found.shape == (len(rewards),), f"the shape is {list(found.shape)} for {len(rewards)} rewards")
    require(found.dtype == torch.float32, f"the dtype is {found.dtype}; it must be float32")
    require(not found.requires_grad, "the advantages have a gradient")
    require(bool(torch.isfinite(found).all()), f"not all of them are finite: {found.tolist()}")
    return found


def shape(case: AdvantageCase) -> None:
    """It returns finite float32 `[B]` without gradient, for each `scale`, and `scale="group"` is the default."""
    for scale in _SCALES:
        call(case, list(case.rewards), scale=scale)
    default = call(case, list(case.rewards))
    require(same(default, call(case, list(case.rewards), scale="group")), "without scale it is not as with 'group'")


def any_sequence(case: AdvantageCase) -> None:
    """A list, a tuple, whole numbers and tensors of any float dtype give the same."""
    import torch

    expected = call(case, list(case.rewards))
    for rewards in (tuple(case.rewards), torch.tensor(case.rewards), torch.tensor(case.rewards, dtype=torch.float64)):
        found = call(case, rewards)
        require(
            same(found, expected, tolerance=1e-6),
            f"{type(rewards).__name__} gives {found.tolist()}, not {expected.tolist()}",
        )
    whole = [round(reward) for reward in case.rewards]
    fine = same(call(case, whole), call(case, [float(reward) for reward in whole]), tolerance=1e-6)
    require(fine, "whole numbers give other advantages than the same numbers as fractions")


def groups_apart(case: AdvantageCase) -> None:
    """With `scale` "group" and "none", what one group gets does not depend on another's rewards."""
    size, rewards = case.num_generations, list(case.rewards)
    others = [*rewards[:size], *(3.0 - reward * reward for reward in rewards[size:])]
    for scale in ("group", "none"):
        before, after = (call(case, values, scale=scale)[:size] for values in (rewards, others))
        message = (
            f"with scale={scale!r} the first group's {before.tolist()} became {after.tolist()} by another's rewards"
        )
        require(same(before, after, tolerance=1e-6), message)


def order(case: AdvantageCase) -> None:
    """Groups in another order, and rows of a group in another order, get the same advantages in that order."""
    size, rewards = case.num_generations, list(case.rewards)
    groups = [list(range(start, start + size)) for start in range(0, len(rewards), size)]
    for rows in ([row for group in reversed(groups) for row in group], [row for g in groups for row in reversed(g)]):
        for scale in _SCALES:
            expected = call(case, rewards, scale=scale)[rows]
            found = call(case, [rewards[row] for row in rows], scale=scale)
            require(same(found, expected, tolerance=1e-5), f"with scale={scale!r}, rows {rows} got {found.tolist()}")


def better_is_higher(case: AdvantageCase) -> None:
    """Of two rows of a group the one with the higher reward has no lower advantage."""
    size = case.num_generations
    found = call(case, list(case.rewards)).tolist()
    for row, reward in enumerate(case.rewards):
        for other in range(row - row % size, row - row % size + size):
            worse = reward > case.rewards[other] and found[row] < found[other]
            require(not worse, f"rewards {reward} and {case.rewards[other]} got {found[row]} and {found[other]}")


def equal_rewards(case: AdvantageCase) -> None:
    """Equal rewards, a single group and groups of one row give finite advantages, not NaN."""
    size = case.num_generations
    for scale in _SCALES:
        call(case, [0.5] * (2 * size), scale=scale)
        call(case, [1e-3] * size, scale=scale)
        if not case.arguments:
            call(case, list(case.rewards), scale=scale, num_generations=1)


def odd_sizes_refused(case: AdvantageCase) -> None:
    """A group size that does not divide the rows, and an unknown `scale`, are errors."""
    rewards = list(case.rewards)
    with refusal(f"{len(rewards)} rewards in groups of {len(rewards) - 1}"):
        call(case, rewards, num_generations=len(rewards) - 1)
    with refusal("scale='no such scale'"):
        call(case, rewards, scale="no such scale")


def deterministic(case: AdvantageCase) -> None:
    """The same rewards give the same advantages, whatever the random generators say."""
    import torch

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(call(case, list(case.rewards)))
    require(torch.equal(*found), f"two calls gave {found[0].tolist()} and {found[1].tolist()}")


def rewards_left_alone(case: AdvantageCase) -> None:
    """It does not change the rewards."""
    import torch

    left_alone(lambda rewards: call(case, rewards), torch.tensor(case.rewards), "the rewards")


def pickle(case: AdvantageCase) -> None:
    """It pickles."""
    pickled(case.build())


CASE = AdvantageCase
CHECKS = (
    shape,
    any_sequence,
    groups_apart,
    order,
    better_is_higher,
    equal_rewards,
    odd_sizes_refused,
    deterministic,
    rewards_left_alone,
    pickle,
)
