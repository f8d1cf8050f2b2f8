"""Finds tool calls in generated text by the installed parsers; the first that knows the format is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle.tool_parser import ToolCallParser


def find_parser(text: str) -> "ToolCallParser | None":
    """Return the first installed parser, by name, that finds a call in `text`; None if none does."""
    from twinkle._registry import registry

    for name, providers in sorted(registry().specs("tool_parser").items()):
        for spec in providers:
            parser: Any = registry().build(f"{spec.dist}/{name}", "tool_parser")
            if parser.detect(text):
                return parser  # type: ignore[no-any-return]
    return None
