"""Published path of the tool-call parsers and of `ToolCallRegistry`."""

from twinkle._registry import lazy_names
from twinkle.tool_parser import ToolCallParser

__all__ = ["ToolCallParser"]

__getattr__, __dir__ = lazy_names(__name__, "tool_parser")
