"""The contract of a tool, under its published path; it lies in core."""

from twinkle.tool import Tool, ToolInfo

__all__ = ["Tool", "ToolInfo"]
