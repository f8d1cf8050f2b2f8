"""Chunkers: divide conversations into chunks."""

from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.chunker.native import NativeChunker
from twinkle_agentic.data_format import Chunk, Chunks

__all__ = ["Chunk", "Chunker", "Chunks", "NativeChunker"]
