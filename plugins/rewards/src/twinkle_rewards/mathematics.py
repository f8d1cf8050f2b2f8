"""Rewards for formulas: an answer is right if it is mathematically equal to the reference."""

import functools
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError, RequirementMissing
from twinkle.logging import get_logger
from twinkle.reward import Reward
from twinkle_rewards import symbolic, texts
from twinkle_rewards.reading import answer, key_name, texts_of, truths
from twinkle_rewards.worker import Worker, WorkerError

_LONGEST = 500
_MEMORY = 4 << 30
_SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|[*×⋅·])\s*10\s*\^\s*(?:\{\s*-?[0-9]+\s*\}|-?[0-9]+)")
_UNIT = re.compile(r"\^(?:\\circ|\{\\circ\})|\\(?:text|mathrm)\{[^{}0-9]*[A-Za-z][^{}0-9]*\}(?:\^(?:[0-9]|\{[0-9]\}))?")
_SPACE = r"\s|~|&|\\[!,;: ]|\\q?quad"
_OPEN = re.compile(
    rf"[0-9)}}\]!%](?:{_SPACE})*(?:[-+*^×⋅·∗÷\u2212]|\\(?:times|cdot|div|ast))(?:[-+\u2212]|{_SPACE})*[0-9.(\[{{\\]"
)


class MathReward(Reward):
    r"""1 if the last `\boxed{}` of the answer equals that of the truth as mathematics, else 0.

    `math-verify` compares: `\frac{1}{2}` and `0.5`, `(x+1)^2` and `x^2+2x+1`, sets in any order. A truth without a box
    is the formula itself. Where the truth is a plain number, the answer may have a unit (`68\text{ cm}^2`), but no sum,
    product or power may be left to compute: `23+45` is not 68. A box of more than 500 characters earns 0, and so does
    one that cannot be compared in time.

    Comparing runs in another process, which is killed when the time is over: so it may be called in any thread, and
    no formula takes longer. `pip install 'math-verify>=0.9'`.

    Args:
        ground_truth_key: where `user_data` has the truth, a whole solution or the answer alone.
        time_limit: seconds for one comparison.

    Raises:
        ArgumentError: an option is outside its range.
        RequirementMissing: math-verify is not installed.
    """

    def __init__(self, ground_truth_key: str = "solution", time_limit: float = 5.0) -> None:
        self.ground_truth_key = key_name(self, ground_truth_key)
        self.time_limit = limit(self, time_limit)
        require_math_verify(self)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return 1.0 or 0.0 for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer.
            ground_truths: the truths, one a row: texts, or trajectories that have them; None is those of the rows.
            **kwargs: not used.

        Raises:
            DataError: a row has no truth; names it.
        """
        right = truths(self, trajectories, ground_truths, self.ground_truth_key)
        return [self._score(texts.boxed(answer(row)), truth) for row, truth in zip(trajectories, right, strict=True)]

    def _score(self, said: str | None, truth: Any) -> float:
        wanted = [texts.boxed(one) or one.strip() for one in texts_of(truth)]
        return float(bool(said) and any(equal(str(said), one, self.time_limit) for one in wanted))


def equal(said: str, truth: str, seconds: float) -> bool:
    """Return whether an answer is correct: the same text or number, or equal according to math-verify."""
    if texts.same(said, truth):
        return True
    if not said or not truth or max(len(said), len(truth)) > _LONGEST:
        return False
    if texts.number(truth) is not None and _OPEN.search(_UNIT.sub("", _SCIENTIFIC.sub("", said))):
        return False
    try:
        return _compared(truth, said, seconds)
    except TimeoutError as error:
        get_logger().warning("comparing the answer %.60r with %.60r: %s", said, truth, error)
        return False


@functools.lru_cache(maxsize=4096)
def _compared(truth: str, said: str, seconds: float) -> bool:
    """Compare in the other process. What was late is not kept: it may have been the machine."""
    try:
        return bool(_worker().call(symbolic.equal, truth, said, seconds=seconds))
    except WorkerError:  # what math-verify cannot read, or has no memory for, is not the truth
        return False


@functools.cache
def _worker() -> Worker:
    return Worker(symbolic.prepare, memory=_MEMORY)


def require_math_verify(owner: object) -> None:
    """Raise `RequirementMissing` where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise RequirementMissing(
            f"{type(owner).__name__} compares formulas by math-verify, which is not installed; "
            "pip install 'math-verify>=0.9'"
        )


def limit(owner: object, value: Any) -> float:
    """Return the option `time_limit`.

    Raises:
        ArgumentError: it is no number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ArgumentError(f"{type(owner).__name__}: time_limit is {value!r}; it is a number of seconds above 0")
    return float(value)
