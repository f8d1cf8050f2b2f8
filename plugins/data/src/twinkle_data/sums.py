"""The data set `builtin://sums`: short prompts of plain arithmetic, with the answer for a reward."""

import hashlib
from collections.abc import Sequence
from math import prod
from random import Random
from typing import Any

from twinkle.errors import ArgumentError, DataError
from twinkle_data.rows import pairs, prompt, shown
from twinkle_data.texts import checked_count

_WHAT = "builtin://sums"
_SPLITS = ("train", "test")
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}
_PATIENCE = 5000


def sums(
    split: str = "train",
    seed: int = 0,
    size: int = 1000,
    operands: int = 2,
    digits: int = 2,
    operations: str | Sequence[str] = "add",
    question: str = "What is {}?",
) -> list[dict[str, Any]]:
    """Return prompts for reinforcement learning: whole numbers and one operation between them.

    No two rows are the same problem, in another order neither. One problem of ten belongs to the split `test`, whatever
    the seed, size and wording, so the splits never share one. A larger `size` begins with the same rows.

    Args:
        split: `train` or `test`.
        seed: of Python's own generator, whose numbers are the same on every machine.
        size: how many rows.
        operands: how many numbers a problem has.
        digits: how many digits a number has at most; they are drawn from 0 to 10^digits - 1.
        operations: `add`, `subtract` (never below 0) or `multiply`, or several, of which each problem has one.
        question: text of the question; `{}` is replaced by the expression.

    Returns:
        Rows of `messages` (the question alone), `user_data` with `ground_truth`, `question`, `answer` and `expression`.

    Raises:
        ArgumentError: an option is outside its range.
        DataError: no such split, or there are fewer problems of this sort than `size`.
    """
    if split not in _SPLITS:
        raise DataError(f"{_WHAT} has no split {split!r}; it has {' and '.join(_SPLITS)}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"{_WHAT}: seed is {shown(seed)}; it is a whole number")
    if not isinstance(question, str) or question.count("{}") != 1:
        raise ArgumentError(f"{_WHAT}: question is {shown(question)}; it is a text with {{}} for the expression")
    rows_count, signs, random = checked_count(size, "size", _WHAT, 1), _signs(operations), Random(seed)
    count, largest = checked_count(operands, "operands", _WHAT, 2), 10 ** checked_count(digits, "digits", _WHAT, 1)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    missed = 0
    while len(rows) < rows_count:
        sign = signs[random.randrange(len(signs))]
        numbers = [random.randrange(largest) for _ in range(count)]
        key, answer = _key(sign, numbers), _answer(sign, numbers)
        if key in rows or _split(key) != split or answer < 0:
            missed += 1
        else:
            rows[key], missed = _row(sign, numbers, answer, question), 0
        if missed == _PATIENCE:
            raise DataError(
                f"{_WHAT}: size is {rows_count}, and split {split!r} has hardly more than {len(rows)} problems of this "
                "sort; ask for fewer, or for more digits, operands or operations"
            )
    return list(rows.values())


def _row(sign: str, numbers: Sequence[int], answer: int, question: str) -> dict[str, Any]:
    expression = f" {sign} ".join(map(str, numbers))
    text = question.replace("{}", expression)
    return {
        "messages": prompt(text, ""),
        "user_data": pairs(ground_truth=str(answer)),
        "question": text,
        "answer": str(answer),
        "expression": expression,
    }


def _answer(sign: str, numbers: Sequence[int]) -> int:
    if sign == "*":
        return prod(numbers)
    return sum(numbers) if sign == "+" else numbers[0] - sum(numbers[1:])


def _key(sign: str, numbers: Sequence[int]) -> tuple[str, ...]:
    """Return a key that is equal for problems that differ only in the order of operands."""
    first = [] if sign != "-" else numbers[:1]
    return (sign, *map(str, [*first, *sorted(numbers[len(first) :])]))


def _split(key: Sequence[str]) -> str:
    digest = hashlib.blake2b(" ".join(key).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def _signs(operations: Any) -> list[str]:
    names = [operations] if isinstance(operations, str) else operations
    if not isinstance(names, Sequence) or not names or any(one not in _SIGNS for one in names):
        raise ArgumentError(f"{_WHAT}: operations is {shown(operations)}; it is one or several of {', '.join(_SIGNS)}")
    return [sign for name, sign in _SIGNS.items() if name in names]
