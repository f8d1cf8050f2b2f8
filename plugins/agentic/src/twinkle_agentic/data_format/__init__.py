"""Data formats of long conversations: chunks of their messages."""

from twinkle_agentic.data_format.chunks import Chunk, Chunks

__all__ = ["Chunk", "Chunks"]
