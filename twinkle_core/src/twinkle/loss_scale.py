"""Loss scales: the contract `LossScale`, and every installed one by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from twinkle._lazy import room
from twinkle.data_format import Message

__all__ = ["LossScale"]


class LossScale(ABC):
    """Weights the trained tokens of a conversation by role and turn."""

    @abstractmethod
    def __call__(self, messages: Sequence[Message]) -> list[float]:
        """Return one weight a message: 0 is not trained, 1 is the usual weight."""


__getattr__, __dir__ = room(__name__, "loss_scale")
