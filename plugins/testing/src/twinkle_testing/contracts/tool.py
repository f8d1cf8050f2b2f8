"""Contract checks of tools: a valid schema, and text as result."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_testing.contracts.case import Case, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import as_json, left_alone, same, shown

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VALUES: dict[str, Any] = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclass(kw_only=True)
class ToolCase(Case):
    """A tool and arguments to call it with.

    Attributes:
        arguments: arguments of a call; by default made from the schema.
        result: the expected answer, if it is known.
    """

    kind = "tool"

    arguments: Mapping[str, Any] | None = None
    result: str | None = None

    def call(self, tool: Any) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of a call."""
        function = tool.tool_info()["function"]
        return function["name"], dict(made(function) if self.arguments is None else self.arguments)


def made(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that the schema of a function allows: its required ones, or all."""
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {})
    wanted = parameters.get("required") or list(properties)
    return {name: _value(properties.get(name, {})) for name in wanted}


def check_schema(info: Any) -> None:
    """Require OpenAI's form of a function, with JSON schema parameters."""
    require(
        isinstance(info, Mapping) and info.get("type") == "function",
        f"tool_info() gave {shown(info)}; its type is 'function'",
    )
    as_json(dict(info), "tool_info()")
    function = info.get("function")
    require(isinstance(function, Mapping), "tool_info() has no 'function'")
    name, parameters = function.get("name", ""), function.get("parameters")
    require(_NAME.fullmatch(str(name)), f"the name {name!r} must be 1 to 64 letters, digits, '_' and '-'")
    require(
        isinstance(function.get("description"), str) and function["description"],
        f"{name} has no description for the model",
    )
    fine = isinstance(parameters, Mapping) and parameters.get("type") == "object"
    require(
        fine and isinstance(parameters.get("properties"), Mapping),
        f"the parameters of {name} must be a schema of an object",
    )
    unknown = set(parameters.get("required", ())) - set(parameters["properties"])
    require(not unknown, f"{name} requires {', '.join(sorted(unknown))}, which its properties do not have")


def schema(case: ToolCase) -> None:
    """`tool_info` returns a function with name, description and a JSON schema of its parameters."""
    check_schema(case.build().tool_info())


def answer(case: ToolCase) -> None:
    """A call returns text; it equals the expected one, if given."""
    tool = case.build()
    name, arguments = case.call(tool)
    found = tool(name, arguments)
    require(isinstance(found, str), f"it answered {shown(found)}; return text")
    require(
        case.result is None or found == case.result,
        f"it answered {shown(found)}; the example expects {shown(case.result)}",
    )


def arguments_left_alone(case: ToolCase) -> None:
    """It does not change the arguments, which are part of the conversation."""
    tool = case.build()
    name, arguments = case.call(tool)
    left_alone(lambda given: tool(name, given), arguments, "the arguments")


def info_stable(case: ToolCase) -> None:
    """Its schema is not changed by calls, and modifying the returned dict does not change the tool."""
    tool = case.build()
    first = as_json(tool.tool_info(), "tool_info()")
    tool(*case.call(tool))
    tool.tool_info()["function"].clear()
    require(
        same(as_json(tool.tool_info(), "tool_info()"), first), "tool_info() is another one; return a new dict each time"
    )


def pickle(case: ToolCase) -> None:
    """It can be pickled with its schema, for rollouts in other processes."""
    tool = case.build()
    require(same(pickled(tool).tool_info(), tool.tool_info()), "after pickling it has another schema")


CASE = ToolCase
CHECKS = (schema, answer, arguments_left_alone, info_stable, pickle)


def _value(schema: Mapping[str, Any]) -> Any:
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    options = schema.get("enum") or schema.get("examples")
    return options[0] if options else _VALUES.get(str(schema.get("type")), "a")
