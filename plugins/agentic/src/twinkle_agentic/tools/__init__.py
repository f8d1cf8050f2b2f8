"""Tools that a model may call, and the manager that calls them."""

from twinkle_agentic.tools.base import Tool, ToolInfo
from twinkle_agentic.tools.calculator import CalculatorTool
from twinkle_agentic.tools.extract_condensed import ExtractCondensed
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["CalculatorTool", "ExtractCondensed", "Tool", "ToolInfo", "ToolManager"]
