"""`ExtractCondensed`: a tool that returns the whole text of a condensed block."""

from collections.abc import Mapping
from typing import Any

from twinkle.tool import Tool, ToolInfo
from twinkle_agentic.data_format import Chunks

TOOL_NAME = "extract_condensed"


class ExtractCondensed(Tool):
    """Returns the text that a condenser shortened, by the number of its `<block_N>`; each block once.

    Args:
        chunks: after condensing; the numbers are those of `Chunks.to_trajectory`.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._originals = {number: (chunk.get("raw") or {}).get("original") for number, chunk in chunks.blocks()}
        self._returned = set[int]()

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks."""
        return sorted(self._originals)

    def __len__(self) -> int:
        return len(self._originals)

    def __contains__(self, number: object) -> bool:
        return number in self._originals

    def tool_info(self) -> ToolInfo:
        """Return the schema: one block number a call."""
        description = (
            "Returns the whole text of one shortened passage. Call it when the passage inside <block_N> lacks a detail "
            "that you need; one block a call, and each block once."
        )
        number = {"type": "integer", "description": "The number N of the block."}
        parameters = {"type": "object", "properties": {"blocks": number}, "required": ["blocks"]}
        return {
            "type": "function",
            "function": {"name": TOOL_NAME, "description": description, "parameters": parameters},
        }

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of block `blocks` (or `block`), or a text that begins with `Error:`."""
        key = "block" if "block" in arguments and "blocks" not in arguments else "blocks"
        given = arguments.get(key)
        if isinstance(given, str) and given.strip().isdecimal():
            given = int(given)
        if isinstance(given, bool) or not isinstance(given, int):
            return f'Error: "{key}" must be the number of one block, got {str(given)[:80]!r}.'
        if given not in self._originals:
            count = len(self._originals)
            return f"Error: there is no block {given}; " + (f"blocks are 1 to {count}." if count else "there are none.")
        if given in self._returned:
            return f"Block {given} was returned before; read that result again."
        if not isinstance(original := self._originals[given], str):
            return f"Error: the whole text of block {given} was not kept."
        self._returned.add(given)
        return original
