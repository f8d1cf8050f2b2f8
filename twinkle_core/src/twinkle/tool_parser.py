"""The contract of tool-call parsers, and a base class of parsers that search for blocks of markup."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from twinkle._registry import lazy_names
from twinkle.data_format import ToolCall

__all__ = ["Block", "BlockParser", "ToolCallParser"]


class ToolCallParser(ABC):
    """Parses tool calls in one format.

    Attributes:
        name: short name of the format.
        open_marker: text that begins a call.
        close_marker: text that ends it.
    """

    name: str
    open_marker: str
    close_marker: str

    @abstractmethod
    def detect(self, text: str) -> bool:
        """Return whether `text` contains a call in this format."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in `text`, in order, with arguments as dicts; a call that does not parse is left out."""

    @abstractmethod
    def clean(self, text: str) -> str:
        """Return `text` without its calls."""

    def extract_tool_result(self, text: str) -> str | None:
        """Return the tool result in `text`, if this format defines one."""
        return None


class Block(NamedTuple):
    """A block of markup: the characters `start` to `end` of a text, and its calls as name and arguments."""

    start: int
    end: int
    calls: list[tuple[str, Any]]


class BlockParser(ToolCallParser):
    """A parser that yields the blocks of a text; markup that is not a call is not a block and stays in the text."""

    @abstractmethod
    def blocks(self, text: str) -> Iterable[Block]:
        """Yield the blocks of `text` that contain calls, in order, without overlap."""

    def detect(self, text: str) -> bool:
        """Return whether `text` contains a complete call in this format."""
        return any(True for _ in self.blocks(text))

    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in `text`, in order, with arguments as dicts; calls that do not parse are left out.

        Their ids are `call_0`, `call_1` and so on: the same text gives the same calls.
        """
        calls = [call for block in self.blocks(text) for call in block.calls]
        return [_tool_call(number, *call) for number, call in enumerate(calls)]

    def clean(self, text: str) -> str:
        """Return `text` without its calls, and without white space at its ends."""
        kept, place = [], 0
        for block in self.blocks(text):
            kept.append(text[place : block.start])
            place = block.end
        return "".join([*kept, text[place:]]).strip()


def _tool_call(number: int, name: str, arguments: Any) -> ToolCall:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def json_or_text(text: str) -> Any:
    """Return the value of a text that is JSON (a number, boolean, list or object), else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def json_object(text: str) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def trimmed(text: str) -> str:
    """Remove one line break at each end of a text, if there is one."""
    return text.removeprefix("\n").removesuffix("\n")


def between(text: str, opening: str, closing: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and content of each part of `text` from a `closing` back to the last `opening` before it."""
    place = 0
    while (end := text.find(closing, place)) >= 0:
        start = text.rfind(opening, place, end)
        if start >= 0:
            yield start, end + len(closing), text[start + len(opening) : end]
        place = end + len(closing)


def elements(text: str, opening: re.Pattern[str], closing: str) -> list[tuple[str, ...]] | None:
    r"""Parse a text that consists of elements with white space between them.

    Args:
        text: the text. It is scanned once.
        opening: pattern that begins an element.
        closing: text that ends it, in which `\\1` and so on stand for the groups of `opening`.

    Returns:
        For each element the groups of its opening and its content; None if there is anything else in the text.
    """
    parts, place = [], 0
    while (begin := opening.match(text, place)) is not None:
        ending = begin.expand(closing)
        end = text.find(ending, begin.end())
        if end < 0:
            return None
        parts.append((*begin.groups(), text[begin.end() : end]))
        place = end + len(ending)
    return None if text[place:].strip() else parts


__getattr__, __dir__ = lazy_names(__name__, "tool_parser")
