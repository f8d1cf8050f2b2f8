"""Tool calls: the grammar that forces them, and the parser that reads them from text as it arrives."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.data_format.sampling import JSON_WHITESPACE
from twinkle.tool_parser import ToolCallParser
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.render import ToolFormat

_MOST_CALLS = 32
"""Calls that a grammar allows in one answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model.

    Attributes:
        id: random.
        name: of the function.
        arguments: JSON text.
    """

    id: str
    name: str
    arguments: str


def build_parser(form: ToolFormat) -> ToolCallParser:
    """Return the parser of a format."""
    from twinkle import registry

    parser: ToolCallParser = registry().build(form.parser, "tool_parser")
    return parser


def forced_grammar(form: ToolFormat, parser: ToolCallParser, tools: Sequence[dict[str, Any]], several: bool) -> str:
    """Return a grammar (Lark, for llguidance) of one call of any of the tools, or of several.

    Raises:
        InvalidParameter: the model's format of calls is not JSON, so it cannot be forced.
    """
    if not form.json:
        raise InvalidParameter(
            "tool_choice", "this model does not write tool calls as JSON, so they cannot be forced; use 'auto'"
        )
    opening, closing = (_literal(marker, form.special) for marker in (parser.open_marker, parser.close_marker))
    names = [f"call_{number}" for number in range(len(tools))]
    one = f"({' | '.join(names)})"
    lines = [f'start: {one} ("\\n" {one}){{0,{_MOST_CALLS - 1}}}' if several else f"start: {one}"]
    for name, tool in zip(names, tools, strict=True):
        function = tool["function"]
        begin = f'{form.before}{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = json.dumps(schema_of(function))
        lines.append(f"{name}: {opening} {json.dumps(begin)} {name}_arguments {json.dumps('}' + form.after)} {closing}")
        lines.append(f"{name}_arguments: %json {schema}")
    return "\n".join(lines)


def check_parameters(tool: Mapping[str, Any]) -> None:
    """Check that the arguments of a tool are an object.

    Raises:
        InvalidParameter: its schema has another type.
    """
    function = tool["function"]
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise InvalidParameter(
            "tools", f"the parameters of the tool {function['name']!r} must be a schema of the type 'object', "
            f"got {str(kind)[:80]!r}"
        )  # fmt: skip


def schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments."""
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, "type": "object"}
    return options | (function.get("parameters") or {})


def strict_grammar(form: ToolFormat, parser: ToolCallParser, tools: Sequence[dict[str, Any]]) -> str:
    """Return a grammar (Lark, for llguidance) of any text in which each call matches the schema of its tool.

    Raises:
        InvalidParameter: the model's format of calls is not JSON, so schemas cannot be enforced.
    """
    from llguidance import StructTag

    if not form.json:
        raise InvalidParameter(
            "tools", "this model does not write tool calls as JSON, so strict=true cannot be enforced; leave it out"
        )
    tags = []
    for tool in tools:
        function = tool["function"]
        begin = f'{parser.open_marker}{form.before}{{"name": {json.dumps(function["name"])}, "arguments": '
        end = "}" + form.after + parser.close_marker
        tags.append(StructTag(trigger=parser.open_marker, begin=begin, grammar=schema_of(function), end=end))
    return StructTag.to_grammar(tags, assume_special=form.special)


def _literal(marker: str, special: bool) -> str:
    return marker if special else json.dumps(marker)


class ToolReader:
    """Separates text from tool calls as they arrive.

    Args:
        parser: of the model's format.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._held = ""
        self._called = False

    def add(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the text and the calls that are complete."""
        self._held += text
        shown, calls = "", []
        while True:
            start = self._held.find(self._parser.open_marker)
            if start < 0:
                keep = _overlap(self._held, self._parser.open_marker)
                shown, self._held = shown + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                break
            end = self._held.find(self._parser.close_marker, start)
            if end < 0:
                shown, self._held = shown + self._held[:start], self._held[start:]
                break
            past = end + len(self._parser.close_marker)
            shown += self._held[:start]
            block, self._held = self._held[start:past], self._held[past:]
            found = self._parse(block)
            calls += found
            shown += "" if found else block
        return self._visible(shown, bool(calls)), calls

    def finish(self, cut: bool = False) -> tuple[str, list[Call]]:
        """Return the rest: calls of formats without an end, or text.

        Args:
            cut: whether the text was cut; then a call that is not complete is dropped, since its markup is not text.
        """
        held, self._held = self._held, ""
        calls = self._parse(held)
        shown = self._parser.clean(held) if calls else held
        marker = self._parser.open_marker
        if cut and not calls and len(marker) > 1 and held.startswith(marker):
            inside = held[len(marker) :].lstrip()
            shown = held if inside and inside[0] not in "{[<" else ""
        return self._visible(shown, bool(calls)), calls

    def _parse(self, text: str) -> list[Call]:
        found = self._parser.parse(text)
        return [Call(f"call_{secrets.token_hex(12)}", *_named(call)) for call in found]

    def _visible(self, text: str, called: bool) -> str:
        """Return text without the white space that separates it from calls."""
        self._called = self._called or called
        return "" if self._called and not text.strip() else text


def _named(call: Any) -> tuple[str, str]:
    function = call["function"]
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may begin `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
