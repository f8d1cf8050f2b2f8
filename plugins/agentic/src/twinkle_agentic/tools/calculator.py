"""A tool that computes: the four operations, powers, remainders and brackets, and nothing else."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.tool import Tool, ToolInfo

_LONGEST = 200  # characters; nesting is bounded with it
_LARGEST = 1e18
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculatorTool(Tool):
    """Evaluates an arithmetic expression such as `(2 + 3) * 4`, and answers with the number.

    Nothing but numbers, brackets and the operators `+ - * / // % **` is understood, of numbers up to 1e18; anything
    else is a ValueError, which a tool manager turns into text.
    """

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        """Return the value of `arguments["expression"]`, an integer where it is one.

        Raises:
            ValueError: it is no such expression, or a number is too large.
            ZeroDivisionError: it divides by 0.
        """
        expression = arguments.get("expression")
        if not isinstance(expression, str) or not expression.strip() or len(expression) > _LONGEST:
            raise ValueError(f"expression is {expression!r:.60}; give an arithmetic expression, such as '2 + 3'")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{expression!r:.60} is not an arithmetic expression") from error
        value = _value(tree.body)
        return str(int(value)) if value == int(value) else str(value)

    def tool_info(self) -> ToolInfo:
        """Return the schema that the model sees."""
        expression = {"type": "string", "description": "For example (2 + 3) * 4", "examples": ["2 + 3"]}
        return {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluates an arithmetic expression.",
                "parameters": {"type": "object", "properties": {"expression": expression}, "required": ["expression"]},
            },
        }


def _value(node: ast.AST) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and not (abs(right) <= 64 and abs(left) <= 1e6):
            raise ValueError("the power is too large")
        value = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    else:
        raise ValueError("an expression has numbers, brackets and + - * / // % ** only")
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("a number is above 1e18, or no real one")
    number: int | float = value
    return number
