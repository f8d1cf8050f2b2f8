# Written by `twinkle plugins types`; do not edit.
"""Loss scales: the contract `LossScale`, and every installed one by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from twinkle._registry import lazy_names
from twinkle.data_format import Message

__all__ = ["LossScale", "TurnWeight"]

TurnWeight: TypeAlias = float | Sequence[tuple[str, float]]
"""The weight of one message: a number for all of it, or pieces of its text, each with a weight of its own."""


class LossScale(ABC):
    """Weights the tokens of a conversation by role, turn or text. `Template(loss_scale=...)` takes it in any form.

    The encoded row then carries `loss_scale`, a float for each position: the weight of the token `labels[i]`, and 0
    where `labels[i]` is -100. A loss multiplies each token's term by it and still divides by the number of labels that
    are not -100, so half the weight is half the pull and not a smaller count.
    """

    @abstractmethod
    def __call__(self, messages: Sequence[Message]) -> Sequence[TurnWeight]:
        """Return the weight of each message.

        Args:
            messages: those of the row, checked, with `content` as text; a default system message is not among them.

        Returns:
            One entry a message. A number >= 0 counts for the whole turn: 1 is the usual weight, and a turn with 0 is
            not trained at all (its labels are -100). Pieces `[(text, weight), ...]` weight parts of a turn: they stand
            in its text in this order, and each takes what lies between it and the piece before; the last one takes
            the token that ends the turn. White space around a piece does not matter; a piece that the chat template
            leaves out (the reasoning of earlier turns) is passed over.

            Messages of other roles than the assistant's may have a weight too, and are then trained. What a message
            says of itself comes on top: its `weight` multiplies, and with `loss` false it is not trained.
        """



from twinkle_data.loss_scales import LastRoundLossScale as LastRoundLossScale
from twinkle_data.loss_scales import MessageWeightLossScale as MessageWeightLossScale
from twinkle_data.loss_scales import PatternLossScale as PatternLossScale
from twinkle_data.loss_scales import ReasoningLossScale as ReasoningLossScale
from twinkle_data.loss_scales import RoleLossScale as RoleLossScale
from twinkle_data.loss_scales import TurnLossScale as TurnLossScale
