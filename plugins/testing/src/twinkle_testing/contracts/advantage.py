"""Contract checks of advantage estimators: float32 per row or token, independent groups, rewards in any form."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from twinkle.errors import TwinkleError
from twinkle_testing.contracts.case import Case, refusal, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import left_alone, same, shown

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("group", "batch", "none")
Found: TypeAlias = "Tensor | list[Tensor]"


@dataclass(kw_only=True)
class AdvantageCase(Case):
    """An estimator and its rewards.

    Attributes:
        rewards: one number per row.
        num_generations: rows per group.
        scales: the supported values of `scale`; others are refused.
        tokens: trained tokens of each row, if it returns one number per token.
        arguments: further keyword arguments of the call.
        row_arguments: further keyword arguments with one entry per row.
    """

    kind = "advantage"

    rewards: Sequence[float] = (1.0, 0.0, 0.5, 2.0, 0.0, 0.0, 1.0, 0.25)
    num_generations: int = 4
    scales: Sequence[str] = _SCALES
    tokens: Sequence[int] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    row_arguments: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def call(case: AdvantageCase, rewards: Any, order: Sequence[int] | None = None, **options: Any) -> Found:
    """Return the advantages, and check that they are finite float32 `[B]` or one tensor per row, without gradient.

    Args:
        case: the estimator.
        rewards: one number per row.
        order: indices of these rows in the case; by default the first ones.
        **options: further keyword arguments.
    """
    import torch

    order = range(len(rewards)) if order is None else order
    own = {name: [values[row] for row in order] for name, values in case.row_arguments.items()}
    found = case.build()(rewards, **{"num_generations": case.num_generations, **case.arguments, **own, **options})
    if case.tokens:
        require(isinstance(found, list), f"it returned {shown(found)}; return a list with one tensor a row")
        require(len(found) == len(rewards), f"it gave {len(found)} tensors for {len(rewards)} rewards")
        shapes = [(case.tokens[row],) for row in order]
    else:
        require(isinstance(found, torch.Tensor), f"it returned {shown(found)}; return a tensor")
        shapes = [(len(rewards),)]
    for tensor, expected in zip(found if case.tokens else [found], shapes, strict=True):
        require(tuple(tensor.shape) == expected, f"the shape is {list(tensor.shape)} where it must be {list(expected)}")
        require(tensor.dtype == torch.float32, f"the dtype is {tensor.dtype}; it must be float32")
        require(not tensor.requires_grad, "the advantages have a gradient")
        require(bool(torch.isfinite(tensor).all()), f"not all of them are finite: {tensor.tolist()}")
    return found  # type: ignore[no-any-return]


def shape(case: AdvantageCase) -> None:
    """It returns finite float32 without gradient, `[B]` or one tensor per row, for each `scale`."""
    known = [call(case, list(case.rewards), scale=scale) for scale in case.scales]
    default = call(case, list(case.rewards))
    require(any(same(default, found) for found in known), "the default of scale is none of its scales")


def any_sequence(case: AdvantageCase) -> None:
    """Lists, tuples, integers and tensors of any float dtype give the same advantages."""
    import torch

    expected = call(case, list(case.rewards))
    for rewards in (tuple(case.rewards), torch.tensor(case.rewards), torch.tensor(case.rewards, dtype=torch.float64)):
        found = call(case, rewards)
        require(
            same(found, expected, tolerance=1e-6),
            f"{type(rewards).__name__} gives {shown(found)}, not {shown(expected)}",
        )
    whole = [round(reward) for reward in case.rewards]
    fine = same(call(case, whole), call(case, [float(reward) for reward in whole]), tolerance=1e-6)
    require(fine, "whole numbers give other advantages than the same numbers as fractions")


def groups_apart(case: AdvantageCase) -> None:
    """With `scale` "group" and "none", the advantages of a group do not depend on rewards of other groups."""
    size, rewards = case.num_generations, list(case.rewards)
    others = [*rewards[:size], *(3.0 - reward * reward for reward in rewards[size:])]
    for scale in {"group", "none"} & {*case.scales}:
        before, after = (call(case, values, scale=scale)[:size] for values in (rewards, others))
        message = f"with scale={scale!r} the first group's {shown(before)} became {shown(after)} by another's rewards"
        require(same(before, after, tolerance=1e-6), message)


def order(case: AdvantageCase) -> None:
    """If groups, or rows within a group, are reordered, the advantages are the same in the new order."""
    size, rewards = case.num_generations, list(case.rewards)
    groups = [list(range(start, start + size)) for start in range(0, len(rewards), size)]
    for rows in ([row for group in reversed(groups) for row in group], [row for g in groups for row in reversed(g)]):
        for scale in case.scales:
            straight = call(case, rewards, scale=scale)
            found = call(case, [rewards[row] for row in rows], rows, scale=scale)
            fine = same(list(found), [straight[row] for row in rows], tolerance=1e-5)
            require(fine, f"with scale={scale!r}, rows {rows} got {shown(found)}")


def better_is_higher(case: AdvantageCase) -> None:
    """Within a group, a row with a higher reward does not have a lower advantage."""
    size = case.num_generations
    found = [float(advantage.sum()) for advantage in call(case, list(case.rewards))]
    for row, reward in enumerate(case.rewards):
        for other in range(row - row % size, row - row % size + size):
            worse = reward > case.rewards[other] and found[row] < found[other]
            require(not worse, f"rewards {reward} and {case.rewards[other]} got {found[row]} and {found[other]}")


def equal_rewards(case: AdvantageCase) -> None:
    """Equal rewards and a single group give finite advantages; groups of one row do too, or are refused."""
    size = case.num_generations
    for scale in case.scales:
        call(case, [0.5] * (2 * size), scale=scale)
        call(case, [1e-3] * size, scale=scale)
        if not case.arguments:
            with contextlib.suppress(TwinkleError):
                call(case, list(case.rewards), scale=scale, num_generations=1)


def odd_sizes_refused(case: AdvantageCase) -> None:
    """A group size that does not divide the rows, and an unsupported `scale`, are errors."""
    rewards = list(case.rewards)
    with refusal(f"{len(rewards)} rewards in groups of {len(rewards) - 1}"):
        call(case, rewards, num_generations=len(rewards) - 1)
    for scale in ({*_SCALES} - {*case.scales}) | {"no such scale"}:
        with refusal(f"scale={scale!r}"):
            call(case, rewards, scale=scale)


def deterministic(case: AdvantageCase) -> None:
    """The same rewards give the same advantages, independent of the random generators."""
    import torch

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(call(case, list(case.rewards)))
    require(same(*found), f"two calls gave {shown(found[0])} and {shown(found[1])}")


def rewards_left_alone(case: AdvantageCase) -> None:
    """It does not change the rewards."""
    import torch

    left_alone(lambda rewards: call(case, rewards), torch.tensor(case.rewards), "the rewards")


def pickle(case: AdvantageCase) -> None:
    """It can be pickled."""
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
