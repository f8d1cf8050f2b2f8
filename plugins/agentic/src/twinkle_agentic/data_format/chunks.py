"""Chunks: a conversation as a list of parts, which a condenser may shorten one by one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypedDict

from twinkle.errors import ArgumentError

MEDIA = ("image", "video", "audio")


class Chunk(TypedDict, total=False):
    """One part of a message.

    Attributes:
        type: what `content` is.
        content: the text; for media the picture, video or sound, or its address.
        raw: facts about the chunk: `message` and `part`, the positions that `NativeChunker` records; `keys`, the other
            keys of the message; `kind`, `reasoning_content` or `tool_call`; `tool_call`; `tool_call_id`; and, after
            condensing, `condensed` and `original`. For media, the content part itself.
        role: of the message.
        round: how many messages of the user there were before, this one included; 0 before the first.
    """

    type: Literal["text", "image", "video", "audio"]
    content: Any
    raw: Any
    role: str
    round: int


@dataclass
class Chunks:
    """The chunks of one or several conversations, in order."""

    chunks: list[Chunk]

    def to_trajectory(self, block_wrapper: tuple[str, str] | None = ("<block_{n}>", "</block_{n}>")) -> dict[str, Any]:
        """Return the conversation of the chunks.

        Chunks of one message become one message; of chunks without a recorded message, those of one role that follow
        each other do. Text that was not condensed is returned as it was; elsewhere, an empty line separates chunks.

        Args:
            block_wrapper: texts around each condensed chunk, with `{n}` for its number from 1; None adds nothing.

        Returns:
            A trajectory: `messages`, and `images`, `videos` and `audios` for media that are not content parts.

        Raises:
            ArgumentError: `block_wrapper` is not a pair of texts.
        """
        if block_wrapper is not None and not (isinstance(block_wrapper, tuple | list) and len(block_wrapper) == 2):
            raise ArgumentError(f"block_wrapper must be a pair of texts or None, got {block_wrapper!r}")
        numbers = {id(chunk): number for number, chunk in self.blocks()}
        loose = [chunk for chunk in self.chunks if chunk.get("type") in MEDIA and not _raw(chunk)]
        bound = [chunk for chunk in self.chunks if chunk.get("type") not in MEDIA or _raw(chunk)]
        wrapped = [_wrapped(chunk, numbers.get(id(chunk)), block_wrapper) for chunk in bound]
        messages = [_message(list(group)) for _, group in groupby(wrapped, key=_group)]
        media = {f"{kind}s": [chunk["content"] for chunk in loose if chunk["type"] == kind] for kind in MEDIA}
        return {"messages": messages, **{name: values for name, values in media.items() if values}}

    def blocks(self) -> Iterator[tuple[int, Chunk]]:
        """Yield the condensed chunks with their numbers from 1, as `to_trajectory` wraps them."""
        condensed = (chunk for chunk in self.chunks if is_condensed(chunk))
        yield from enumerate(condensed, 1)


def is_condensed(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk is text that a condenser shortened, and is wrapped as a block."""
    text = chunk.get("type") == "text" and chunk.get("role") != "tool" and bool(chunk.get("content"))
    return text and bool(_raw(chunk).get("condensed"))


def _raw(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = chunk.get("raw")
    return raw if isinstance(raw, Mapping) else {}


def _group(chunk: Mapping[str, Any]) -> tuple[Any, str]:
    return _raw(chunk).get("message"), str(chunk.get("role") or "user")


def _wrapped(chunk: Chunk, number: int | None, wrapper: tuple[str, str] | None) -> Chunk:
    if number is None or wrapper is None:
        return chunk
    before, after = (text.replace("{n}", str(number)) for text in wrapper)
    return {**chunk, "content": f"{before}{chunk['content']}{after}"}


def _message(chunks: list[Chunk]) -> dict[str, Any]:
    raws = [_raw(chunk) for chunk in chunks]
    message: dict[str, Any] = {"role": chunks[0].get("role") or "user"}
    message |= next((dict(raw["keys"]) for raw in raws if raw.get("keys")), {})
    if (call_id := next((raw["tool_call_id"] for raw in raws if raw.get("tool_call_id")), None)) is not None:
        message["tool_call_id"] = call_id
    thoughts = [c for c, raw in zip(chunks, raws, strict=True) if raw.get("kind") == "reasoning_content"]
    calls = [dict(raw["tool_call"]) for raw in raws if raw.get("kind") == "tool_call"]
    parts = [c for c, raw in zip(chunks, raws, strict=True) if raw.get("kind") is None]
    if thoughts:
        message["reasoning_content"] = _joined(thoughts)
    if any(chunk.get("type") in MEDIA for chunk in parts):
        message["content"] = [_part(chunk) for chunk in parts]
    elif parts or not calls:
        message["content"] = _joined(parts)
    if calls:
        message["tool_calls"] = calls
    return message


def _joined(chunks: Iterable[Chunk]) -> str:
    """Join texts: pieces of one part directly, others by an empty line."""
    text, before = "", None
    for chunk in chunks:
        raw = _raw(chunk)
        whole = raw.get("part") is not None and not raw.get("condensed")
        part = (raw.get("message"), raw.get("part")) if whole else None
        text += ("\n\n" if text and (part is None or part != before) else "") + str(chunk.get("content") or "")
        before = part
    return text


def _part(chunk: Chunk) -> dict[str, Any]:
    if chunk.get("type") not in MEDIA:
        return {"type": "text", "text": chunk.get("content") or ""}
    kept = {key: value for key, value in _raw(chunk).items() if key not in ("condensed", "message", "part", "keys")}
    return kept or {"type": chunk["type"], chunk["type"]: chunk.get("content")}
