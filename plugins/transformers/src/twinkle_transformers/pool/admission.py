"""FusedPasses that fit into memory: what one needs is estimated before it is made."""

from collections.abc import Iterator, Sequence

from twinkle.errors import CapacityError
from twinkle_transformers.pool.passes import FusedPasses
from twinkle_transformers.pool.work import MicroBatch, WorkItem, split_in_half
from twinkle_transformers.recompute import SHARE


class Admission:
    """Sorts the parts of operations into passes that fit.

    A pass that would take more than 80 % of what is free recomputes its activations; if that is not enough, fewer parts
    go into it, and parts are cut. The numbers stay the same. An operation with a part that cannot be cut and does not
    fit alone fails, and the others go on. What cannot be measured is let through.

    Args:
        passes: how parts are computed.
    """

    def __init__(self, passes: FusedPasses) -> None:
        self.passes = passes

    def sort(self, works: Sequence[WorkItem], budget: int) -> Iterator[tuple[list[MicroBatch], int | None]]:
        """Yield the parts of each pass and the bytes that are free; training parts come first.

        Args:
            works: operations; those that fail meanwhile are left out.
            budget: tokens that a pass may have, unless a single part has more.
        """
        waiting = sorted(
            (part for work in works for part in work.parts), key=lambda p: (not p.work.training, p.work.index, p.first)
        )
        while waiting := [part for part in waiting if part.work.error is None]:
            taken = _within(waiting, budget)
            free = self.free_for(taken)
            while not self.fits(taken, free):
                if len(taken) > 1:
                    taken = taken[:-1]
                elif cut := split_in_half(taken[0], self.passes.backbone):
                    waiting[:1], taken = cut, cut[:1]  # the first that waits is always taken
                else:
                    taken[0].work.error = self._refusal(taken[0], free or 0)
                    break
            else:
                gone = set(map(id, taken))
                waiting = [part for part in waiting if id(part) not in gone]
                yield taken, free

    def needed(self, parts: Sequence[MicroBatch], *, recomputed: bool) -> int | None:
        """Return the bytes that a pass needs; None if activations could not be measured."""
        load = self.passes.load(parts)
        recompute = self.passes.recompute
        kept = recompute.needed_bytes(load.tokens, load.width, masked=False, recomputed=recomputed)
        if kept is None:
            return None
        if not any(part.work.training for part in parts):
            kept //= self.passes.estimator.layers  # a layer's, then the next
        return kept + load.beside

    def free_for(self, parts: Sequence[MicroBatch]) -> int | None:
        """Return the bytes that are free for a pass over parts; None if unknown."""
        recompute = self.passes.recompute
        if recompute.available() is None:
            return None
        return recompute.free_for(self.needed(parts, recomputed=recompute.mode is True) or 0)

    def fits(self, parts: Sequence[MicroBatch], free: int | None) -> bool:
        """Say whether a pass fits into so many bytes; what cannot be measured does."""
        if free is None:
            return True
        recompute = self.passes.recompute
        ways = [False] if recompute.mode is not True else []
        if recompute.possible and any(part.work.training for part in parts):
            ways.append(True)
        needed = (self.needed(parts, recomputed=recomputed) for recomputed in ways or [False])
        return any(size is None or size <= SHARE * free for size in needed)

    def _refusal(self, part: MicroBatch, free: int) -> CapacityError:
        size = self.needed([part], recomputed=part.work.training and self.passes.recompute.possible) or 0
        return no_room(part, f"needs about {size:,} bytes, and {free:,} are free, of which it may take 80 %")


def no_room(part: MicroBatch, why: str) -> CapacityError:
    """Return the error of an operation whose part cannot be computed and not be cut."""
    whose = "the base model" if part.work.name is None else f"adapter {part.work.name!r}"
    rows = f"{len(part.rows)} row{'s' if len(part.rows) > 1 else ''} of {part.tokens} tokens"
    return CapacityError(f"{whose}: a pass over {rows} {why}; give shorter rows, or free memory")


def _within(waiting: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
    """Return the first parts whose tokens are within the budget; at least one, and of each adapter one operation.

    How many operations of an adapter wait is a matter of when they came, and its numbers must not depend on that.
    """
    size, taken = 0, list[MicroBatch]()
    works: dict[int, WorkItem] = {}
    for part in waiting:
        if part.work.tenant is not None and works.setdefault(id(part.work.tenant), part.work) is not part.work:
            continue
        size += part.tokens if part.twin is None else 2 * part.tokens
        if taken and size > budget:
            break
        taken.append(part)
    return taken
