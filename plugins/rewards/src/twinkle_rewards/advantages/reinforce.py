"""REINFORCE++: advantages normalized over the whole batch, with or without a group's mean as baseline."""

from typing import Any, Literal

import torch
from torch import Tensor

from twinkle.advantage import Advantage
from twinkle.errors import ArgumentError, DataError
from twinkle_rewards.advantages.entries import EPSILON, Rewards, check_scale, deviation, read, reward_rows
from twinkle_rewards.advantages.penalty import coefficient, kl_rows


class ReinforcePlusPlusAdvantage(Advantage):
    """REINFORCE++ (arXiv:2501.03262): R_i, or R_i - mean of its group, normalized over all rows of the call.

    With k_t = old_t - ref_t, the estimate of the KL divergence at a token, beta = `kl_coef` and b the mean of the
    rewards of the row's group (`baseline=True`, REINFORCE++-baseline) or 0 (REINFORCE++)

        A_it = R_i - b - beta sum over s >= t of k_is

    and `scale="batch"`, the default, gives (A - mean) / (std + 1e-8), mean and sample standard deviation over all
    numbers of the result: rows, or trained tokens where it has one number a token. "none" leaves A. There is no
    "group": that is GRPO. On several ranks, rows of all of them have to be in one call to be one batch.

    With `turn_lengths`, `rewards` has one number a turn, b is the mean over all turns of the group, and a token's R - b
    is summed over its own turn and those after it.

    Args:
        baseline: subtract the group's mean first; needs groups of two or more.
        kl_coef: beta; above 0 the call needs `old_logps` and `ref_logps`, and returns one number a token.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(self, baseline: bool = True, kl_coef: float = 0.0) -> None:
        if not isinstance(baseline, bool):
            raise ArgumentError(f"{type(self).__name__}: baseline is {baseline!r}; it is True or False")
        self.baseline = baseline
        self.kl_coef = coefficient(self, "kl_coef", kl_coef)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Literal["batch", "none"] = "batch",
        *,
        group_ids: Any = None,
        turn_lengths: Any = None,
        old_logps: Any = None,
        ref_logps: Any = None,
    ) -> Tensor | list[Tensor]:
        """Return float32 `[B]`; with `kl_coef` or `turn_lengths` a list of B tensors, one number a trained token.

        Args:
            rewards: `[B]`; `[B, K]` or B lists are summed to one number a row, or are the rewards of its turns.
            num_generations: rows a group: rows 0..n-1 are the first, and so on.
            scale: "batch" or "none".
            group_ids: the group of each row instead, in any order; numbers or texts.
            turn_lengths: B lists with the trained tokens of each turn.
            old_logps: B lists, log-probabilities at sampling time of the trained tokens; for `kl_coef`.
            ref_logps: B lists, those of the reference model.

        Raises:
            ArgumentError: an argument is missing or of the wrong kind.
            DataError: `baseline` without groups, lengths do not fit, or a number is not finite; names the row.
        """
        check_scale(self, scale, ("batch", "none"), "REINFORCE++ normalizes over the batch (GRPO over groups)")
        penalties = kl_rows(self, self.kl_coef, old_logps, ref_logps)
        if penalties is not None:
            name, totals = type(self).__name__, reward_rows(type(self).__name__, rewards)
            if len(penalties) != len(totals):
                raise DataError(f"{name}: old_logps has {len(penalties)} rows, there are {len(totals)} rewards")
            if turn_lengths is None:
                rewards, turn_lengths = [sum(row) for row in totals], [[len(row)] for row in penalties]
        entries = read(self, rewards, num_generations, group_ids, turn_lengths)
        if self.baseline and entries.alone and entries.count:
            raise DataError(
                f"{entries.owner}: baseline=True subtracts the group's mean, and num_generations is 1; sample two or "
                "more a prompt, or set baseline=False"
            )
        values = entries.values
        if self.baseline:
            shifted = entries.above_least()
            values = shifted - entries.sums(shifted, entries.groups) / entries.sizes(entries.groups)
        if entries.turns is None:
            return (_normalized(values) if scale == "batch" else values).float()
        return _by_token(entries.tokens(values), penalties, scale, entries.owner)


def _by_token(tokens: list[Tensor], penalties: list[Tensor] | None, scale: str, owner: str) -> list[Tensor]:
    lengths = [len(row) for row in tokens]
    if penalties is not None:
        for row, (length, penalty) in enumerate(zip(lengths, penalties, strict=True)):
            if length != len(penalty):
                raise DataError(f"{owner}: row {row} has {len(penalty)} old_logps, and its turns {length} tokens")
        tokens = [a - k.flip(0).cumsum(0).flip(0) for a, k in zip(tokens, penalties, strict=True)]
    if scale == "batch" and tokens:
        tokens = list(torch.split(_normalized(torch.cat(tokens)), lengths))
    return [row.float() for row in tokens]


def _normalized(values: Tensor) -> Tensor:
    if not len(values):
        return values
    shifted = values - values.min()
    return (shifted - shifted.mean()) / (deviation(values) + EPSILON)
