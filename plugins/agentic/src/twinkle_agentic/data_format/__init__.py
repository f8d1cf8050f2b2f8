"""Data formats of conversations: those of `twinkle.data_format`, and chunks of long ones."""

from twinkle.data_format import Message, Tool, ToolCall, Trajectory
from twinkle_agentic.data_format.chunks import Chunk, Chunks

__all__ = ["Chunk", "Chunks", "Message", "Tool", "ToolCall", "Trajectory"]
