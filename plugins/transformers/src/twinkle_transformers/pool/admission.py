"""Composes passes that fit into memory; the memory that a pass needs is estimated before it runs."""

from collections.abc import Iterator, Sequence

from twinkle.errors import CapacityError
from twinkle_transformers.pool.passes import FusedPasses
from twinkle_transformers.pool.work import MicroBatch, WorkItem, split_in_half
from twinkle_transformers.recompute import SHARE


class Admission:
    """Sorts the micro-batches of operations into passes that fit into memory.

    A pass that would take more than 80 % of the free memory recomputes its activations. If that is not enough, it gets
    fewer micro-batches, and micro-batches are cut. The results stay the same. An operation fails if one of its
    micro-batches neither fits alone nor can be cut; the other operations go on. A pass that cannot be measured is
    admitted.

    Args:
        passes: runs the passes.
    """

    def __init__(self, passes: FusedPasses) -> None:
        self.passes = passes

    def sort(self, works: Sequence[WorkItem], budget: int) -> Iterator[tuple[list[MicroBatch], int | None]]:
        """Yield the micro-batches of each pass and the free bytes; training comes first.

        Args:
            works: operations; those that fail meanwhile are left out.
            budget: maximum number of tokens of a pass, unless a single micro-batch has more.
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
                    waiting[:1], taken = cut, cut[:1]  # the first waiting micro-batch is always taken
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
            kept //= self.passes.estimator.layers  # without a graph, activations of only one layer exist at a time
        return kept + load.beside

    def free_for(self, parts: Sequence[MicroBatch]) -> int | None:
        """Return the free bytes for a pass over micro-batches; None if unknown."""
        recompute = self.passes.recompute
        if recompute.available() is None:
            return None
        return recompute.free_for(self.needed(parts, recomputed=recompute.mode is True) or 0)

    def fits(self, parts: Sequence[MicroBatch], free: int | None) -> bool:
        """Return whether a pass fits into `free` bytes; True if it cannot be measured."""
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
    """Return the error of an operation with a micro-batch that neither fits nor can be cut."""
    whose = "the base model" if part.work.name is None else f"adapter {part.work.name!r}"
    rows = f"{len(part.rows)} row{'s' if len(part.rows) > 1 else ''} of {part.tokens} tokens"
    return CapacityError(f"{whose}: a pass over {rows} {why}; give shorter rows, or free memory")


def _within(waiting: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
    """Return the first micro-batches within the budget; at least one, and from one operation of each adapter.

    How many operations of an adapter are waiting depends on timing, and its results must not.
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
