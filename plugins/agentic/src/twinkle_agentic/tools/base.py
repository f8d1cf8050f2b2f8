"""Published path of the contract of a tool, which is defined in core."""

from twinkle.tool import Tool, ToolInfo

__all__ = ["Tool", "ToolInfo"]
