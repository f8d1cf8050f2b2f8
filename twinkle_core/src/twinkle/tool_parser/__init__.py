"""Tool-call parsers: the contract `ToolCallParser`, and every installed parser by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.tool_parser.base import Block, BlockParser, ToolCallParser
from twinkle.tool_parser.finding import detect_first, parsers

__all__ = ["Block", "BlockParser", "ToolCallParser", "detect_first", "parsers"]

__getattr__, __dir__ = room(__name__, "tool_parser")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle.tool_parser.cline import ClineParser as ClineParser
    from twinkle.tool_parser.dsml import DSMLParser as DSMLParser
    from twinkle.tool_parser.hermes import HermesQwenParser as HermesQwenParser
    from twinkle.tool_parser.react import ReActParser as ReActParser
    from twinkle.tool_parser.vcp import VCPParser as VCPParser
