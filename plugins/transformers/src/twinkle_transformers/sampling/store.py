"""Keys and values of the sequences that an engine runs: one slot a sequence, all of one capacity, grown when needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


class Store:
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
