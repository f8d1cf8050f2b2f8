"""Which tokens of a step's stream see what; the same in all layers of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from twinkle_torch.segments import Segments

_GAP = 8  # slots without a token that one call may pass over


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of one sequence that lie next to each other in a step's stream.

    Attributes:
        slot: where the sequence's keys and values are.
        start: tokens that it has there already.
        first: where the stretch begins in the stream.
        count: its tokens.
    """

    slot: int
    start: int
    first: int
    count: int

    @property
    def rows(self) -> slice:
        """Where it lies in the stream."""
        return slice(self.first, self.first + self.count)

    @property
    def stop(self) -> int:
        """Tokens that the slot has afterwards."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Neighbouring slots whose next tokens attend in one call.

    Attributes:
        slots: of the store.
        rows: int64 `[n]`, where each slot's token is in the stream; of a slot without one, anywhere.
        lengths: int64 `[n]`, tokens that each sees, itself the last; 1 for a slot without one.
        shortest: the smallest length of those with a token.
        longest: the largest.
        even: whether all slots have a token and one length.
        filled: int64, which of the slots have a token; None is all.
    """

    slots: slice
    rows: Tensor
    lengths: Tensor
    shortest: int
    longest: int
    even: bool
    filled: Tensor | None


class Reach:
    """The tokens of a step's stream by how they attend.

    Attributes:
        single: stretches of one token that go on, in the order of their slots.
        fresh: stretches of sequences that begin.
        later: stretches of several tokens that go on.
    """

    def __init__(self, stretches: Sequence[Stretch], total: int, device: torch.device) -> None:
        """Sort stretches.

        Args:
            stretches: of the step, in the order of the stream; what lies behind them is padding.
            total: tokens of the stream.
            device: where the store is.
        """
        self.total, self.device = total, device
        self.single = sorted((s for s in stretches if s.count == 1 and s.start), key=lambda s: s.slot)
        self.fresh = [s for s in stretches if not s.start]
        self.later = [s for s in stretches if s.count > 1 and s.start]
        self._masks: dict[Any, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    @cached_property
    def single_rows(self) -> Tensor:
        """Where the single tokens are in the stream, int64 `[n]`."""
        return self._index([s.first for s in self.single])

    @cached_property
    def simple(self) -> bool:
        """Whether the stream is one single token for each of some neighbouring slots, in their order."""
        spans = self.spans
        in_order = all(stretch.first == row for row, stretch in enumerate(self.single))
        return len(self.single) == self.total and len(spans) == 1 and spans[0].filled is None and in_order

    def single_places(self, heads: int, capacity: int) -> Tensor:
        """Return where single tokens go in a store's layer seen as `[slots * heads * capacity, size]`.

        Args:
            heads: of the layer.
            capacity: of the store.

        Returns:
            int64 `[n * heads]`.
        """
        if heads not in self._places:
            first = self._index([s.slot * heads * capacity + s.start for s in self.single])
            self._places[heads] = (first[:, None] + capacity * torch.arange(heads, device=self.device)).flatten()
        return self._places[heads]

    @cached_property
    def fresh_rows(self) -> slice | Tensor:
        """Where the tokens of sequences that begin are in the stream."""
        first, count = self.fresh[0].first, sum(s.count for s in self.fresh)
        if self.fresh[-1].first + self.fresh[-1].count == first + count:
            return slice(first, first + count)
        return self._index([row for s in self.fresh for row in range(s.first, s.first + s.count)])

    @cached_property
    def fresh_segments(self) -> Segments:
        """Their sequences."""
        return Segments.of([s.count for s in self.fresh], self.device)

    @cached_property
    def spans(self) -> list[Span]:
        """The calls that serve the single tokens: one, but where lengths or slots lie far apart."""
        lengths = [s.stop for s in self.single]
        uneven = 2 * sum(lengths) < max(lengths, default=0) * len(lengths)
        parts: list[list[Stretch]] = []
        for stretch in self.single:
            last = parts[-1][-1] if parts else None
            near = last is not None and stretch.slot - last.slot <= _GAP
            if last is None or not near or (uneven and last.stop.bit_length() != stretch.stop.bit_length()):
                parts.append([])
            parts[-1].append(stretch)
        return [self._span(part) for part in parts]

    def _span(self, part: Sequence[Stretch]) -> Span:
        first, past = part[0].slot, part[-1].slot + 1
        rows, lengths = [part[0].first] * (past - first), [1] * (past - first)
        for stretch in part:
            rows[stretch.slot - first], lengths[stretch.slot - first] = stretch.first, stretch.stop
        stops = [s.stop for s in part]
        filled = self._index([s.slot - first for s in part]) if len(part) < past - first else None
        even = filled is None and min(stops) == max(stops)
        return Span(
            slice(first, past), self._index(rows), self._index(lengths), min(stops), max(stops), even, filled
        )  # fmt: skip

    def seen_by_span(self, span: Span, window: int | None, dtype: torch.dtype) -> tuple[slice, Tensor | None]:
        """Return the places that a span's tokens see, and what to add to their scores, `[n, 1, 1, places]` or None."""
        first = 0 if window is None else max(0, span.shortest - window)
        places = slice(first, span.longest)
        if span.even:
            return places, None
        key = (span, window, dtype)
        if key not in self._masks:
            place = torch.arange(first, span.longest, device=self.device)
            seen = place < span.lengths[:, None]
            if window is not None:
                seen &= place >= span.lengths[:, None] - window
            seen[:, 0] |= ~seen.any(-1)  # a slot without a token sees something: a soft-max of nothing is NaN
            self._masks[key] = _added(seen, dtype)[:, None, None]
        return places, self._masks[key]

    def seen_by_stretch(self, stretch: Stretch, window: int | None, dtype: torch.dtype) -> tuple[slice, Tensor]:
        """Return the places that a stretch's tokens see, and what to add to their scores, `[count, places]`."""
        first = 0 if window is None else max(0, stretch.start - window + 1)
        key = (stretch, window, dtype)
        if key not in self._masks:
            own = torch.arange(stretch.start, stretch.stop, device=self.device)[:, None]
            place = torch.arange(first, stretch.stop, device=self.device)
            seen = place <= own
            if window is not None:
                seen &= place > own - window
            self._masks[key] = _added(seen, dtype)
        return slice(first, stretch.stop), self._masks[key]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
