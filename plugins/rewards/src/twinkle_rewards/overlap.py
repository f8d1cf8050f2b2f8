"""Answers in words: the share of them that is right, and whether looking things up led there."""

import json
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle.reward import Reward
from twinkle_rewards import texts
from twinkle_rewards.reading import answer, texts_of, truths

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_ARTICLES = frozenset({"a", "an", "the"})


class F1Reward(Reward):
    r"""Word-level F1 of answer and ground truth, in [0, 1] (SQuAD, arXiv:1606.05250, section 6.1).

    With c words in common, counted as often as both have them, precision is c / words of the answer, recall c / words
    of the truth, and F1 their harmonic mean. Case, punctuation and English articles do not count; each Chinese or
    Japanese character is a word. Of several truths (a list) the nearest counts.

    Args:
        answer_pattern: a regular expression whose first group is the answer; its last match counts, and text without
            one earns 0. None takes the last `<answer>`, else the last `\boxed{}`, else all of it.

    Raises:
        ArgumentError: the pattern is not a regular expression, or has no group.
    """

    def __init__(self, answer_pattern: str | None = None) -> None:
        self.answer_pattern = None if answer_pattern is None else _pattern(self, answer_pattern)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return one score for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: the truths, one a row; None is `ground_truth` in `user_data` of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        right = truths(self, trajectories, ground_truths, "ground_truth")
        found = [_answered(answer(row), self.answer_pattern) for row in trajectories]
        return [max(f1(said, one) for one in texts_of(truth)) for said, truth in zip(found, right, strict=True)]


class ToolExploreReward(Reward):
    """The share of distinct tool calls among all of a conversation, if its answer is right; else 0.

    An answer is right if its F1 reaches the threshold. Without any call, or with a wrong answer, calls earn nothing,
    and the same call twice earns less: so neither calling for its own sake nor repeating pays.

    Args:
        f1_threshold: the F1 from which an answer is right, in (0, 1].
        answer_pattern: as of `F1Reward`.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(self, f1_threshold: float = 0.5, answer_pattern: str | None = None) -> None:
        if isinstance(f1_threshold, bool) or not isinstance(f1_threshold, int | float) or not 0 < f1_threshold <= 1:
            raise ArgumentError(f"{type(self).__name__}: f1_threshold is {f1_threshold!r}; it is above 0 and at most 1")
        self.f1_threshold = f1_threshold
        self.answer_pattern = None if answer_pattern is None else _pattern(self, answer_pattern)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return one score in [0, 1] for each trajectory.

        Args:
            trajectories: conversations with `tool_calls`, whose last turn is the answer.
            ground_truths: the truths, one a row; None is `ground_truth` in `user_data` of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        scores = F1Reward(self.answer_pattern)(trajectories, ground_truths)
        rows = zip(trajectories, scores, strict=True)
        return [_variety(row) if score >= self.f1_threshold else 0.0 for row, score in rows]


def f1(said: str, truth: str) -> float:
    """Return the F1 of two texts; 1 if neither has a word."""
    ours, theirs = _words(said), _words(truth)
    if not ours or not theirs:
        return float(not ours and not theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFC", text).casefold().replace("_", " ")
    return [word for word in _WORD.findall(plain) if word not in _ARTICLES]


def _answered(said: str, pattern: str | None) -> str:
    if pattern is not None:
        last = deque(re.finditer(pattern, said), maxlen=1)
        return last[0][1] or "" if last else ""
    for found in (texts.tagged(said, "answer"), texts.boxed(said)):
        if found is not None:
            return found
    return said


def _variety(trajectory: Trajectory) -> float:
    calls = [call for message in trajectory.get("messages") or () for call in message.get("tool_calls") or ()]
    asked = {_asked(call) for call in calls}
    return len(asked) / len(calls) if calls else 0.0


def _asked(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, sort_keys=True, default=repr)
    return f"{function.get('name') if isinstance(function, Mapping) else call!r} {arguments}"


def _pattern(owner: object, given: Any) -> str:
    name = type(owner).__name__
    try:
        groups = re.compile(given).groups
    except (re.error, TypeError) as error:
        raise ArgumentError(f"{name}: answer_pattern is {given!r:.60}, no regular expression: {error}") from error
    if not groups:
        raise ArgumentError(f"{name}: answer_pattern {given!r:.60} has no group; put brackets around the answer")
    return str(given)
