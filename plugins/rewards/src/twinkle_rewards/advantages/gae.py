"""Generalised advantage estimation: advantages of tokens from a value network."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from twinkle.advantage import Advantage
from twinkle.errors import ArgumentError, DataError
from twinkle_rewards.advantages.entries import EPSILON, Rewards, check_scale, deviation, read, reward_rows
from twinkle_rewards.advantages.penalty import coefficient, kl_rows, token_rows


@dataclass(frozen=True, slots=True)
class TokenEstimates:
    """What GAE gives: B float32 tensors each, one number a trained token.

    Attributes:
        advantages: for the policy loss.
        returns: advantage plus value, not normalized: the target of the value loss.
    """

    advantages: list[Tensor]
    returns: list[Tensor]


class GAEAdvantage(Advantage):
    """Advantages of tokens (arXiv:1506.02438, eq. 16), for a policy with a value head.

    With V_t the value before token t of T, r_t its reward, and V_T 0 or the row's `last_values`

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    `scale="batch"`, the default, gives (A - mean) / (std + 1e-8) over all tokens of the call, sample standard
    deviation; "none" leaves A. There are no groups here: the values are the baseline, and `num_generations` is only
    checked.

    Args:
        gamma: the discount.
        lam: 1 is the return less the value, 0 trusts the values alone.
        kl_coef: beta >= 0: each token costs beta (old_t - ref_t) (arXiv:2203.02155, section 3.5), if the call has both.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(self, gamma: float = 1.0, lam: float = 0.95, kl_coef: float = 0.0) -> None:
        self.gamma = coefficient(self, "gamma", gamma, most=1)
        self.lam = coefficient(self, "lam", lam, most=1)
        self.kl_coef = coefficient(self, "kl_coef", kl_coef)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Literal["batch", "none"] = "batch",
        **arguments: Any,
    ) -> list[Tensor]:
        """Return the advantages of `estimate`, which has the arguments and errors too."""
        return self.estimate(rewards, num_generations, scale, **arguments).advantages

    def estimate(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Literal["batch", "none"] = "batch",
        *,
        values: Any = None,
        last_values: Any = None,
        turn_lengths: Any = None,
        old_logps: Any = None,
        ref_logps: Any = None,
    ) -> TokenEstimates:
        """Return advantages and returns.

        Args:
            rewards: `[B]`, earned at the last token; or B lists with one number a token; or, with `turn_lengths`, one
                a turn, earned at its last token. A row without tokens earns nothing.
            num_generations: not used; values replace the mean of a group.
            scale: "batch" or "none".
            values: B lists, the value before each trained token.
            last_values: `[B]`, the value after the last token of rows that were cut off; 0 where the answer has ended.
            turn_lengths: B lists with the trained tokens of each turn.
            old_logps: B lists, log-probabilities at sampling time; for `kl_coef`.
            ref_logps: B lists, those of the reference model.

        Raises:
            ArgumentError: an argument is missing or of the wrong kind.
            DataError: lengths do not fit, or a number is not finite; names the row.
        """
        name = type(self).__name__
        check_scale(self, scale, ("batch", "none"), "values stand in for groups")
        if values is None:
            raise ArgumentError(f"{name}: values are missing; give one list a row, the value before each trained token")
        states = token_rows(self, "values", values)
        earned = self._earned(rewards, states, num_generations, turn_lengths)
        if (penalties := kl_rows(self, self.kl_coef, old_logps, ref_logps)) is not None:
            _check_rows(name, "old_logps", penalties, states)
            earned = [one - cost for one, cost in zip(earned, penalties, strict=True)]
        ends = self._ends(last_values, len(states))
        found = [self._row(*row) for row in zip(earned, states, ends, strict=True)]
        returns = [(advantage + value).float() for advantage, value in zip(found, states, strict=True)]
        if scale == "batch" and len(flat := torch.cat([torch.zeros(0), *found])):
            normal = (flat - flat.mean()) / (deviation(flat) + EPSILON)
            found = list(torch.split(normal, [len(row) for row in found]))
        return TokenEstimates([row.float() for row in found], returns)

    def _row(self, rewards: Tensor, values: Tensor, last: float) -> Tensor:
        following = torch.cat([values[1:], values.new_tensor([last])])[: len(values)]
        delta = (rewards + self.gamma * following - values).tolist()
        advantages, later = [0.0] * len(delta), 0.0
        for place in range(len(delta) - 1, -1, -1):
            advantages[place] = later = delta[place] + self.gamma * self.lam * later
        return values.new_tensor(advantages)

    def _earned(self, rewards: Any, states: list[Tensor], num_generations: int, turn_lengths: Any) -> list[Tensor]:
        """Return the reward of each token."""
        entries = read(self, rewards, num_generations, None, turn_lengths)
        if entries.count != len(states):
            raise DataError(f"{entries.owner}: values has {len(states)} rows, there are {entries.count} rewards")
        earned = [torch.zeros_like(row) for row in states]
        for row, own in enumerate(reward_rows(entries.owner, rewards)):
            places = [len(earned[row]) - 1] if entries.turns is None else _ends_of(entries.turns[row])
            if entries.turns is not None and sum(entries.turns[row]) != len(earned[row]):
                raise DataError(
                    f"{entries.owner}: the turns of row {row} have {sum(entries.turns[row])} tokens, and it has "
                    f"{len(earned[row])} values"
                )
            if entries.turns is None and len(own) == len(earned[row]):
                places = list(range(len(own)))
            elif len(own) != len(places):
                raise DataError(
                    f"{entries.owner}: row {row} has {len(own)} rewards and {len(earned[row])} values; give one, "
                    "or one a token, or one a turn with turn_lengths"
                )
            for place, reward in zip(places, own, strict=True):
                if place >= 0:
                    earned[row][place] += reward
        return earned

    def _ends(self, last_values: Any, rows: int) -> list[float]:
        if last_values is None:
            return [0.0] * rows
        ends = reward_rows(type(self).__name__, last_values)
        if len(ends) != rows or any(len(end) != 1 for end in ends):
            raise DataError(f"{type(self).__name__}: last_values has not one number for each of the {rows} rows")
        return [end[0] for end in ends]


def _ends_of(lengths: list[int]) -> list[int]:
    """Return the last token of each turn; an empty turn ends where the one before it did, or before the row."""
    ends, total = [], 0
    for length in lengths:
        total += length
        ends.append(total - 1)
    return ends


def _check_rows(name: str, what: str, rows: list[Tensor], states: list[Tensor]) -> None:
    if len(rows) != len(states):
        raise DataError(f"{name}: {what} has {len(rows)} rows, values has {len(states)}")
    for row, (one, other) in enumerate(zip(rows, states, strict=True)):
        if len(one) != len(other):
            raise DataError(f"{name}: row {row} has {len(one)} {what} and {len(other)} values")
