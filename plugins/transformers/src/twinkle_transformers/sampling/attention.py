"""Attention of a step's tokens to what their sequences have in the cache, and to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from twinkle_torch.head import wide
from twinkle_torch.segments import Segments, segment_attention
from twinkle_transformers.lowrank.products import Routing
from twinkle_transformers.sampling.kv_cache import KVCache
from twinkle_transformers.segments import Scope, Switch

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


class AttentionMetadata:
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


@dataclass(slots=True)
class Rule:
    """How the tokens of a layer attend; see `segment_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def singly(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with one token a sequence.

        Args:
            q: `[n, H, D]`.
            k: `[n, G, L, D]`; each of its heads serves `H / G` consecutive heads of `q`, which lie here where a
                sequence would.
            v: `[n, G, L, E]`.
            mask: added to the scores, `[n, 1, 1, L]`.

        Returns:
            `[n, H, E]`.
        """
        grouped = q.view(len(k), k.shape[1], -1, q.shape[2])
        if self.softcap is None and self.sinks is None:
            out = nn.functional.scaled_dot_product_attention(grouped, k, v, mask, scale=self.scale)
        else:
            scores = self._capped(grouped @ k.mT)
            if mask is not None:
                scores = scores + mask
            sinks = None if self.sinks is None else self.sinks.view(1, k.shape[1], -1, 1)
            out = _softmax(scores, sinks).to(v.dtype) @ v
        return out.flatten(1, 2)

    def onward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend with several tokens of one sequence.

        Args:
            q: `[c, H, D]`.
            k: `[G, L, D]`.
            v: `[G, L, E]`.
            mask: added to the scores, `[c, L]`.

        Returns:
            `[c, H, E]`.
        """
        by_head = q.transpose(0, 1)
        if self.softcap is None and self.sinks is None:
            out = nn.functional.scaled_dot_product_attention(
                by_head[None], k[None], v[None], mask, scale=self.scale, enable_gqa=q.shape[1] != len(k)
            )[0]
            return out.transpose(0, 1)
        grouped = by_head.reshape(len(k), -1, q.shape[2])
        scores = self._capped(grouped @ k.mT).view(q.shape[1], len(q), -1) + mask
        weights = _softmax(scores, None if self.sinks is None else self.sinks.view(-1, 1, 1)).to(v.dtype)
        return (weights.view(len(k), -1, k.shape[1]) @ v).view(q.shape[1], len(q), -1).transpose(0, 1)

    def _capped(self, products: Tensor) -> Tensor:
        scores = products.to(wide(products.dtype)) * self.scale
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the soft-max of `[..., L]`; a sink takes its share and gives nothing (gpt-oss)."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    top = scores.amax(-1, keepdim=True).maximum(sink)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sink - top).exp())


class CacheScope(Scope):
    """The time during which a model reads a step's stream: its layers write to the store and attend to it."""

    def __init__(self, reach: AttentionMetadata, store: KVCache, switch: Switch, routing: Routing | None) -> None:
        """Remember where everything is.

        Args:
            reach: which tokens see what.
            store: keys and values so far.
            switch: puts our attention in place of the model's.
            routing: which tokens belong to which adapter.
        """
        super().__init__(_NONE, switch, routing)
        self.reach, self.store = reach, store
        self._layer = 0

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend in the next layer: `[T, heads, size]` each; returns `[T, H, E]`, 0 for padding."""
        keys, values = self.store.keys[self._layer], self.store.values[self._layer]
        self._layer += 1
        if not q.dtype == k.dtype == v.dtype == keys.dtype:  # autocast
            q, k, v = q.to(keys.dtype), k.to(keys.dtype), v.to(values.dtype)
        scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        rule = Rule(scale, options["window"], options["softcap"], options["sinks"])
        self._write(keys, values, k, v)
        if self.reach.simple:
            return self._single(self.reach.spans[0], rule, q, keys, values)
        out = v.new_zeros(len(q), q.shape[1], v.shape[2])
        if self.reach.fresh:
            rows = self.reach.fresh_rows
            out[rows] = segment_attention(
                q[rows], k[rows], v[rows], self.reach.fresh_segments,
                scale=scale, window=rule.window, softcap=rule.softcap, sinks=rule.sinks,
            )  # fmt: skip
        for stretch in self.reach.later:
            places, mask = self.reach.seen_by_stretch(stretch, rule.window, q.dtype)
            k, v = keys[stretch.slot, :, places], values[stretch.slot, :, places]
            out[stretch.rows] = rule.onward(q[stretch.rows], k, v, mask)
        for span in self.reach.spans:
            found = self._single(span, rule, q[span.rows], keys, values)
            if span.filled is None:
                out[span.rows] = found
            else:
                out[span.rows[span.filled]] = found[span.filled]
        return out

    def _single(self, span: Span, rule: Rule, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        places, mask = self.reach.seen_by_span(span, rule.window, q.dtype)
        return rule.singly(q, keys[span.slots, :, places], values[span.slots, :, places], mask)

    def _write(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> None:
        if self.reach.single:
            if not self.reach.simple:
                rows = self.reach.single_rows
                self._put_single(keys, k[rows])
                self._put_single(values, v[rows])
            else:
                self._put_single(keys, k)
                self._put_single(values, v)
        for stretch in (*self.reach.fresh, *self.reach.later):
            _put(keys, stretch, k)
            _put(values, stretch, v)

    def _put_single(self, target: Tensor, tokens: Tensor) -> None:
        _, heads, capacity, size = target.shape
        target.view(-1, size).index_copy_(0, self.reach.single_places(heads, capacity), tokens.reshape(-1, size))


def _put(target: Tensor, stretch: Stretch, tokens: Tensor) -> None:
    target[stretch.slot, :, stretch.start : stretch.stop] = tokens[stretch.rows].transpose(0, 1)


_NONE = Segments.of([1])
"""Segments of a scope that knows the sequences in another way."""
