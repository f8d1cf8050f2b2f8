"""Beginnings of prompts that need not be read again: those of running sequences, and those of earlier prompts."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from twinkle_transformers.sampling.kv_cache import KVCache
from twinkle_transformers.sampling.requests import Request


@dataclass(slots=True)
class SharedPrefix:
    """The beginning that a prompt shares.

    Attributes:
        source: whose slots have most of it; None where that is less than a block.
        tokens: of it that are there to be copied.
        coming: tokens of it that will be there once every prompt is read.
    """

    source: Request | None = None
    tokens: int = 0
    coming: int = 0

    @property
    def grows(self) -> bool:
        """Whether it is worth waiting for: a step costs about what a block costs."""
        return self.coming - self.tokens >= BLOCK


def shared_prefix(request: Request, others: Iterable[Request]) -> SharedPrefix:
    """Return what others have, or will have, of a prompt's beginning, no more of it than `usable`.

    What a prompt that is being read has read itself does not count yet: a NaN in what follows, which its logits will
    show, spoils it too.

    Args:
        request: the prompt.
        others: requests that have slots; only those of the same adapter count.
    """
    tokens, most = request.prompt.ids, usable(request)
    head = SharedPrefix()
    for other in others:
        if head.tokens == most:
            break
        if other.key != request.key or other.stale or other.over:
            continue
        if tokens[head.tokens : head.tokens + 1] != other.prompt.ids[head.tokens : head.tokens + 1]:
            continue  # no longer than what was found
        count = common(tokens, other.prompt.ids, most)
        head.coming = max(head.coming, count)
        there = min(count, other.known) if other.reading else count
        if there > head.tokens:
            head.source, head.tokens = other, there
    return head if head.tokens >= BLOCK else SharedPrefix(coming=head.coming)


def usable(request: Request) -> int:
    """Return how many tokens a prompt may begin with unread: none that is scored, and the last is always read."""
    return min(request.prompt.scores.first, len(request.prompt.ids) - 1)


def common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return with how many equal tokens two prompts begin, `most` of them at most."""
    count, most = 0, min(most, len(one), len(other))
    for size in (256, 16, 1):  # slices compare faster than tokens
        while count + size <= most and one[count : count + size] == other[count : count + size]:
            count += size
    return count


BLOCK = 16
"""Tokens of a block; only whole blocks are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Keys and values of some tokens.

    Attributes:
        number: says which block it is; blocks that follow it name it.
        parts: what `KVCache.take` returned.
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

    def add(self, version: str, tokens: Sequence[int], store: KVCache, slot: int) -> None:
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
