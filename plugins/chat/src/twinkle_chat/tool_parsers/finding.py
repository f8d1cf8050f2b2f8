"""Finds the parser for the tool calls in a text: installed ones, and those that a script registers."""

import threading
from collections.abc import Iterator

from twinkle.errors import ComponentTypeError
from twinkle.tool_parser import BlockParser, ToolCallParser


class ToolCallRegistry:
    """Parsers of this process: all installed ones, by name, and those that were registered, in order.

    A parser of a plugin is listed in its manifest and available in every process. `register` is for scripts.
    """

    _registered: tuple[ToolCallParser, ...] = ()
    _lock = threading.Lock()

    @classmethod
    def register(cls, parser: ToolCallParser) -> ToolCallParser:
        """Add a parser to this process and return it; if there is one with its `name`, that one is returned.

        Raises:
            ComponentTypeError: it is not a `ToolCallParser`.
        """
        if not isinstance(parser, ToolCallParser):
            raise ComponentTypeError(f"parser must be a ToolCallParser, got {type(parser).__name__}")
        with cls._lock:
            known = next((one for one in cls.parsers() if one.name == parser.name), None)
            if known is None:
                ToolCallRegistry._registered += (parser,)
        return known or parser

    @classmethod
    def parsers(cls) -> list[ToolCallParser]:
        """Return all parsers."""
        return list(parsers())

    @classmethod
    def detect_first(cls, text: str) -> ToolCallParser | None:
        """Return the parser of the first call in a text; see `twinkle.tool_parser.detect_first`."""
        return detect_first(text)


def parsers() -> Iterator[ToolCallParser]:
    """Yield every installed parser, by name, and then every registered one."""
    from twinkle._registry import registry

    for name, providers in sorted(registry().specs("tool_parser").items()):
        for spec in providers:
            yield registry().build(f"{spec.dist}/{name}", "tool_parser")
    yield from ToolCallRegistry._registered


def detect_first(text: str) -> ToolCallParser | None:
    """Return the parser whose first call begins earliest in `text`, or None if no parser finds a call.

    Choosing the earliest ignores calls in other markup that are quoted in arguments. Ties are broken by the order of
    `parsers`.
    """
    candidates = [(start, parser) for parser in parsers() if (start := _start(parser, text)) is not None]
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _start(parser: ToolCallParser, text: str) -> int | None:
    """Return the start of the first call; None if there is no call."""
    if isinstance(parser, BlockParser):
        return next((block.start for block in parser.blocks(text)), None)
    if not parser.detect(text):
        return None
    # A parser without a marker does not tell where its call begins, so others are preferred.
    return max(0, text.find(parser.open_marker)) if parser.open_marker else len(text)
