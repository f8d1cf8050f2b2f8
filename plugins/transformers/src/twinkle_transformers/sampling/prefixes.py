"""Keys and values of prompts that were read before, in blocks, for requests that begin alike."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from twinkle_transformers.sampling.store import Store

BLOCK = 16
"""Tokens of a block; only whole blocks are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Keys and values of some tokens.

    Attributes:
        number: says which block it is; blocks that follow it name it.
        parts: what `Store.take` returned.
        bytes: of all of them.
    """

    number: int
    parts: tuple[Tensor, ...]
    bytes: int


class PrefixCache:
    """Blocks by what comes before them and their own tokens; those not used for the longest time go first.

    Attributes:
        limit: bytes that it may take; 0 keeps nothing.
        bytes: that it takes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._count = 0
        self._blocks: OrderedDict[tuple[str | int, tuple[int, ...]], Block] = OrderedDict()

    def find(self, version: str, tokens: Sequence[int]) -> list[Block]:
        """Return the blocks with which `tokens` begin; at least one token is left over.

        Args:
            version: of the adapter, "" for the base model.
            tokens: of a prompt.
        """
        keys = []
        found: list[Block] = []
        parent: str | int = version
        for first in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
            key = (parent, tuple(tokens[first : first + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                break
            keys.append(key)
            found.append(block)
            parent = block.number
        for key in reversed(keys):  # a block is of no use without those before it, so it goes first
            self._blocks.move_to_end(key)
        return found

    def add(self, version: str, tokens: Sequence[int], store: Store, slot: int) -> None:
        """Keep the whole blocks among the tokens that a slot has.

        Args:
            version: see `find`.
            tokens: that the slot has, from its first on.
            store: where they are.
            slot: the slot.
        """
        parent: str | int = version
        size = BLOCK * store.token_bytes
        keys: list[tuple[str | int, tuple[int, ...]]] = []
        for first in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            if (len(keys) + 1) * size > self.limit:
                break
            key = (parent, tuple(tokens[first : first + BLOCK]))
            if key not in self._blocks:
                self._count += 1
                self._blocks[key] = Block(self._count, store.take(slot, first, first + BLOCK), size)
                self.bytes += size
            keys.append(key)
            parent = self._blocks[key].number
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while self.bytes > self.limit:
            _, gone = self._blocks.popitem(last=False)
            self.bytes -= gone.bytes

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self.bytes = 0
