"""The contract of an advantage estimator."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


class Advantage(ABC):
    """Turns rewards into advantages. Groups are consecutive: rows 0..n-1 belong to the first prompt."""

    @abstractmethod
    def __call__(
        self,
        rewards: "torch.Tensor | Sequence[float]",
        num_generations: int = 1,
        scale: Literal["group", "batch", "none"] = "group",
        **kwargs: Any,
    ) -> "torch.Tensor":
        """Return float32 `[B]` advantages for `[B]` rewards.

        Args:
            rewards: one number a row.
            num_generations: rows a group; must divide B.
            scale: divide by the standard deviation of the group, of the batch, or not at all.
            **kwargs: what an estimator needs beside, such as `group_ids`.
        """
