# Written by `twinkle plugins types`; do not edit.
"""Published path of the tool-call parsers and of `ToolCallRegistry`."""

from twinkle._registry import lazy_names
from twinkle.tool_parser import ToolCallParser

__all__ = ["ToolCallParser"]


from twinkle_chat.tool_parsers.finding import ToolCallRegistry as ToolCallRegistry
