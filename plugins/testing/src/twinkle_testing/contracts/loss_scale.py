"""Contract checks of loss scales: one weight >= 0 per message, or weighted pieces of its text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.conversations import conversation
from twinkle_testing.contracts.values import left_alone, same, shown


@dataclass(kw_only=True)
class LossScaleCase(Case):
    """A loss scale and a conversation to weight.

    Attributes:
        messages: the conversation; by default two rounds with a system message and reasoning.
    """

    kind = "loss_scale"

    messages: Sequence[Mapping[str, Any]] = field(default_factory=conversation)


def call(case: LossScaleCase, messages: Sequence[Any]) -> list[Any]:
    """Return the weights, and check that there is one per message."""
    found = case.build()(messages)
    require(isinstance(found, Sequence), f"it returned {shown(found)}; return a list with one weight a message")
    require(len(found) == len(messages), f"it gave {len(found)} weights for {len(messages)} messages")
    return list(found)


def weights(case: LossScaleCase) -> None:
    """Each weight is a finite number of at least 0, or a list of (text, weight)."""
    for place, weight in enumerate(call(case, case.messages)):
        for number in [weight] if isinstance(weight, int | float) else _piece_weights(weight, place):
            fine = isinstance(number, int | float) and not isinstance(number, bool)
            require(fine and math.isfinite(number) and number >= 0, f"message {place} weighs {shown(number)}")


def pieces(case: LossScaleCase) -> None:
    """Pieces occur in their message's text (or reasoning), in that order."""
    for message, weight in zip(case.messages, call(case, case.messages), strict=True):
        if isinstance(weight, int | float):
            continue
        text, place = f"{message.get('reasoning_content') or ''}\n{message.get('content')}", 0
        for piece, _ in weight:
            found = text.find(piece.strip(), place)
            require(found >= 0, f"the piece {shown(piece)} does not occur, or not in this order, in {shown(text)}")
            place = found + len(piece.strip())


def every_conversation(case: LossScaleCase) -> None:
    """Each prefix of the conversation can be weighted, with an answer or without."""
    for length in range(1, len(case.messages) + 1):
        call(case, list(case.messages)[:length])


def messages_left_alone(case: LossScaleCase) -> None:
    """It does not change the messages."""
    scale = case.build()
    left_alone(scale, [dict(message) for message in case.messages], "the messages")


def deterministic(case: LossScaleCase) -> None:
    """The same conversation gets the same weights, independent of earlier calls."""
    scale, messages = case.build(), list(case.messages)
    first = scale(messages)
    scale(messages[:2])
    require(same(list(first), list(scale(messages))), "a second call gave other weights")


def pickle(case: LossScaleCase) -> None:
    """It can be pickled, as part of a template, and gives the same weights."""
    scale, messages = case.build(), list(case.messages)
    require(same(list(pickled(scale)(messages)), list(scale(messages))), "after pickling it gives other weights")


CASE = LossScaleCase
CHECKS = (weights, pieces, every_conversation, messages_left_alone, deterministic, pickle)


def _piece_weights(value: Any, place: int) -> list[Any]:
    fine = isinstance(value, Sequence) and not isinstance(value, str)
    fine = fine and all(isinstance(p, Sequence) and len(p) == 2 and isinstance(p[0], str) for p in value)
    require(fine, f"message {place} has the weight {shown(value)}; give a number or [(text, weight), ...]")
    return [weight for _, weight in value]
