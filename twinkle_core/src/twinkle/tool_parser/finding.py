"""Finds the installed parser that knows the tool calls in a text."""

from collections.abc import Iterator

from twinkle.tool_parser.base import ToolCallParser


def parsers() -> Iterator[ToolCallParser]:
    """Yield every installed parser, by name."""
    from twinkle._registry import registry

    for name, providers in sorted(registry().specs("tool_parser").items()):
        for spec in providers:
            yield registry().build(f"{spec.dist}/{name}", "tool_parser")


def detect_first(text: str) -> ToolCallParser | None:
    """Return the first installed parser, by name, that finds a call in `text`; None if none does."""
    return next((parser for parser in parsers() if parser.detect(text)), None)
