"""RLOO: rewards relative to the other answers to the same prompt."""

from typing import Any, Literal

from torch import Tensor

from twinkle.advantage import Advantage
from twinkle.errors import DataError
from twinkle_rewards.advantages.entries import Entries, Rewards, check_scale, read


class RLOOAdvantage(Advantage):
    """A_i = r_i - mean of the rewards of the other n - 1 rows of its group (arXiv:2402.14740, section 3.1).

    The baseline does not depend on the row's own answer, so the policy gradient stays unbiased. That is `scale="none"`;
    "group" and "batch" divide by the sample standard deviation of the group's rewards or of all, plus 1e-8. Where all
    rewards of a group are equal, its advantages are exactly 0.

    With `turn_lengths`, `rewards` has one number a turn. The baseline is the mean over all turns of the other rows, and
    a token's advantage is the sum over its own turn and those after it.
    """

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Literal["group", "batch", "none"] = "group",
        *,
        group_ids: Any = None,
        turn_lengths: Any = None,
    ) -> Tensor | list[Tensor]:
        """Return float32 `[B]`; with `turn_lengths` a list of B tensors, one number a trained token.

        Args:
            rewards: `[B]`; `[B, K]` or B lists are summed to one number a row, or are the rewards of its turns.
            num_generations: rows a group, above 1: rows 0..n-1 are the first, and so on.
            scale: what to divide by.
            group_ids: the group of each row instead, in any order; numbers or texts.
            turn_lengths: B lists with the trained tokens of each turn.

        Raises:
            ArgumentError: an argument is of the wrong kind.
            DataError: a group has one row, lengths do not fit, or a reward is not finite; names group or row.
        """
        check_scale(self, scale, ("group", "batch", "none"))
        entries = read(self, rewards, num_generations, group_ids, turn_lengths)
        _check_others(entries)
        shifted = entries.above_least()
        others = entries.sums(shifted, entries.groups) - entries.sums(shifted, entries.rows)
        baseline = others / (entries.sizes(entries.groups) - entries.sizes(entries.rows))
        return entries.result((shifted - baseline) / entries.spread(scale))


def _check_others(entries: Entries) -> None:
    lonely = entries.sizes(entries.groups) == entries.sizes(entries.rows)
    if not bool(lonely.any()):
        return
    what = "num_generations is 1" if entries.alone else _name(entries, int(entries.groups[lonely][0]))
    raise DataError(
        f"{entries.owner}: {what}, and a row is compared with the others of its group; sample two or more a prompt"
    )


def _name(entries: Entries, group: int) -> str:
    return f"group {entries.names[group]!r} has one row"
