"""`NativeChunker`: divides the first question of a conversation at paragraphs, sentences and words."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError
from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.data_format import Chunk, Chunks
from twinkle_agentic.data_format.chunks import MEDIA

SEPARATORS = ("\n\n", "\n", "。", "．", ".", "！", "!", "？", "?", "；", ";", "，", ",", " ")
_OWN_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")


class NativeChunker(Chunker):
    """Divides the text of the first user message into chunks; every other message part is one chunk.

    A text is divided at the first separator; what is still too long is divided at the next one, and in the end at any
    character. Neighbouring pieces are joined again up to `chunk_size`. The pieces of a text, joined, are the text.

    Args:
        chunk_size: characters of a chunk, at most.
        separators: from coarse to fine; None are paragraphs, lines, sentences, clauses and words.
        passage_boundary_re: a regular expression, matched at each line; each match begins a passage. Passages are not
            joined with each other.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        chunk_size: int = 1024,
        separators: Sequence[str] | None = None,
        passage_boundary_re: str | None = None,
    ) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ArgumentError(f"chunk_size must be at least 1 character, got {chunk_size!r}")
        if isinstance(separators, str):
            raise ArgumentError(f"separators must be a list of texts, got {separators!r}")
        self.chunk_size = chunk_size
        self.separators = [mark for mark in (SEPARATORS if separators is None else separators) if mark]
        try:
            self.passage_boundary = (
                None if passage_boundary_re is None else re.compile(passage_boundary_re, re.MULTILINE)
            )
        except re.error as error:
            raise ArgumentError(f"passage_boundary_re is not a regular expression: {error}") from error

    def __call__(self, trajectory: Trajectory) -> Chunks:
        """Return the chunks of a conversation."""
        chunks: list[Chunk] = []
        rounds = 0
        for number, message in enumerate(trajectory.get("messages") or ()):
            asks = message.get("role") == "user"
            rounds += asks
            for chunk in self._of(message, number, divide=asks and rounds == 1):
                chunks.append({**chunk, "round": rounds})
        return Chunks(chunks)

    def _of(self, message: Mapping[str, Any], number: int, divide: bool) -> Iterator[Chunk]:
        role = str(message.get("role") or "user")
        place: dict[str, Any] = {"message": number}
        if keys := {key: value for key, value in message.items() if key not in _OWN_KEYS}:
            place["keys"] = keys
        if message.get("tool_call_id"):
            place["tool_call_id"] = message["tool_call_id"]
        if message.get("reasoning_content"):
            thought = {**place, "kind": "reasoning_content"}
            yield {"type": "text", "content": message["reasoning_content"], "raw": thought, "role": role}
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for index, part in enumerate(parts):
            if part.get("type") in MEDIA:
                raw = {**part, **place}
                yield {"type": part["type"], "content": part.get(part["type"]), "raw": raw, "role": role}
                continue
            text = part.get("text") or ""
            for piece in self.split(text) if divide else [text]:
                yield {"type": "text", "content": piece, "raw": {**place, "part": index}, "role": role}
        for call in message.get("tool_calls") or ():
            called = {**place, "kind": "tool_call", "tool_call": call}
            yield {"type": "text", "content": "", "raw": called, "role": role}

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text, none longer than `chunk_size`; joined, they are the text."""
        starts = [] if self.passage_boundary is None else [m.start() for m in self.passage_boundary.finditer(text)]
        cuts = sorted({0, *starts, len(text)})
        passages = [text[start:end] for start, end in itertools.pairwise(cuts)]
        return [piece for passage in passages for piece in self._merged(self._divided(passage, self.separators))]

    def _divided(self, text: str, separators: Sequence[str]) -> list[str]:
        if len(text) <= self.chunk_size:
            return [text]
        if not separators:
            return [text[start : start + self.chunk_size] for start in range(0, len(text), self.chunk_size)]
        mark, *rest = separators
        pieces = [piece for piece in re.split(f"(?<={re.escape(mark)})", text) if piece]
        return [part for piece in pieces for part in self._divided(piece, rest)]

    def _merged(self, pieces: Sequence[str]) -> list[str]:
        merged = [""]
        for piece in pieces:
            if merged[-1] and len(merged[-1]) + len(piece) > self.chunk_size:
                merged.append("")
            merged[-1] += piece
        return merged
