"""GRPO: rewards relative to the group that answered the same prompt."""

from typing import Any, Literal

from torch import Tensor

from twinkle.advantage import Advantage
from twinkle_rewards.advantages.entries import Rewards, check_scale, read


class GRPOAdvantage(Advantage):
    """A_i = (r_i - mean of the group) / (std + 1e-8) (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    `std` is the sample standard deviation (n - 1) of the group's rewards (`scale="group"`) or of all rewards of the
    call ("batch"); "none" leaves the difference (Dr. GRPO, arXiv:2503.20783). Where all rewards of a group are equal,
    its advantages are exactly 0.

    One answer a prompt (`num_generations=1`, no `group_ids`): "group" returns the rewards themselves, "none" and
    "batch" take the whole call for the group. A group of one among `group_ids` has nothing to be compared with: 0.

    With `turn_lengths`, `rewards` has one number a turn. The mean and the deviation are those of all turns of the
    group, and a token's advantage is the sum over its own turn and those after it (section 4.1.3, process supervision).
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
            num_generations: rows a group: rows 0..n-1 are the first, and so on.
            scale: what to divide by.
            group_ids: the group of each row instead, in any order; numbers or texts.
            turn_lengths: B lists with the trained tokens of each turn.

        Raises:
            ArgumentError: an argument is of the wrong kind.
            DataError: lengths do not fit, or a reward is not finite; names the row.
        """
        check_scale(self, scale, ("group", "batch", "none"))
        entries = read(self, rewards, num_generations, group_ids, turn_lengths)
        if entries.alone:
            return entries.result(_single(entries.values, scale, entries.spread("batch")))
        shifted = entries.above_least()
        centred = shifted - entries.sums(shifted, entries.groups) / entries.sizes(entries.groups)
        return entries.result(centred / entries.spread(scale))


def _single(values: Tensor, scale: str, spread: Tensor | float) -> Tensor:
    if scale == "group" or not len(values):
        return values
    shifted = values - values.min()
    centred = shifted - shifted.mean()
    return centred if scale == "none" else centred / spread
