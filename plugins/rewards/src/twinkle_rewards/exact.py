"""Rewards for answers that are right or wrong: short answers, GSM8K's numbers, and answer tags."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle.reward import Reward
from twinkle_rewards import texts
from twinkle_rewards.reading import answer, key_name, texts_of, truths

_TAKEN: dict[str, Callable[[str], str | None]] = {
    "all": lambda said: said,
    "last_line": lambda said: (said.strip().splitlines() or [""])[-1],
    "last_number": lambda said: None if (found := texts.last_number(said)) is None else str(found),
    "box": texts.boxed,
    "tag": lambda said: texts.tagged(said, "answer"),
}


class ExactMatchReward(Reward):
    r"""1 if the answer is the truth, else 0: the same number, or the same text but for case, spaces and a full stop.

    Numbers are compared exactly, in ASCII digits: 7, 7.0 and 7. are the same, 7.0000001 is another. A truth that is a
    list has several right answers.

    Args:
        take: which part of the text is the answer: "all", "last_line", "last_number", "box" (the last `\boxed{}`) or
            "tag" (the last `<answer>`). Text without that part earns 0.
        ground_truth_key: where `user_data` has the truth.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        take: Literal["all", "last_line", "last_number", "box", "tag"] = "all",
        ground_truth_key: str = "ground_truth",
    ) -> None:
        if take not in _TAKEN:
            raise ArgumentError(f"{type(self).__name__}: take is {take!r}; it is one of {', '.join(_TAKEN)}")
        self.take = take
        self.ground_truth_key = key_name(self, ground_truth_key)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: the truths, one a row; None is `user_data` of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        right = truths(self, trajectories, ground_truths, self.ground_truth_key)
        return [self._score(answer(row), truth) for row, truth in zip(trajectories, right, strict=True)]

    def _score(self, said: str, truth: Any) -> float:
        found = _TAKEN[self.take](said)
        return float(found is not None and any(texts.same(found, one) for one in texts_of(truth)))


class GSM8KAccuracyReward(Reward):
    r"""1 if the number in the last `\boxed{}`, or after the last `####`, equals `ground_truth`, else 0.

    The marked text may have words and a currency in addition to the number (`#### 42 apples`), but no second number. A
    reference that is not a number must be equal to the text.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: the truths, one a row; None is `ground_truth` in `user_data` of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        right = truths(self, trajectories, ground_truths, "ground_truth")
        return [_marked_is(answer(row), truth) for row, truth in zip(trajectories, right, strict=True)]


class MultiModalAccuracyReward(Reward):
    """1 if the last `<answer>` equals the reference, else 0: the same number, or the same text, ignoring case.

    The reference may be in such a tag too, as in CLEVR's solutions.
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: the truths, one a row; None is `ground_truth` in `user_data` of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        right = truths(self, trajectories, ground_truths, "ground_truth")
        return [_tagged_is(answer(row), truth) for row, truth in zip(trajectories, right, strict=True)]


def _marked_is(said: str, truth: Any) -> float:
    found = texts.marked(said)
    if found is None:
        return 0.0
    wanted = [texts.marked(one) or one for one in texts_of(truth)]
    value = texts.only_number(found)
    return float(any(texts.same(found, one) or (value is not None and texts.number(one) == value) for one in wanted))


def _tagged_is(said: str, truth: Any) -> float:
    found = texts.tagged(said, "answer")
    wanted = [texts.tagged(one, "answer") or one for one in texts_of(truth)]
    return float(found is not None and any(texts.same(found, one) for one in wanted))
