"""The contract of a reward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from twinkle.data_format import Trajectory


class Reward(ABC):
    """Scores trajectories. A function with this signature can be used as a reward."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Return one score for each trajectory, in order.

        Args:
            trajectories: conversations whose last turn is scored; the reference answer is in `user_data`.
            **kwargs: further arguments for these rows, such as `ground_truths`.
        """
