# Written by `twinkle plugins types`; do not edit.
"""Tools: the contract `Tool`, and every installed tool by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle._registry import lazy_names
from twinkle.data_format import Tool as ToolInfo

__all__ = ["Tool", "ToolInfo"]


class Tool(ABC):
    """A function that a model may call."""

    @abstractmethod
    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        """Run the tool and return its result as text."""

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """Return the schema that the model sees."""



from twinkle_agentic.envs.env_tool import EnvTool as EnvTool
from twinkle_agentic.tools.calculator import CalculatorTool as CalculatorTool
from twinkle_agentic.tools.extract_condensed import ExtractCondensed as ExtractCondensed
