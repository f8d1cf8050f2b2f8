"""The contract of an advantage estimator."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


class Advantage(ABC):
    """Turns rewards into advantages.

    Groups are consecutive: with `num_generations=n`, rows 0..n-1 belong to the first prompt, so prompts are repeated
    one by one: `[prompt for prompt in prompts for _ in range(n)]`. An estimator that takes `group_ids`, one a row,
    finds the groups by them, in any order and of any size.
    """

    @abstractmethod
    def __call__(
        self,
        rewards: "torch.Tensor | Sequence[float] | Sequence[Sequence[float]]",
        num_generations: int = 1,
        scale: Literal["group", "batch", "none"] = "group",
        **kwargs: Any,
    ) -> "torch.Tensor | list[torch.Tensor]":
        """Return float32 advantages without gradient, in a form that the losses take as `advantages=`.

        Either `[B]`, one number a row, or a list of B tensors with one number for each trained token of the row (none
        for a row without): where the estimator works on tokens, or was told the lengths of turns.

        Args:
            rewards: one number a row; where the estimator says so, several: one a turn, or one a token.
            num_generations: rows a group; must divide B.
            scale: divide by the standard deviation of the group, of the batch, or not at all. An estimator that has
                not all three refuses the others, and may have another default.
            **kwargs: what an estimator needs beside, such as `group_ids`, `turn_lengths` or `values`.
        """
