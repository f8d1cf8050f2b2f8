"""Contract checks of tool-call parsers: they find all calls in their format, and none in other text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import shown

Call = tuple[str, Mapping[str, Any]]
PLAIN = (
    "",
    "The answer is 5.",
    'Here is JSON: {"name": "search", "arguments": {"q": 1}}',
    "<p>some <b>HTML</b></p> and a < b > c",
    "```python\nprint({'action': [1]})\n```",
    "An Action is a thing; name[0] is the first.",
    "漢字 🙂 \x00",
)
"""Texts without a call."""


@dataclass(kw_only=True)
class ToolParserCase(Case):
    """A parser and texts in its markup.

    Attributes:
        calls: for each text the calls in it, as (name, arguments).
        plain: texts without calls; by default prose, JSON, HTML and code.
    """

    kind = "tool_parser"

    calls: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    plain: Sequence[str] = PLAIN

    def texts(self) -> Mapping[str, Sequence[Call]]:
        """Return the texts with calls."""
        if not self.calls:
            raise NotApplicable("its example gives no calls; give calls={text: [(name, arguments), ...]}")
        return self.calls


def markers(case: ToolParserCase) -> None:
    """It defines its name and the texts that start and end a call."""
    parser = case.build()
    for name in ("name", "open_marker", "close_marker"):
        value = getattr(parser, name, None)
        require(isinstance(value, str) and value, f"{name} is {shown(value)}; it must be a text")


def calls_found(case: ToolParserCase) -> None:
    """It finds each call with its name and arguments, in order, also with text around."""
    parser = case.build()
    for text, calls in case.texts().items():
        for whole in (text, f"I will look.\n{text}\nDone."):
            require(parser.detect(whole), f"detect() says there is no call in {shown(whole)}")
            found = [_as_pair(call) for call in parser.parse(whole)]
            wanted = [(name, dict(arguments)) for name, arguments in calls]
            require(found == wanted, f"parse() found {shown(found, 300)}; the text contains {shown(wanted, 300)}")


def form(case: ToolParserCase) -> None:
    """A call has a distinct id, the type "function", a name, and arguments as a dict or as JSON text of an object."""
    parser = case.build()
    for text in case.texts():
        found = parser.parse(f"{text}\n{text}")
        ids = [call.get("id") for call in found]
        require(all(isinstance(i, str) and i for i in ids), f"the ids are {ids}; each call needs a text")
        require(len(set(ids)) == len(ids), f"the ids {ids} are not distinct")
        for call in found:
            require(call.get("type") == "function", f"the type is {call.get('type')!r}; it is 'function'")
            arguments = call["function"]["arguments"]
            require(
                isinstance(_as_pair(call)[1], dict), f"the arguments are {shown(arguments)}; they must be an object"
            )


def cleaned(case: ToolParserCase) -> None:
    """`clean` removes calls and keeps the text around them."""
    parser = case.build()
    for text in case.texts():
        left = parser.clean(f"I will look.\n{text}\nDone.")
        require("I will look." in left and "Done." in left, f"clean() left {shown(left)} of the text around")
        require(parser.open_marker not in left or not parser.detect(left), f"clean() left {shown(left)}")
        require(not parser.parse(left), f"after clean() there are calls in {shown(left)}")


def no_call(case: ToolParserCase) -> None:
    """No call is found in a text without one, and `clean` keeps the text."""
    parser = case.build()
    for text in case.plain:
        require(not parser.detect(text), f"detect() sees a call in {shown(text)}")
        require(parser.parse(text) == [], f"parse() found {shown(parser.parse(text))} in {shown(text)}")
        require(
            parser.clean(text).strip() == text.strip(), f"clean() made {shown(parser.clean(text))} of {shown(text)}"
        )
        require(parser.extract_tool_result(text) is None, f"extract_tool_result() found one in {shown(text)}")


def broken(case: ToolParserCase) -> None:
    """Truncated or damaged calls are ignored and never raise an exception."""
    parser = case.build()
    for text, calls in case.texts().items():
        wanted = [(name, dict(arguments)) for name, arguments in calls]
        damaged = [text[:end] for end in range(len(text))] + [
            text[:at] + '\\"{' + text[at + 1 :] for at in range(len(text))
        ]
        for piece in damaged:
            found = parser.parse(piece)
            require(bool(found) == bool(parser.detect(piece)), f"detect() and parse() differ about {shown(piece)}")
            parser.clean(piece)
            for call in found:
                require(isinstance(_as_pair(call)[1], dict), f"the arguments of {shown(call)} are not an object")
        cut = parser.parse(text[: len(text) // 2])
        require(len(cut) <= len(wanted), f"half of {shown(text)} holds more calls than the whole")


def same_again(case: ToolParserCase) -> None:
    """The same text gives the same calls with the same ids, also after other texts."""
    parser = case.build()
    for text in case.texts():
        first = parser.parse(text)
        parser.parse(f"{text}{text}")
        second = parser.parse(text)
        require(first == second, f"two calls gave {shown(first)} and {shown(second)}")


def pickle(case: ToolParserCase) -> None:
    """It can be pickled, as part of a template."""
    pickled(case.build())


CASE = ToolParserCase
CHECKS = (markers, calls_found, form, cleaned, no_call, broken, same_again, pickle)


def _as_pair(call: Any) -> tuple[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    try:
        return function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        require(False, f"the arguments {shown(arguments)} are not JSON")
        raise
