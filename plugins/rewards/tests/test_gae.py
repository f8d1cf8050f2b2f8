"""Generalised advantage estimation against the sum of discounted errors of its definition, in float64."""

import math
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, DataError
from twinkle_rewards.advantages.gae import GAEAdvantage

VALUES = [[0.5, -0.25, 1.0, 0.75], [2.0], [], [0.1, 0.2, 0.3]]
REWARDS = [1.0, -1.0, 5.0, 0.5]
ENDS = [0.0, 0.0, 0.0, 0.4]


def by_definition(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), each delta from the definition (eq. 16)."""
    count, following = len(values), [*values[1:], last]
    errors = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    return [math.fsum((gamma * lam) ** (s - t) * errors[s] for s in range(t, count)) for t in range(count)]


def at_the_end(reward: float, count: int) -> list[float]:
    return [0.0] * (count - 1) + [reward] if count else []


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_it_is_the_sum_of_its_definition(gamma: float, lam: float) -> None:
    found = GAEAdvantage(gamma, lam).estimate(REWARDS, scale="none", values=VALUES, last_values=ENDS)
    for row, values in enumerate(VALUES):
        expected = by_definition(at_the_end(REWARDS[row], len(values)), values, ENDS[row], gamma, lam)
        assert found.advantages[row].tolist() == pytest.approx(expected, rel=1e-6)
        returns = [advantage + value for advantage, value in zip(expected, values, strict=True)]
        assert found.returns[row].tolist() == pytest.approx(returns, rel=1e-6)
        assert found.advantages[row].dtype == torch.float32


def test_with_lam_one_returns_are_what_was_earned() -> None:
    found = GAEAdvantage(lam=1.0).estimate(REWARDS, values=VALUES)
    assert [row.tolist() for row in found.returns] == [[1.0] * 4, [-1.0], [], pytest.approx([0.5] * 3)]


def test_tokens_are_normalized_together_and_returns_are_not() -> None:
    plain = GAEAdvantage().estimate(REWARDS, scale="none", values=VALUES)
    found = GAEAdvantage().estimate(REWARDS, values=VALUES)
    flat = torch.cat(plain.advantages).double()
    torch.testing.assert_close(torch.cat(found.advantages).double(), (flat - flat.mean()) / (flat.std() + 1e-8))
    assert torch.equal(torch.cat(found.returns), torch.cat(plain.returns))
    called = GAEAdvantage()(REWARDS, values=VALUES)
    assert torch.equal(torch.cat(called), torch.cat(found.advantages))


def test_rewards_of_turns_are_earned_at_their_last_token() -> None:
    turns, lengths = [[1.0, 2.0], [3.0]], [[3, 1], [1]]
    by_turn = GAEAdvantage()(turns, scale="none", values=VALUES[:2], turn_lengths=lengths)
    by_token = GAEAdvantage()([[0.0, 0.0, 1.0, 2.0], [3.0]], scale="none", values=VALUES[:2])
    assert [row.tolist() for row in by_turn] == [row.tolist() for row in by_token]
    expected = by_definition([0.0, 0.0, 1.0, 2.0], VALUES[0], 0.0, 1.0, 0.95)
    assert by_turn[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_distance_from_the_reference_is_a_cost_of_each_token() -> None:
    old = [[-1.0 - 0.1 * place for place in range(len(row))] for row in VALUES]
    ref = [[-1.2 for _ in row] for row in VALUES]
    found = GAEAdvantage(kl_coef=0.2)(REWARDS, scale="none", values=VALUES, old_logps=old, ref_logps=ref)
    for row, values in enumerate(VALUES):
        earned = at_the_end(REWARDS[row], len(values))
        earned = [reward - 0.2 * (a - b) for reward, a, b in zip(earned, old[row], ref[row], strict=True)]
        assert found[row].tolist() == pytest.approx(by_definition(earned, values, 0.0, 1.0, 0.95), rel=1e-6)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ArgumentError, "values are missing"),
    ({"values": VALUES[:3]}, DataError, "values has 3 rows, there are 4 rewards"),
    ({"values": [1.0, 2.0, 3.0, 4.0]}, ArgumentError, "values of row 0 is 1.0"),
    ({"values": [[math.nan], *VALUES[1:]]}, DataError, "values of row 0 has a number that is not finite"),
    ({"values": VALUES, "last_values": [0.0]}, DataError, "last_values has not one number for each of the 4 rows"),
    ({"values": VALUES, "turn_lengths": [[1], [1], [0], [3]]}, DataError, "turns of row 0 have 1 tokens, and it has 4"),
    ({"values": VALUES, "rewards": [[1.0, 1.0], [1.0], [1.0], [1.0]]}, DataError, "row 0 has 2 rewards and 4 values"),
    ({"values": VALUES, "rewards": [math.nan, 0, 0, 0]}, DataError, "reward of row 0 is nan"),
    ({"values": VALUES, "scale": "group"}, ArgumentError, "values stand in for groups"),
    ({"values": VALUES, "old_logps": VALUES, "ref_logps": VALUES}, ArgumentError, "kl_coef, which is 0"),
]


@pytest.mark.parametrize(("arguments", "error", "says"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(arguments: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        GAEAdvantage()(**{"rewards": REWARDS, **arguments})


def test_options_outside_their_range_are_refused() -> None:
    for options in ({"gamma": 1.5}, {"lam": -0.1}, {"kl_coef": math.inf}, {"gamma": True}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            GAEAdvantage(**options)
