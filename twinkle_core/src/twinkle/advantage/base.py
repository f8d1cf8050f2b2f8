"""The contract of an advantage estimator."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


class Advantage(ABC):
    """Turns rewards into advantages.

    Groups are consecutive: with `num_generations=n`, rows 0..n-1 belong to the first prompt. Repeat each prompt
    accordingly: `[prompt for prompt in prompts for _ in range(n)]`. An estimator that takes `group_ids`, one per row,
    allows groups in any order and of any size.
    """

    @abstractmethod
    def __call__(
        self,
        rewards: "torch.Tensor | Sequence[float] | Sequence[Sequence[float]]",
        num_generations: int = 1,
        scale: Literal["group", "batch", "none"] = "group",
        **kwargs: Any,
    ) -> "torch.Tensor | list[torch.Tensor]":
        """Return float32 advantages without gradient, for the argument `advantages=` of a loss.

        The result is `[B]`, one number per row, or, from an estimator that works on tokens or turns, a list of B
        tensors with one number for each trained token of the row.

        Args:
            rewards: one number per row; for some estimators one per turn or one per token.
            num_generations: rows per group; must divide B.
            scale: divide by the standard deviation of the group, of the batch, or not at all. An estimator may support
                fewer of these and have another default.
            **kwargs: further arguments of an estimator, such as `group_ids`, `turn_lengths` or `values`.
        """
