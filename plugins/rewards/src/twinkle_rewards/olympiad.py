"""OlympiadBench: answers of several parts, their form, and the quality of what leads to them."""

import re
import time
from collections.abc import Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle.reward import Reward
from twinkle_rewards import texts
from twinkle_rewards.mathematics import equal, limit, require_math_verify
from twinkle_rewards.reading import answer, truth_text, truths

_SEPARATOR = re.compile(r"\\left|\\right|\\.|[,;，；、(){}\[\]]", re.DOTALL)
_STEP = re.compile(r"=|≤|≥|\\le|\\ge|\\Rightarrow|\\therefore|因为|所以|由此|because|therefore|hence|thus|since", re.I)
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+|[^\w\s]")
_PARTS = 32


class OlympiadBenchAccuracyReward(Reward):
    r"""The share of the parts of an answer that are right, in [0, 1].

    The parts are those of the last `\boxed{}`, and of `ground_truth`, between commas outside brackets. Each part of the
    truth counts if some part of the answer equals it, as `MathReward` compares; the score is their number divided by
    the number of parts of the truth or of the answer, whichever is larger. So guesses beside the answer cost.

    Args:
        time_limit: seconds for the comparisons of a row: what is not found by then does not count.

    Raises:
        ArgumentError: `time_limit` is no number above 0.
        RequirementMissing: math-verify is not installed.
    """

    def __init__(self, time_limit: float = 10.0) -> None:
        self.time_limit = limit(self, time_limit)
        require_math_verify(self)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return one score in [0, 1] for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: the truths, one a row; None is `ground_truth` in `user_data` of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        right = truths(self, trajectories, ground_truths, "ground_truth")
        return [self._score(texts.boxed(answer(row)), truth) for row, truth in zip(trajectories, right, strict=True)]

    def _score(self, said: str | None, truth: Any) -> float:
        if not said:
            return 0.0
        several = truth if isinstance(truth, list | tuple) else [truth]
        wanted = [part for one in several for part in parts(truth_text(one))]
        left = given = parts(said)
        if not wanted or len(given) > _PARTS:
            return 0.0
        found, end = 0, time.monotonic() + self.time_limit
        for one in wanted:
            match = next((place for place, part in enumerate(left) if self._equal(part, one, end)), None)
            if match is not None:
                found, left = found + 1, left[:match] + left[match + 1 :]
        return found / max(len(wanted), len(given))

    def _equal(self, said: str, truth: str, end: float) -> bool:
        return time.monotonic() < end and equal(said, truth, self.time_limit)


class OlympiadBenchFormatReward(Reward):
    r"""How well formed an answer is: 0 without a closed, filled `\boxed{}`; else 0.5, and 0.5 more for sound LaTeX.

    Sound is: braces and `$` come in pairs, and not more than 200 characters follow the last box.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 0.0, 0.5 or 1.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: not used, and may be given as to other rewards.
            **kwargs: not used.
        """
        return [_form(answer(row)) for row in trajectories]


class OlympiadBenchQualityReward(Reward):
    """Score of the reasoning of an answer, in [0, 1], independent of its result: the mean of three shares.

    Steps: lines (or sentences) with a relation or a reason, up to `steps` of them. Length: 1 between `min_chars` and
    `max_chars`, falling linearly to 0 at no text and at twice `max_chars`. Variety: distinct runs of four words among
    all of them, so that text that goes in circles loses; below four words it is 0.

    Args:
        steps: how many lines of reasoning are enough.
        min_chars: from which length an answer is long enough, in characters.
        max_chars: from which length it becomes too long.

    Raises:
        ArgumentError: a number is below 1, or `min_chars` above `max_chars`.
    """

    def __init__(self, steps: int = 4, min_chars: int = 100, max_chars: int = 8000) -> None:
        for name, value in (("steps", steps), ("min_chars", min_chars), ("max_chars", max_chars)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{type(self).__name__}: {name} is {value!r}; it is a whole number from 1")
        if min_chars > max_chars:
            raise ArgumentError(f"{type(self).__name__}: min_chars is {min_chars} and max_chars {max_chars}; swap them")
        self.steps, self.min_chars, self.max_chars = steps, min_chars, max_chars

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return one score in [0, 1] for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: not used, and may be given as to other rewards.
            **kwargs: not used.
        """
        return [self._score(answer(row)) for row in trajectories]

    def _score(self, said: str) -> float:
        lines = (line for line in re.split(r"[\n。；]|\. ", said) if _STEP.search(line))
        steps = min(1.0, sum(1 for _ in lines) / self.steps)
        short, long = len(said.strip()) / self.min_chars, 2 - len(said) / self.max_chars
        words = _WORD.findall(said[: 2 * self.max_chars])
        runs = list(zip(words, words[1:], words[2:], words[3:], strict=False))
        variety = len(set(runs)) / len(runs) if runs else 0.0
        return (steps + max(0.0, min(1.0, short, long)) + variety) / 3


def parts(text: str) -> list[str]:
    """Return the parts of an answer: the text between commas and semicolons outside of brackets."""
    found, depth, start = [], 0, 0
    for mark in _SEPARATOR.finditer(text):
        if mark[0] in ("(", "[", "{", "\\{"):
            depth += 1
        elif mark[0] in (")", "]", "}", "\\}"):
            depth = max(0, depth - 1)
        elif mark[0] in ",;，；、" and not depth and not _groups_thousands(text, mark.start()):
            found.append(text[start : mark.start()])
            start = mark.end()
    return [part.strip(" $\n") for part in [*found, text[start:]] if part.strip(" $\n")]


def _groups_thousands(text: str, place: int) -> bool:
    return text[place] == "," and re.fullmatch(r"[0-9],[0-9]{3}(?![0-9]).*", text[place - 1 : place + 6]) is not None


def _form(said: str) -> float:
    if not texts.boxed(said):
        return 0.0
    end = texts.closing(said, said.rfind("\\boxed{") + 7) or 0
    plain = re.sub(r"\\.", "", said, flags=re.DOTALL)
    paired = plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    return 1.0 if paired and len(said) - end <= 201 else 0.5
