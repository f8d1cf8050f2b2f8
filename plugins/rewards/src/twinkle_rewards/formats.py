"""Rewards for the format of an answer, independent of its content."""

from collections.abc import Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle.reward import Reward
from twinkle_rewards import texts
from twinkle_rewards.reading import answer

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class FormatReward(Reward):
    """1 for `<think>...</think><answer>...</answer>` and nothing else, each tag once and neither part empty; else 0.

    Args:
        think_in_prompt: the chat template opens the thought, so that the answer begins inside it.

    Raises:
        ArgumentError: the option is neither True nor False.
    """

    def __init__(self, think_in_prompt: bool = False) -> None:
        if not isinstance(think_in_prompt, bool):
            raise ArgumentError(f"{type(self).__name__}: think_in_prompt is {think_in_prompt!r}; it is True or False")
        self.think_in_prompt = think_in_prompt

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: not used, and may be given as to other rewards.
            **kwargs: not used.
        """
        return [self._score(answer(row)) for row in trajectories]

    def _score(self, said: str) -> float:
        text = said.strip()
        if self.think_in_prompt and not text.startswith("<think>"):
            text = f"<think>{text}"
        if any(text.count(tag) != 1 for tag in _TAGS):
            return 0.0
        thought, _, rest = text.partition("</think>")
        rest = rest.strip()
        whole = thought.startswith("<think>") and rest.startswith("<answer>") and rest.endswith("</answer>")
        return float(whole and thought.strip() != "<think>" and texts.tagged(rest, "answer") != "")


class GSM8KFormatReward(Reward):
    r"""1 if the answer marks a number: in a closed `\boxed{}`, or after `####` on its line; else 0."""

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: not used, and may be given as to other rewards.
            **kwargs: not used.
        """
        return [float(texts.only_number(texts.marked(answer(row)) or "") is not None) for row in trajectories]


class CoTReward(Reward):
    """1 if a thought comes before the answer, else 0.

    The reasoning is the text in `<think>` tags (or `reasoning_content`), and the answer is the text after it.

    Args:
        min_chars: minimum length of the reasoning, in characters.

    Raises:
        ArgumentError: `min_chars` is no whole number from 1.
    """

    def __init__(self, min_chars: int = 1) -> None:
        if isinstance(min_chars, bool) or not isinstance(min_chars, int) or min_chars < 1:
            raise ArgumentError(f"{type(self).__name__}: min_chars is {min_chars!r}; it is a whole number from 1")
        self.min_chars = min_chars

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: not used, and may be given as to other rewards.
            **kwargs: not used.
        """
        return [self._score(answer(row)) for row in trajectories]

    def _score(self, said: str) -> float:
        before, _, after = said.rpartition("</think>")
        thought = before.partition("<think>")[2].strip()
        return float(len(thought) >= self.min_chars and bool(after.strip()))
