"""The contract of a condenser, and the choice of the chunks that are shortened."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_agentic.data_format import Chunk, Chunks

SKIPPED_ROLES = ("system", "tool", "assistant")


class Condenser(ABC):
    """Shortens chunks of text; a shortened chunk has `raw["condensed"]`, and its text before as `raw["original"]`."""

    @abstractmethod
    def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
        """Return the chunks, some of them shortened."""


class Choice:
    """Which chunks are shortened, and to what length.

    Args:
        compression_ratio: by how much, above 1.
        min_chars: shorter chunks stay.
        skip_roles: chunks of these roles stay.
        rounds: only chunks of these rounds are shortened; None are all.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        compression_ratio: float,
        min_chars: int,
        skip_roles: Collection[str],
        rounds: Sequence[int] | None,
    ) -> None:
        if isinstance(compression_ratio, bool) or not compression_ratio > 1:
            raise ArgumentError(f"compression_ratio must be above 1, got {compression_ratio!r}")
        at_least("min_chars", min_chars, 0)
        if isinstance(skip_roles, str):
            raise ArgumentError(f"skip_roles must be a list of roles, got {skip_roles!r}")
        self.compression_ratio, self.min_chars = float(compression_ratio), min_chars
        self.skip_roles = frozenset(skip_roles)
        self.rounds = None if rounds is None else frozenset(rounds)

    def takes(self, chunk: Chunk) -> bool:
        """Return whether a chunk is to be shortened."""
        raw, content = chunk.get("raw"), chunk.get("content")
        own = raw if isinstance(raw, dict) else {}
        return (
            chunk.get("type") == "text"
            and isinstance(content, str)
            and bool(content.strip())
            and len(content) >= self.min_chars
            and chunk.get("role") not in self.skip_roles
            and (self.rounds is None or chunk.get("round") in self.rounds)
            and not own.get("condensed")
            and own.get("kind") is None
        )

    def budget(self, text: str) -> int:
        """Return the number of characters that the shortened text may have."""
        return math.ceil(len(text) / self.compression_ratio)


def condensed(chunk: Chunk, text: str) -> Chunk:
    """Return a chunk with its shorter text."""
    raw = chunk.get("raw")
    own = dict(raw) if isinstance(raw, dict) else {}
    return {**chunk, "content": text, "raw": {**own, "condensed": True, "original": chunk["content"]}}


def at_least(name: str, value: Any, lowest: int) -> int:
    """Return a whole number of at least `lowest`.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ArgumentError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
    return value
