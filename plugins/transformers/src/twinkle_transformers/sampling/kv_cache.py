"""The KV cache: keys and values of running sequences, their slots, and beginnings of prompts to read only once."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_transformers.sampling.requests import Place, Request

_LEAST = 64  # tokens that a slot has room for at first
BLOCK = 16
"""Tokens of a block; only whole blocks are kept."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token.

    Attributes:
        keys: heads and size of its keys.
        values: heads and size of its values.
        dtype: of both.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one token."""
        return (self.keys[0] * self.keys[1] + self.values[0] * self.values[1]) * self.dtype.itemsize


class KVCache:
    """Tensors `[members, slots, heads, capacity, size]`: keys and values of one shape, of all layers, lie in one.

    Attributes:
        slots: how many sequences there is room for.
        capacity: tokens that each slot has room for.
        token_bytes: of one token in all layers.
        keys: of each layer `[slots, heads, capacity, size]`, views.
        values: of each layer, views.
    """

    def __init__(self, layers: Sequence[LayerShape], device: torch.device) -> None:
        """Make an empty one.

        Args:
            layers: in the order in which the model calls them.
            device: where the model is.
        """
        self.layers, self.device = tuple(layers), device
        self.token_bytes = sum(layer.bytes for layer in layers)
        kinds: dict[Any, int] = {}
        self._places: list[tuple[tuple[Any, int], tuple[Any, int]]] = []
        for layer in layers:
            pair = []
            for shape in (layer.keys, layer.values):
                kind = (*shape, layer.dtype)
                pair.append((kind, kinds.setdefault(kind, 0)))
                kinds[kind] += 1
            self._places.append((pair[0], pair[1]))
        self._kinds = kinds
        self.slots = self.capacity = 0
        self._pools: dict[Any, Tensor] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.resize(0, 0)

    @property
    def bytes(self) -> int:
        """Bytes that it takes now."""
        return self.slots * self.capacity * self.token_bytes

    def resize(self, slots: int, capacity: int) -> None:
        """Make room for so many slots of so many tokens; what fits is kept."""
        kept, tokens = min(slots, self.slots), min(capacity, self.capacity)
        pools = {}
        for kind, members in self._kinds.items():
            heads, size, dtype = kind
            pools[kind] = torch.zeros(members, slots, heads, capacity, size, dtype=dtype, device=self.device)
            if kept and tokens:
                pools[kind][:, :kept, :, :tokens] = self._pools[kind][:, :kept, :, :tokens]
        self._pools = pools  # all or none: there may be no memory for the last
        self.slots, self.capacity = slots, capacity
        self.keys = [self._pools[kind][member] for (kind, member), _ in self._places]
        self.values = [self._pools[kind][member] for _, (kind, member) in self._places]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for pool in self._pools.values():
            pool[:, target, :, :tokens] = pool[:, source, :, :tokens]

    def clear(self, slot: int) -> None:
        """Zero a slot: what a later sequence masks must be finite, for 0 times NaN is NaN."""
        for pool in self._pools.values():
            pool[:, slot] = 0

    def take(self, slot: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return a copy of the tokens from `start` to `stop` of a slot."""
        return tuple(pool[:, slot, :, start:stop].clone() for pool in self._pools.values())

    def put(self, slot: int, start: int, taken: Sequence[Tensor]) -> None:
        """Put back what `take` returned, from `start` on."""
        for pool, part in zip(self._pools.values(), taken, strict=True):
            pool[:, slot, :, start : start + part.shape[2]] = part


class KVCacheManager:
    """Gives out slots of a store within a number of bytes.

    Every request reserves what it may need at most, so that none has to be put off once it has begun; the store itself
    grows with what is used.

    Attributes:
        store: the keys and values.
        budget: bytes that the store may take.
        places: the slots that are taken.
        expected: slots that will be wanted as things stand; growing at once costs less than growing often.
    """

    def __init__(self, store: KVCache, budget: int, slots: int) -> None:
        """Begin with nothing.

        Args:
            store: an empty one.
            budget: bytes.
            slots: at most so many.
        """
        self.store, self.budget, self._most = store, budget, slots
        self.places: list[Place] = []
        self.expected = 0
        self._reserved: dict[Request, int] = {}

    def fits(self, requests: Sequence[Request]) -> bool:
        """Say whether one more slot for each of these is to be had now."""
        slots = len(self.places) + len(requests)
        if slots > self._most:
            return False
        tokens = max(*(request.most for request in requests), *self._reserved.values(), 0)
        return slots * tokens * self.store.token_bytes <= self.budget

    def take(self, request: Request) -> Place:
        """Take a slot for a request that fits; the lowest one."""
        self._reserved[request] = request.most
        taken = {place.slot for place in self.places}
        place = Place(next(slot for slot in range(len(taken) + 1) if slot not in taken))
        self.places.append(place)
        return place

    def leave(self, place: Place) -> None:
        """Give a slot back."""
        self.places.remove(place)

    def forget(self, request: Request) -> None:
        """Reserve nothing for a request any more."""
        self._reserved.pop(request, None)

    def prepare(self, tokens: int) -> None:
        """Make the store large enough for all slots that are taken, each with so many tokens."""
        slots = max((place.slot for place in self.places), default=-1) + 1
        if slots <= self.store.slots and tokens <= self.store.capacity:
            return
        if slots > len(self.places):
            self.tidy()
            slots = len(self.places)
        most = max(tokens, *self._reserved.values(), 0)
        wide = max(tokens, self.store.capacity, min(most, max(_LEAST, tokens * 2)))
        if slots * wide * self.store.token_bytes > self.budget:
            wide = most  # all that those who have a slot may use, and what `fits` found room for
        wanted = max(2 * self.store.slots, self.expected) if slots > self.store.slots else self.store.slots
        most_slots = min(self._most, self.budget // (max(wide, most) * self.store.token_bytes))
        self.store.resize(max(slots, min(wanted, most_slots)), wide)

    def tidy(self) -> None:
        """Move sequences so that the slots that are taken come first."""
        taken = {place.slot for place in self.places}
        holes = iter(sorted(set(range(len(taken))) - taken))
        for place in self.places:
            if place.slot >= len(taken):
                hole = next(holes)
                if place.slot < self.store.slots:  # else nothing is there yet
                    self.store.copy(place.slot, hole, self.store.capacity)
                place.slot = hole

    @property
    def scattered(self) -> bool:
        """Whether slots are taken that lie far apart."""
        return max((place.slot for place in self.places), default=0) >= 2 * len(self.places) + 4

    def release(self) -> None:
        """Give all memory back, when nothing is taken."""
        if not self.places and self.store.bytes:
            self.store.resize(0, 0)


def default_budget(device: torch.device) -> int:
    """Return a third of the memory that is free; growing needs the old keys and values beside the new ones."""
    from twinkle_transformers.memory import free_bytes

    free = free_bytes(device)
    return 1 << 30 if free is None else max(1 << 20, free // 3)


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
