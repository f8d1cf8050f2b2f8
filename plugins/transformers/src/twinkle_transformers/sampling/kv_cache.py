"""The KV cache: keys and values of running sequences, the manager of their slots, and the cache of prompt prefixes."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_transformers.sampling.requests import CacheKey, CacheSlot, Request

_LEAST = 64  # initial capacity of a slot, in tokens
BLOCK = 16
"""Tokens per block of the prefix cache; only complete blocks are stored."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shapes of the keys and values of one layer, per token.

    Attributes:
        keys: number of heads and head size of the keys.
        values: number of heads and head size of the values.
        dtype: dtype of both.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one token."""
        return (self.keys[0] * self.keys[1] + self.values[0] * self.values[1]) * self.dtype.itemsize


class KVCache:
    """Keys and values of all layers.

    Keys and values of equal shape share one tensor `[members, slots, heads, capacity, size]`, so that a slot is copied
    or cleared in all layers by one operation. The tokens of a slot are contiguous: attention over neighbouring slots
    reads slices of the tensor and needs no gather.

    Attributes:
        slots: number of sequences that fit.
        capacity: number of tokens that fit into each slot.
        token_bytes: bytes of one token in all layers.
        keys: keys of each layer `[slots, heads, capacity, size]`, views.
        values: values of each layer, views.
    """

    def __init__(self, layers: Sequence[LayerShape], device: torch.device, experts: int = 0) -> None:
        """Create an empty cache.

        Args:
            layers: shapes of the layers, in the order in which the model calls them.
            device: device of the model.
            experts: number of chosen experts to store for each token, in all layers together.
        """
        self.layers, self.device = tuple(layers), device
        self.token_bytes = sum(layer.bytes for layer in layers) + experts * torch.int16.itemsize
        kinds: dict[Any, int] = {}
        self._experts = (1, experts, torch.int16)
        if experts:
            kinds[self._experts] = 1
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
        """Bytes that the cache takes now."""
        return self.slots * self.capacity * self.token_bytes

    def resize(self, slots: int, capacity: int) -> None:
        """Change the number of slots and their capacity; contents that fit are kept."""
        kept, tokens = min(slots, self.slots), min(capacity, self.capacity)
        pools = {}
        for kind, members in self._kinds.items():
            heads, size, dtype = kind
            pools[kind] = torch.zeros(members, slots, heads, capacity, size, dtype=dtype, device=self.device)
            if kept and tokens:
                pools[kind][:, :kept, :, :tokens] = self._pools[kind][:, :kept, :, :tokens]
        self._pools = pools  # assigned only after all allocations, any of which may run out of memory
        self.slots, self.capacity = slots, capacity
        self.keys = [self._pools[kind][member] for (kind, member), _ in self._places]
        self.values = [self._pools[kind][member] for _, (kind, member) in self._places]

    @property
    def experts(self) -> Tensor:
        """The experts of each token, int16 `[slots, capacity, experts]`, a view."""
        return self._pools[self._experts][0, :, 0]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for pool in self._pools.values():
            pool[:, target, :, :tokens] = pool[:, source, :, :tokens]

    def clear(self, slot: int) -> None:
        """Zero a slot: a later sequence masks stale values with weight 0, but 0 times NaN is NaN."""
        for pool in self._pools.values():
            pool[:, slot] = 0

    def take(self, slot: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return a copy of the tokens from `start` to `stop` of a slot."""
        return tuple(pool[:, slot, :, start:stop].clone() for pool in self._pools.values())

    def put(self, slot: int, start: int, taken: Sequence[Tensor]) -> None:
        """Write the result of `take`, from token `start` on."""
        for pool, part in zip(self._pools.values(), taken, strict=True):
            pool[:, slot, :, start : start + part.shape[2]] = part


