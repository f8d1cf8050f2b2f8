"""The game Countdown: an equation that uses each number once and reaches the target."""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from twinkle.data_format import Trajectory, user_data_get
from twinkle.errors import ArgumentError, DataError
from twinkle.reward import Reward
from twinkle_rewards import texts
from twinkle_rewards.reading import answer

_LONGEST = 300
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "x": "*", "\n": " "})


class CountdownReward(Reward):
    """1 if the equation in the last `<answer>` uses each of `nums` exactly once and comes to `target`; else 0.

    An equation has whole numbers, `+ - * /` between two of them, and brackets, computed in exact fractions; what it
    comes to may follow `=`. What is no equation, or is longer than 300 characters, earns nothing; nothing that a model
    writes is executed.

    Args:
        format_score: for an equation that uses the numbers rightly and misses the target; in [0, 1].

    Raises:
        ArgumentError: `format_score` is outside its range.
    """

    def __init__(self, format_score: float = 0.0) -> None:
        if isinstance(format_score, bool) or not isinstance(format_score, int | float) or not 0 <= format_score <= 1:
            raise ArgumentError(f"{type(self).__name__}: format_score is {format_score!r}; it is from 0 to 1")
        self.format_score = float(format_score)

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float]:
        """Return one score for each trajectory.

        Args:
            trajectories: conversations whose last turn is the answer; `user_data` has `nums` and `target`.
            ground_truths: not used, and may be given as to other rewards.
            **kwargs: not used.

        Raises:
            DataError: a row has no numbers or no target; names it.
        """
        return [self._score(row, place) for place, row in enumerate(trajectories)]

    def _score(self, row: Trajectory, place: int) -> float:
        nums, target = (user_data_get(row.get("user_data"), key) for key in ("nums", "target"))
        if not isinstance(nums, list | tuple) or not isinstance(target, int | float):
            raise DataError(
                f"{type(self).__name__}: user_data of row {place} has nums {nums!r:.60} and target {target!r:.60}; "
                "CountdownProcessor puts both there"
            )
        said = texts.tagged(answer(row), "answer")
        found = None if said is None else equation(said)
        if found is None or Counter(found[1]) != Counter(nums):
            return 0.0
        return 1.0 if found[0] == Fraction(target) else self.format_score


def equation(text: str) -> tuple[Fraction, list[int]] | None:
    """Return the value and the numbers of an equation; None if it is no equation, wrong, or divides by 0."""
    left, _, right = (part.strip() for part in text.partition("="))
    left = left.translate(_SIGNS)
    if len(left) > _LONGEST or not _ALLOWED.fullmatch(left):
        return None
    numbers: list[int] = []
    try:
        value = _value(ast.parse(left, mode="eval").body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return None if right and texts.number(right) != value else (value, numbers)


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("no number and no operation")
    left, right = _value(node.left, numbers), _value(node.right, numbers)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case _:
            raise ValueError("an operation that the game does not have")
