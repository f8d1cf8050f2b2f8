"""Slots of a store for the sequences of an engine: who has which, how large they must be, and whether that fits."""

from collections.abc import Sequence

import torch

from twinkle_transformers.sampling.requests import Place, Request
from twinkle_transformers.sampling.store import Store

_LEAST = 64  # tokens that a slot has room for at first


class Room:
    """Gives out slots of a store within a number of bytes.

    Every request reserves what it may need at most, so that none has to be put off once it has begun; the store itself
    grows with what is used.

    Attributes:
        store: the keys and values.
        budget: bytes that the store may take.
        places: the slots that are taken.
        expected: slots that will be wanted as things stand; growing at once costs less than growing often.
    """

    def __init__(self, store: Store, budget: int, slots: int) -> None:
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
