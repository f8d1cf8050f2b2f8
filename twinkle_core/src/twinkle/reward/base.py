"""The contract of a reward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from twinkle.data_format import Trajectory


class Reward(ABC):
    """Scores trajectories. A function with this signature may stand in for a subclass."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Return one score for each trajectory, in order.

        Args:
            trajectories: conversations whose last turn is to be scored; the truth stands in `user_data`.
            **kwargs: whatever else the caller has for these rows, such as `ground_truths`.
        """
