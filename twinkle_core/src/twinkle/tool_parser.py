"""Tool-call parsers: the contract `ToolCallParser`, and every installed parser by name."""

from abc import ABC, abstractmethod

from twinkle._lazy import room
from twinkle.data_format import ToolCall

__all__ = ["ToolCallParser"]


class ToolCallParser(ABC):
    """Knows one way in which models write tool calls.

    Attributes:
        name: short name of the format.
        open_marker: text that begins a call; generation may be cut there.
        close_marker: text that ends it.
    """

    name: str
    open_marker: str
    close_marker: str

    @abstractmethod
    def detect(self, text: str) -> bool:
        """Return whether `text` holds a call in this format."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in `text`, in order; a call that does not parse is left out."""

    @abstractmethod
    def clean(self, text: str) -> str:
        """Return `text` without its calls."""

    def extract_tool_result(self, text: str) -> str | None:
        """Return the tool result that `text` quotes, if this format has such a form."""
        return None


__getattr__, __dir__ = room(__name__, "tool_parser")
