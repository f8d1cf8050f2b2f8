"""Loss scales: weights of the turns of a conversation, or parts of them, in the loss."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import ROLES, Message, split_reasoning
from twinkle.errors import ArgumentError
from twinkle.loss_scale import LossScale, TurnWeight


class RoleLossScale(LossScale):
    """Weights messages by role.

    Args:
        weights: a weight for each role; roles that are not named are not trained. By default `{"assistant": 1.0}`.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = {"assistant": 1.0} if weights is None else dict(weights)
        for role, weight in self.weights.items():
            if role not in ROLES:
                raise ArgumentError(f"RoleLossScale: weights has {role!r}; a role is one of {', '.join(ROLES)}")
            _checked(f"RoleLossScale: the weight of {role!r}", weight)

    def __call__(self, messages: Sequence[Message]) -> list[TurnWeight]:
        """Return the weight of each message's role."""
        return [self.weights.get(message["role"], 0.0) for message in messages]


class LastRoundLossScale(LossScale):
    """Trains the assistant's turns after the last user message, including tool calls and the turns after them.

    Args:
        earlier: the weight of the assistant's turns before that.
    """

    def __init__(self, earlier: float = 0.0) -> None:
        self.earlier = _checked("LastRoundLossScale: earlier", earlier)

    def __call__(self, messages: Sequence[Message]) -> list[TurnWeight]:
        """Return 1 for the assistant's turns of the last round, `earlier` for those before."""
        last_question = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        weights: list[TurnWeight] = []
        for index, message in enumerate(messages):
            weights.append(0.0 if message["role"] != "assistant" else 1.0 if index > last_question else self.earlier)
        return weights


class TurnLossScale(LossScale):
    """Weights assistant turns by their index.

    Args:
        weights: a weight for each number: 0 is the assistant's first turn, -1 its last. A number that a conversation is
            too short for says nothing about it; of two numbers that mean the same turn the later entry decides.
        rest: the weight of the assistant's other turns.
    """

    def __init__(self, weights: Mapping[int, float], rest: float = 0.0) -> None:
        self.weights = dict(weights)
        for number, weight in self.weights.items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise ArgumentError(f"TurnLossScale: weights has {number!r}; give numbers of turns: 0 first, -1 last")
            _checked(f"TurnLossScale: the weight of turn {number}", weight)
        self.rest = _checked("TurnLossScale: rest", rest)

    def __call__(self, messages: Sequence[Message]) -> list[TurnWeight]:
        """Return the weight of each of the assistant's turns, 0 for other messages."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        weights: list[TurnWeight] = [self.rest if index in turns else 0.0 for index in range(len(messages))]
        for number, weight in self.weights.items():
            if -len(turns) <= number < len(turns):
                weights[turns[number]] = weight
        return weights


class MessageWeightLossScale(LossScale):
    """Weights the assistant's turns by their own key `weight`, any number >= 0, which the template multiplies by.

    Args:
        default: the weight of turns that have no such key.
    """

    def __init__(self, default: float = 1.0) -> None:
        self.default = _checked("MessageWeightLossScale: default", default)

    def __call__(self, messages: Sequence[Message]) -> list[TurnWeight]:
        """Return 1 for the assistant's turns with a weight, `default` for those without."""
        return [
            0.0 if message["role"] != "assistant" else 1.0 if "weight" in message else self.default
            for message in messages
        ]


class ReasoningLossScale(LossScale):
    """Weights the assistant's reasoning (`reasoning_content`, or `<think>...</think>` before its answer) and answers.

    The tags belong to what they enclose, the one that closes to the answer.

    Args:
        reasoning: the weight of the thoughts.
        answer: the weight of the rest of a turn, and of turns without thoughts.
    """

    def __init__(self, reasoning: float = 0.0, answer: float = 1.0) -> None:
        self.reasoning = _checked("ReasoningLossScale: reasoning", reasoning)
        self.answer = _checked("ReasoningLossScale: answer", answer)

    def __call__(self, messages: Sequence[Message]) -> list[TurnWeight]:
        """Return thoughts and answer of each of the assistant's turns with their weights."""
        return [self._weight(split_reasoning(dict(message))) for message in messages]

    def _weight(self, message: Mapping[str, Any]) -> TurnWeight:
        if message["role"] != "assistant":
            return 0.0
        thoughts = message.get("reasoning_content")
        return [(thoughts, self.reasoning), (message["content"], self.answer)] if thoughts else self.answer


class PatternLossScale(LossScale):
    """Weights the parts of the assistant's content that match regular expressions.

    Args:
        patterns: a weight for each expression (of the module `re`). Where two matches overlap, the one that starts
            first counts, and at one place the expression that stands first.
        rest: the weight of everything else that the assistant writes, the token that ends a turn included.
    """

    def __init__(self, patterns: Mapping[str, float], rest: float = 1.0) -> None:
        if not hasattr(patterns, "items") or not patterns:
            raise ArgumentError(f"PatternLossScale: patterns is {patterns!r}; give a dict of expressions and weights")
        self.patterns = [(_compiled(text), _checked(f"the weight of {text!r}", w)) for text, w in patterns.items()]
        self.rest = _checked("PatternLossScale: rest", rest)

    def __call__(self, messages: Sequence[Message]) -> list[TurnWeight]:
        """Return the pieces of each of the assistant's turns with their weights."""
        return [self._weight(split_reasoning(dict(message))) for message in messages]

    def _weight(self, message: Mapping[str, Any]) -> TurnWeight:
        if message["role"] != "assistant":
            return 0.0
        pieces, place, content = [(message.get("reasoning_content") or "", self.rest)], 0, message["content"]
        for start, end, weight in self._matches(content):
            if start >= place:
                pieces += [(content[place:start], self.rest), (content[start:end], weight)]
                place = end
        # The last piece is empty if a match ends the content: the token that ends the turn is not part of it.
        return [*pieces, (content[place:], self.rest)] if place else self.rest

    def _matches(self, content: str) -> list[tuple[int, int, float]]:
        matches = [(*match.span(), w) for expression, w in self.patterns for match in expression.finditer(content)]
        return sorted((match for match in matches if match[0] < match[1]), key=lambda match: match[0])


def _compiled(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ArgumentError(f"PatternLossScale: {text!r} is not a regular expression: {error}") from error


def _checked(what: str, weight: Any) -> float:
    if isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0:
        return float(weight)
    raise ArgumentError(f"{what} is {weight!r}; a weight is a finite number from 0")
