"""Finds the installed parser for the tool calls in a text."""

from collections.abc import Iterator

from twinkle.tool_parser import BlockParser, ToolCallParser


def parsers() -> Iterator[ToolCallParser]:
    """Yield every installed parser, by name."""
    from twinkle._registry import registry

    for name, providers in sorted(registry().specs("tool_parser").items()):
        for spec in providers:
            yield registry().build(f"{spec.dist}/{name}", "tool_parser")


def detect_first(text: str) -> ToolCallParser | None:
    """Return the installed parser whose first call begins earliest in `text`, or None if no parser finds a call.

    Choosing the earliest ignores calls in other markup that are quoted in arguments. Ties are broken by name.
    """
    candidates = [(start, parser) for parser in parsers() if (start := _start(parser, text)) is not None]
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _start(parser: ToolCallParser, text: str) -> int | None:
    """Return the start of the first call; None if there is no call."""
    if isinstance(parser, BlockParser):
        return next((block.start for block in parser.blocks(text)), None)
    return max(0, text.find(parser.open_marker)) if parser.detect(text) else None
