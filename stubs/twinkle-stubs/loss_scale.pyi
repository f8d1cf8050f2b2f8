# Written by `twinkle plugins types`; do not edit.
"""Loss scales: the contract `LossScale`, and every installed one by name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from twinkle._registry import lazy_names
from twinkle.data_format import Message

__all__ = ["LossScale", "TurnWeight"]

TurnWeight: TypeAlias = float | Sequence[tuple[str, float]]
"""The weight of one message: a number for the whole message, or pieces of its text with a weight each."""


class LossScale(ABC):
    """Weights the tokens of a conversation by role, turn or text; used by `Template(loss_scale=...)`.

    The encoded row then has `loss_scale`, a float for each position: the weight of the token `labels[i]`, and 0
    where `labels[i]` is -100. A loss multiplies each token's term by it and still divides by the number of labels that
    are not -100. Half the weight therefore halves the token's gradient and does not change the denominator.
    """

    @abstractmethod
    def __call__(self, messages: Sequence[Message]) -> Sequence[TurnWeight]:
        """Return the weight of each message.

        Args:
            messages: the checked messages of the row, with `content` as text, without a default system message.

        Returns:
            One entry per message. A number >= 0 is the weight of the whole turn: 1 is the usual weight, and a turn with
            weight 0 is not trained (its labels are -100). Pieces `[(text, weight), ...]` weight parts of a turn. They
            occur in its text in this order; text between two pieces has the weight of the second, and the token that
            ends the turn has the weight of the last. White space around a piece does not matter. A piece that the chat
            template leaves out (such as the reasoning of earlier turns) is ignored.

            Messages of other roles are also trained if they have a weight. The message's own `weight` is multiplied
            with it, and a message with `loss` false is not trained.
        """



from twinkle_data.loss_scales import LastRoundLossScale as LastRoundLossScale
from twinkle_data.loss_scales import MessageWeightLossScale as MessageWeightLossScale
from twinkle_data.loss_scales import PatternLossScale as PatternLossScale
from twinkle_data.loss_scales import ReasoningLossScale as ReasoningLossScale
from twinkle_data.loss_scales import RoleLossScale as RoleLossScale
from twinkle_data.loss_scales import TurnLossScale as TurnLossScale