class KVCacheManager:
    """Assigns slots of a cache within a limit of bytes.

    A request reserves the most tokens that it may need, so that no running request has to be preempted. The tensors
    themselves grow with the tokens in use.

    Attributes:
        store: keys and values.
        budget: limit of the cache, in bytes.
        slots: allocated slots.
        expected: slots that the present requests will need; growing once costs less than growing repeatedly.
    """

    def __init__(self, store: KVCache, budget: int, slots: int) -> None:
        """Create a manager without requests.

        Args:
            store: an empty cache.
            budget: limit in bytes.
            slots: maximum number of slots.
        """
        self.store, self.budget, self._max_slots = store, budget, slots
        self.slots: list[CacheSlot] = []
        self.expected = 0
        self._reserved: dict[Request, int] = {}

    def can_allocate(self, requests: Sequence[Request]) -> bool:
        """Return whether one more slot for each of these requests is available now."""
        count = len(self.slots) + len(requests)
        if count > self._max_slots:
            return False
        # All slots have the same capacity, so the longest reservation determines the bytes of every slot.
        tokens = max(*(request.most for request in requests), *self._reserved.values(), 0)
        return count * tokens * self.store.token_bytes <= self.budget

    def allocate(self, request: Request) -> CacheSlot:
        """Assign the lowest free slot to a request that fits."""
        self._reserved[request] = request.most
        used = {slot.index for slot in self.slots}
        slot = CacheSlot(next(index for index in range(len(used) + 1) if index not in used))
        self.slots.append(slot)
        return slot

    def free(self, slot: CacheSlot) -> None:
        """Release a slot."""
        self.slots.remove(slot)

    def drop_reservation(self, request: Request) -> None:
        """Drop the reservation of a request."""
        self._reserved.pop(request, None)

    def ensure_capacity(self, tokens: int) -> None:
        """Make the cache large enough for all slots in use, each with `tokens` tokens."""
        count = max((slot.index for slot in self.slots), default=-1) + 1
        if count <= self.store.slots and tokens <= self.store.capacity:
            return
        if count > len(self.slots):
            self.compact()
            count = len(self.slots)
        most = max(tokens, *self._reserved.values(), 0)
        capacity = max(tokens, self.store.capacity, min(most, max(_LEAST, tokens * 2)))
        if count * capacity * self.store.token_bytes > self.budget:
            # The largest reservation, for which `can_allocate` has checked the budget.
            capacity = most
        # Grow the number of slots geometrically, so that a rising number of requests costs few copies.
        preferred = max(2 * self.store.slots, self.expected) if count > self.store.slots else self.store.slots
        limit = min(self._max_slots, self.budget // (max(capacity, most) * self.store.token_bytes))
        self.store.resize(max(count, min(preferred, limit)), capacity)

    def compact(self) -> None:
        """Compact the cache: move sequences so that the slots in use come first."""
        used = {slot.index for slot in self.slots}
        holes = iter(sorted(set(range(len(used))) - used))
        for slot in self.slots:
            if slot.index >= len(used):
                hole = next(holes)
                if slot.index < self.store.slots:  # otherwise nothing was written yet
                    self.store.copy(slot.index, hole, self.store.capacity)
                slot.index = hole

    @property
    def fragmented(self) -> bool:
        """Whether the slots in use are far apart."""
        return max((slot.index for slot in self.slots), default=0) >= 2 * len(self.slots) + 4

    def release_memory(self) -> None:
        """Free all memory if no slot is in use."""
        if not self.slots and self.store.bytes:
            self.store.resize(0, 0)


def default_budget(device: torch.device) -> int:
    """Return a third of the free memory: while the cache grows, the old and the new tensors exist together."""
    from twinkle_transformers.memory import free_bytes

    free = free_bytes(device)
    return 1 << 30 if free is None else max(1 << 20, free // 3)


@dataclass(slots=True)
class SharedPrefix:
    """The prefix that a prompt shares with another request.

    Attributes:
        source: the request whose slots have most of it; None if that is less than a block.
        tokens: number of tokens that can be copied now.
        coming: number of tokens that can be copied later, once prompts have been read that are worth waiting for.
    """

    source: Request | None = None
    tokens: int = 0
    coming: int = 0

    @property
    def grows(self) -> bool:
        """Whether waiting saves at least a block, about the cost of a step."""
        return self.coming - self.tokens >= BLOCK


def shared_prefix(request: Request, others: Iterable[Request]) -> SharedPrefix:
    """Return the longest prefix of a prompt, at most `usable` tokens, that other requests have or will have.

    Tokens that an unfinished prompt has read itself do not count yet: if its logits turn out to be NaN, these keys and
    values are not usable either. A prompt is worth waiting for if at least half of what it still has to read is shared:
    a short prompt does not wait for the end of a long one, only because both begin with the same instructions.

    Args:
        request: the prompt.
        others: requests that have slots; only those of the same adapter and salt count.
    """
    tokens, most = request.prompt.ids, usable(request)
    head = SharedPrefix()
    for other in others:
        if head.tokens == most:
            break
        if other.key != request.key or other.stale or other.over:
            continue
        if tokens[head.tokens : head.tokens + 1] != other.prompt.ids[head.tokens : head.tokens + 1]:
            continue  # its common prefix is not longer than the present one
        count = common(tokens, other.prompt.ids, most)
        there = min(count, other.known) if other.reading else count
        if 2 * (count - there) >= len(other.prompt.ids) - other.read:
            head.coming = max(head.coming, count)
        if there > head.tokens:
            head.source, head.tokens = other, there
    return head if head.tokens >= BLOCK else SharedPrefix(coming=head.coming)


def usable(request: Request) -> int:
    """Return how many first tokens may come from a cache: those before the first scored one, never the last one."""
    return min(request.prompt.scores.first, len(request.prompt.ids) - 1)


def common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return the length of the common prefix of two prompts, at most `most`."""
    count, most = 0, min(most, len(one), len(other))
    for size in (256, 16, 1):  # slices compare faster than tokens
        while count + size <= most and one[count : count + size] == other[count : count + size]:
            count += size
    return count


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Keys and values of some tokens.

    Attributes:
        number: id of the block; the keys of its successors contain it.
        parts: the tensors that `KVCache.take` returned.
        bytes: their size.
    """

    number: int
    parts: tuple[Tensor, ...]
    bytes: int


class PrefixCache:
    """A least-recently-used cache of blocks. The key of a block is its predecessor and its own tokens.

    Attributes:
        limit: limit in bytes; 0 disables the cache.
        bytes: bytes in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._count = 0
        self._blocks: OrderedDict[tuple[CacheKey | int, tuple[int, ...]], Block] = OrderedDict()

    def find(self, key: CacheKey, tokens: Sequence[int]) -> list[Block]:
        """Return the cached blocks of a prefix of `tokens`, which leaves at least one token to read.

        Args:
            key: key of the request; blocks of other keys are not found.
            tokens: tokens of a prompt.
        """
        keys = []
        found: list[Block] = []
        parent: CacheKey | int = key
        for first in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
            block_key = (parent, tuple(tokens[first : first + BLOCK]))
            block = self._blocks.get(block_key)
            if block is None:
                break
            keys.append(block_key)
            found.append(block)
            parent = block.number
        for block_key in reversed(keys):  # evict successors first: a block is useless without its predecessors
            self._blocks.move_to_end(block_key)
        return found

    def add(self, key: CacheKey, tokens: Sequence[int], store: KVCache, slot: int) -> None:
        """Store the complete blocks of the tokens in a slot.

        Args:
            key: see `find`.
            tokens: tokens of the slot, from the first on.
            store: the KV cache.
            slot: index of the slot.
        """
        parent: CacheKey | int = key
        size = BLOCK * store.token_bytes
        keys: list[tuple[CacheKey | int, tuple[int, ...]]] = []
        for first in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            if (len(keys) + 1) * size > self.limit:
                break
            block_key = (parent, tuple(tokens[first : first + BLOCK]))
            if block_key not in self._blocks:
                self._count += 1
                self._blocks[block_key] = Block(self._count, store.take(slot, first, first + BLOCK), size)
                self.bytes += size
            keys.append(block_key)
            parent = self._blocks[block_key].number
        for block_key in reversed(keys):
            self._blocks.move_to_end(block_key)
        while self.bytes > self.limit:
            _, gone = self._blocks.popitem(last=False)
            self.bytes -= gone.bytes

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self.bytes = 0
