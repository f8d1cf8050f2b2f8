"""Arithmetic expressions over integers: random generation, step-by-step evaluation, and formatting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_LARGEST = 99_999

Expression: TypeAlias = "int | Operation"


@dataclass(frozen=True, slots=True)
class Operation:
    """Two operands with one of the signs `+ - * /` between them; a division has no remainder."""

    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Level:
    """Difficulty of an expression.

    Attributes:
        operations: how many it has.
        smallest: the smallest number in it.
        largest: the largest number, but for factors, divisors and what is divided.
        factor: the largest factor, divisor or quotient, where that is a plain number.
        negative: whether anything in it may be below 0.
    """

    operations: int
    smallest: int
    largest: int
    factor: int
    negative: bool = False


LEVELS = {1: Level(1, 1, 9, 9), 2: Level(1, 10, 99, 9), 3: Level(2, 1, 99, 12), 4: Level(3, 1, 999, 20, negative=True)}


def draw(random: Random, level: Level, signs: Sequence[str]) -> Operation:
    """Return a random expression of a level with these signs."""
    while True:
        operation = _operation(random, level, signs, level.operations)
        if all(_fits(part, level) for part in _parts(operation)):
            return operation


def _operation(random: Random, level: Level, signs: Sequence[str], operations: int) -> Operation:
    sign = signs[random.randrange(len(signs))]
    before = random.randrange(operations)
    if sign in "+-":
        left = _operand(random, level, signs, before)
        return Operation(sign, left, _operand(random, level, signs, operations - 1 - before))
    factor = random.randrange(2, level.factor + 1)
    if sign == "*":
        other = _operand(random, level, signs, operations - 1)
        return Operation(sign, other, factor) if random.randrange(2) else Operation(sign, factor, other)
    divisor = factor if operations == 1 else _operand(random, level, signs, operations - 1)
    quotient = random.randrange(level.smallest, level.largest + 1) if operations == 1 else factor
    return Operation(sign, quotient * value(divisor), divisor)


def _operand(random: Random, level: Level, signs: Sequence[str], operations: int) -> Expression:
    if operations:
        return _operation(random, level, signs, operations)
    return random.randrange(level.smallest, level.largest + 1)


def _fits(part: Expression, level: Level) -> bool:
    if isinstance(part, int):
        return 0 <= part <= _LARGEST
    result = value(part)
    divides = part.sign != "/" or value(part.right) >= 2
    return divides and abs(result) <= _LARGEST and (result >= 0 or level.negative)


def _parts(expression: Expression) -> Iterator[Expression]:
    yield expression
    if isinstance(expression, Operation):
        yield from _parts(expression.left)
        yield from _parts(expression.right)


def value(expression: Expression) -> int:
    """Return the value of an expression."""
    if isinstance(expression, int):
        return expression
    return _COMPUTE[expression.sign](value(expression.left), value(expression.right))


_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right if right else 0,  # an expression with such a part is generated again
}


def steps(expression: Expression) -> Iterator[tuple[Operation, int]]:
    """Yield the operations on two numbers, in order, with their results."""
    if isinstance(expression, Operation):
        yield from steps(expression.left)
        yield from steps(expression.right)
        plain = Operation(expression.sign, value(expression.left), value(expression.right))
        yield plain, value(plain)


def key(expression: Expression) -> str:
    """Return a text that is equal for expressions that differ only in the order of summands or factors."""
    if isinstance(expression, int):
        return str(expression)
    sides = [key(expression.left), key(expression.right)]
    if expression.sign in "+*":
        sides.sort()
    return f"({sides[0]}{expression.sign}{sides[1]})"


def written(
    expression: Expression,
    number: Callable[[int], str] = str,
    signs: Mapping[str, str] | None = None,
    brackets: tuple[str, str] = ("(", ")"),
) -> str:
    """Return an expression as text, with brackets where multiplication and division first would misread it.

    Args:
        expression: what to write.
        number: writes a number.
        signs: text between two operands for each sign, including spaces; by default the sign itself.
        brackets: around an operand that comes first.
    """

    def write(part: Expression, least: int) -> str:
        if isinstance(part, int):
            return number(part)
        rank = 1 if part.sign in "+-" else 2
        between = f" {part.sign} " if signs is None else signs[part.sign]
        text = write(part.left, rank) + between + write(part.right, rank + 1)
        return text if rank >= least else f"{brackets[0]}{text}{brackets[1]}"

    return write(expression, 0)
