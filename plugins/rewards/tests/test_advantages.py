"""Advantages of groups against scalar loops in float64, group by group and row by row; and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twinkle.advantage import Advantage
from twinkle.errors import ArgumentError, DataError
from twinkle_rewards.advantages.grpo import GRPOAdvantage
from twinkle_rewards.advantages.reinforce import ReinforcePlusPlusAdvantage
from twinkle_rewards.advantages.rloo import RLOOAdvantage

REWARDS = [1.0, 0.0, 0.5, 2.0, -1.0, -1.0, 0.25, 3.0, 7.0]
MIXED = ["b", "a", "b", "c", "a", "c", "c", "b", "a"]
FAMILY = (GRPOAdvantage, RLOOAdvantage, ReinforcePlusPlusAdvantage)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else 0


def grpo(rewards: list[float], groups: list[Any], scale: str) -> list[float]:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [other for other, place in zip(rewards, groups, strict=True) if place == group]
        divisor = {"none": 1.0, "group": std(own) + 1e-8, "batch": std(rewards) + 1e-8}[scale]
        found.append((reward - mean(own)) / divisor)
    return found


def rloo(rewards: list[float], groups: list[Any], scale: str) -> list[float]:
    found = []
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = [rewards[other] for other, place in enumerate(groups) if place == group]
        others = [rewards[other] for other, place in enumerate(groups) if place == group and other != row]
        divisor = {"none": 1.0, "group": std(own) + 1e-8, "batch": std(rewards) + 1e-8}[scale]
        found.append((reward - mean(others)) / divisor)
    return found


def reinforce(rewards: list[float], groups: list[Any], scale: str) -> list[float]:
    plain = grpo(rewards, groups, "none")
    return plain if scale == "none" else [(value - mean(plain)) / (std(plain) + 1e-8) for value in plain]


LOOPS: list[tuple[type[Advantage], Callable[..., list[float]], tuple[str, ...]]] = [
    (GRPOAdvantage, grpo, ("group", "batch", "none")),
    (RLOOAdvantage, rloo, ("group", "batch", "none")),
    (ReinforcePlusPlusAdvantage, reinforce, ("batch", "none")),
]
CASES = [(cls, loop, scale) for cls, loop, scales in LOOPS for scale in scales]


@pytest.mark.parametrize(("cls", "loop", "scale"), CASES)
def test_consecutive_groups_are_those_of_the_loop(cls: Any, loop: Any, scale: str) -> None:
    found = cls()(REWARDS, num_generations=3, scale=scale)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(loop(REWARDS, [0, 0, 0, 1, 1, 1, 2, 2, 2], scale), rel=1e-6)


@pytest.mark.parametrize(("cls", "loop", "scale"), CASES)
def test_groups_by_name_may_lie_in_any_order(cls: Any, loop: Any, scale: str) -> None:
    expected = pytest.approx(loop(REWARDS, MIXED, scale), rel=1e-6)
    assert cls()(REWARDS, scale=scale, group_ids=MIXED).tolist() == expected
    numbers = torch.tensor([ord(name) for name in MIXED])
    for ids in (numbers, list(numbers), [(name, 1) for name in MIXED]):
        assert cls()(torch.tensor(REWARDS), 3, scale, group_ids=ids).tolist() == expected


@pytest.mark.parametrize(("cls", "loop", "scale"), CASES)
def test_groups_by_name_may_have_any_size(cls: Any, loop: Any, scale: str) -> None:
    names = [1, 1, 2, 2, 2, 2, 1, 3, 3]
    assert cls()(REWARDS, scale=scale, group_ids=names).tolist() == pytest.approx(loop(REWARDS, names, scale), rel=1e-6)


@pytest.mark.parametrize("cls", FAMILY)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3e5, 0.0])
def test_equal_rewards_give_exactly_nothing(cls: Any, reward: float) -> None:
    for scale in ("batch", "none") if cls is ReinforcePlusPlusAdvantage else ("group", "batch", "none"):
        assert cls()([reward] * 7, num_generations=7, scale=scale).tolist() == [0.0] * 7
    mixed = cls()([reward] * 3 + [1.0, 2.0, 4.0], num_generations=3, scale="none").tolist()
    assert mixed[:3] == [0.0] * 3
    assert all(math.isfinite(value) for value in mixed)


def test_one_answer_a_prompt_is_what_was_published() -> None:
    advantage, centred = GRPOAdvantage(), [reward - mean(REWARDS) for reward in REWARDS]
    assert advantage(REWARDS).tolist() == REWARDS
    assert advantage(REWARDS, scale="none").tolist() == pytest.approx(centred, rel=1e-6)
    scaled = [value / (std(REWARDS) + 1e-8) for value in centred]
    assert advantage(REWARDS, scale="batch").tolist() == pytest.approx(scaled, rel=1e-6)


def test_one_row_left_of_a_group_has_nothing_to_be_compared_with() -> None:
    found = GRPOAdvantage()([5.0, 1.0, 0.0], scale="none", group_ids=["alone", "two", "two"])
    assert found.tolist() == [0.0, 0.5, -0.5]


@pytest.mark.parametrize("rows", [[[1.0, 0.5], [0.0, 0.0]], torch.tensor([[1.0, 0.5], [0.0, 0.0]])])
def test_several_rewards_a_row_are_summed(rows: Any) -> None:
    assert GRPOAdvantage()(rows, num_generations=2, scale="none").tolist() == [0.75, -0.75]


def test_without_baseline_rewards_are_only_normalized_over_the_batch() -> None:
    found = ReinforcePlusPlusAdvantage(baseline=False)(REWARDS)
    expected = [(reward - mean(REWARDS)) / (std(REWARDS) + 1e-8) for reward in REWARDS]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


TURNS = [[0.5, 1.0], [0.0], [2.0, 0.0, -1.0], [1.0]]
LENGTHS = [[2, 3], [1], [1, 0, 2], [4]]


def spread(values: list[list[float]]) -> list[list[float]]:
    """Give each token the sum over its own turn and later ones, token by token."""
    rows = []
    for own, lengths in zip(values, LENGTHS, strict=True):
        rows.append([math.fsum(own[turn:]) for turn, length in enumerate(lengths) for _ in range(length)])
    return rows


def test_rewards_of_turns_reach_their_own_and_earlier_tokens() -> None:
    groups = [TURNS[0] + TURNS[1], TURNS[2] + TURNS[3]]
    normal = [[(r - mean(groups[row // 2])) / (std(groups[row // 2]) + 1e-8) for r in TURNS[row]] for row in range(4)]
    found: Any = GRPOAdvantage()(TURNS, num_generations=2, turn_lengths=LENGTHS)
    assert [row.tolist() for row in found] == [pytest.approx(row, rel=1e-6) for row in spread(normal)]

    others = [TURNS[row ^ 1] for row in range(4)]
    left_out = [[reward - mean(others[row]) for reward in TURNS[row]] for row in range(4)]
    found = RLOOAdvantage()(TURNS, num_generations=2, scale="none", turn_lengths=LENGTHS)
    assert [row.tolist() for row in found] == [pytest.approx(row, rel=1e-6) for row in spread(left_out)]


def test_tokens_are_normalized_together() -> None:
    groups = [TURNS[0] + TURNS[1], TURNS[2] + TURNS[3]]
    plain = spread([[reward - mean(groups[row // 2]) for reward in TURNS[row]] for row in range(4)])
    flat = [value for row in plain for value in row]
    expected = [[(value - mean(flat)) / (std(flat) + 1e-8) for value in row] for row in plain]
    found: Any = ReinforcePlusPlusAdvantage()(TURNS, num_generations=2, turn_lengths=LENGTHS)
    assert [row.tolist() for row in found] == [pytest.approx(row, rel=1e-5) for row in expected]


def test_the_kl_penalty_is_a_cost_of_this_token_and_those_that_follow() -> None:
    old, ref = [[-0.5, -1.0, -0.25], [-2.0], []], [[-0.75, -0.5, -0.5], [-1.0], []]
    plain = []
    for reward, one, other in zip([1.0, 0.0, 3.0], old, ref, strict=True):
        costs = [0.1 * (a - b) for a, b in zip(one, other, strict=True)]
        plain.append([reward - math.fsum(costs[place:]) for place in range(len(costs))])
    advantage = ReinforcePlusPlusAdvantage(baseline=False, kl_coef=0.1)
    found: Any = advantage([1.0, 0.0, 3.0], scale="none", old_logps=old, ref_logps=ref)
    assert [row.tolist() for row in found] == [pytest.approx(row, rel=1e-6) for row in plain]
    flat = [value for row in plain for value in row]
    found = advantage([1.0, 0.0, 3.0], old_logps=old, ref_logps=ref)
    assert torch.cat(found).tolist() == pytest.approx([(v - mean(flat)) / (std(flat) + 1e-8) for v in flat], rel=1e-6)


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (FAMILY, {"rewards": REWARDS, "num_generations": 4}, DataError, "9 rewards are no groups of 4"),
    (FAMILY, {"rewards": REWARDS, "num_generations": 0}, ArgumentError, "num_generations is 0"),
    (FAMILY, {"rewards": REWARDS, "group_ids": [1, 1]}, DataError, "group_ids has 2 entries, there are 9 rewards"),
    (FAMILY, {"rewards": REWARDS, "num_generations": 3, "group_ids": [1] * 9}, DataError, "group 1 has 9 rows"),
    (FAMILY, {"rewards": REWARDS, "group_ids": [[1]] * 9}, ArgumentError, "group_ids has an unhashable type"),
    (FAMILY, {"rewards": [1.0, 2.0], "group_ids": [([],), ([],)]}, ArgumentError, "group_ids has an unhashable type"),
    (FAMILY, {"rewards": [1.0, 2.0], "group_ids": "ab"}, ArgumentError, "group_ids is 'ab'"),
    (FAMILY, {"rewards": [1.0, math.nan], "num_generations": 2}, DataError, "reward of row 1 is nan"),
    (FAMILY, {"rewards": [math.inf, 0.0], "num_generations": 2}, DataError, "reward of row 0 is inf"),
    (FAMILY, {"rewards": [1.0, "2"], "num_generations": 2}, ArgumentError, "reward of row 1 is '2'"),
    (FAMILY, {"rewards": [[1.0], []], "num_generations": 2}, DataError, "row 1 has no reward"),
    (FAMILY, {"rewards": 1.0}, ArgumentError, "rewards is 1.0"),
    (FAMILY, {"rewards": REWARDS, "num_generations": 3, "scale": "std"}, ArgumentError, "scale is 'std'"),
    (
        FAMILY,
        {"rewards": [1.0, 2.0], "num_generations": 2, "turn_lengths": [[1]]},
        DataError,
        "turn_lengths has 1 rows",
    ),
    (
        FAMILY,
        {"rewards": [[1.0, 2.0], [0.0]], "num_generations": 2, "turn_lengths": [[4], [1]]},
        DataError,
        "row 0 has 2 rewards and 1 turns",
    ),
    (
        FAMILY,
        {"rewards": [1.0, 2.0], "num_generations": 2, "turn_lengths": [[-1], [1]]},
        ArgumentError,
        "turn_lengths of row 0",
    ),
    ((RLOOAdvantage,), {"rewards": REWARDS}, DataError, "num_generations is 1"),
    ((RLOOAdvantage,), {"rewards": [1, 2, 3], "group_ids": ["a", "b", "a"]}, DataError, "group 'b' has one row"),
    (FAMILY[2:], {"rewards": REWARDS}, DataError, "num_generations is 1"),
    (FAMILY[2:], {"rewards": REWARDS, "scale": "group"}, ArgumentError, "over the batch"),
    (FAMILY[2:], {"rewards": [1.0], "old_logps": [[0.0]]}, ArgumentError, "kl_coef, which is 0"),
]


@pytest.mark.parametrize(("classes", "arguments", "error", "says"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(classes: Any, arguments: Any, error: Any, says: str) -> None:
    for cls in classes:
        with pytest.raises(error, match=says):
            cls()(**arguments)


def test_penalties_of_other_rows_are_refused() -> None:
    advantage = ReinforcePlusPlusAdvantage(baseline=False, kl_coef=0.1)
    with pytest.raises(ArgumentError, match="ref_logps is missing"):
        advantage([1.0], old_logps=[[0.0]])
    with pytest.raises(DataError, match="row 0 has 1 old_logps and 2 ref_logps"):
        advantage([1.0], old_logps=[[0.0]], ref_logps=[[0.0, 0.0]])
    with pytest.raises(DataError, match="old_logps has 1 rows, there are 2 rewards"):
        advantage([1.0, 2.0], old_logps=[[0.0]], ref_logps=[[0.0]])
    with pytest.raises(DataError, match="row 0 has 1 old_logps, and its turns 2 tokens"):
        advantage([1.0], old_logps=[[0.0]], ref_logps=[[0.0]], turn_lengths=[[2]])
    with pytest.raises(ArgumentError, match="kl_coef is -1"):
        ReinforcePlusPlusAdvantage(kl_coef=-1)
