"""Attention over the KV cache, for a stream that concatenates tokens of many sequences.

A sequence that starts in the step is attended as a segment; one that continues, against its slot of the cache; the
sequences that read one token each, together in as few calls as their slots allow.
"""

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

_GAP = 8  # largest distance of consecutive slots in one attention call
_NONE = Segments.of([1])
"""Unused segments of `CacheScope`, which gets its sequences from `AttentionMetadata`."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence in the token stream of a step.

    Attributes:
        slot: slot of the sequence in the KV cache.
        start: number of its tokens that are already in the cache.
        first: index of the first token in the stream.
        count: number of tokens.
    """

    slot: int
    start: int
    first: int
    count: int

    @property
    def rows(self) -> slice:
        """Rows of the stream."""
        return slice(self.first, self.first + self.count)

    @property
    def stop(self) -> int:
        """Number of tokens in the slot after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class SlotRange:
    """Neighbouring slots whose next tokens attend in one call.

    Attributes:
        slots: slots of the cache.
        rows: int64 `[n]`, row of the stream of each slot's token; any row for a slot without a token.
        lengths: int64 `[n]`, number of tokens that each attends to, including itself; 1 for a slot without a token.
        shortest: smallest length of the slots with a token.
        longest: largest length.
        even: whether all slots have a token and the same length, so that no mask is needed.
        filled: int64, indices of the slots with a token; None means all.
    """

    slots: slice
    rows: Tensor
    lengths: Tensor
    shortest: int
    longest: int
    even: bool
    filled: Tensor | None


class AttentionMetadata:
    """The tokens of a step, grouped by the attention call that serves them.

    Single next tokens of many sequences share a batched call on slices of the cache. Tokens of new sequences attend to
    each other only and do not read the cache. Chunks of partly read prompts need one call each.

    Attributes:
        decodes: spans of one token that continue a sequence, ordered by slot.
        prefills: spans that begin a sequence.
        chunks: spans of several tokens that continue a sequence (chunked prefill).
    """

    def __init__(self, token_spans: Sequence[TokenSpan], total: int, device: torch.device) -> None:
        """Group the token spans of a step.

        Args:
            token_spans: token spans of the step, in the order of the stream; tokens after them are padding.
            total: number of tokens of the stream.
            device: device of the cache.
        """
        self.total, self.device = total, device
        self.decodes = sorted((s for s in token_spans if s.count == 1 and s.start), key=lambda s: s.slot)
        self.prefills = [s for s in token_spans if not s.start]
        self.chunks = [s for s in token_spans if s.count > 1 and s.start]
        self._masks: dict[Any, Tensor] = {}
        self._decode_indices: dict[int, Tensor] = {}

    @cached_property
    def decode_rows(self) -> Tensor:
        """Rows of the decode tokens in the stream, int64 `[n]`."""
        return self._index([s.first for s in self.decodes])

    @cached_property
    def pure_decode(self) -> bool:
        """Whether the stream has exactly one token for each of some neighbouring slots, in order: pure decoding."""
        slot_ranges = self.slot_ranges
        in_order = all(token_span.first == row for row, token_span in enumerate(self.decodes))
        return len(self.decodes) == self.total and len(slot_ranges) == 1 and slot_ranges[0].filled is None and in_order

    def decode_indices(self, heads: int, capacity: int) -> Tensor:
        """Return the rows of the decode tokens in a layer of the cache, viewed as `[slots * heads * capacity, size]`.

        With these indices one `index_copy_` writes the next token of all sequences, instead of one copy per slot.

        Args:
            heads: number of heads of the layer.
            capacity: capacity of a slot.

        Returns:
            int64 `[n * heads]`.
        """
        if heads not in self._decode_indices:
            first = self._index([s.slot * heads * capacity + s.start for s in self.decodes])
            self._decode_indices[heads] = (
                first[:, None] + capacity * torch.arange(heads, device=self.device)
            ).flatten()
        return self._decode_indices[heads]

    @cached_property
    def prefill_rows(self) -> slice | Tensor:
        """Rows of the tokens of new sequences in the stream; a slice if they are contiguous, which avoids copies."""
        first, count = self.prefills[0].first, sum(s.count for s in self.prefills)
        if self.prefills[-1].first + self.prefills[-1].count == first + count:
            return slice(first, first + count)
        return self._index([row for s in self.prefills for row in range(s.first, s.first + s.count)])

    @cached_property
    def prefill_segments(self) -> Segments:
        """Segments of the new sequences."""
        return Segments.of([s.count for s in self.prefills], self.device)

    @cached_property
    def slot_ranges(self) -> list[SlotRange]:
        """The attention calls for the decode tokens.

        A call reads a slice of the cache, without a gather: it covers all slots between its first and last, padded to
        the longest sequence. One call serves all tokens unless slots are far apart, or so uneven in length that
        padding would more than double the work; then sequences are grouped by the power of two of their length.
        """
        lengths = [s.stop for s in self.decodes]
        uneven = 2 * sum(lengths) < max(lengths, default=0) * len(lengths)
        groups: list[list[TokenSpan]] = []
        for token_span in self.decodes:
            last = groups[-1][-1] if groups else None
            near = last is not None and token_span.slot - last.slot <= _GAP
            if last is None or not near or (uneven and last.stop.bit_length() != token_span.stop.bit_length()):
                groups.append([])
            groups[-1].append(token_span)
        return [self._slot_range(group) for group in groups]

    def _slot_range(self, group: Sequence[TokenSpan]) -> SlotRange:
        first, past = group[0].slot, group[-1].slot + 1
        rows, lengths = [group[0].first] * (past - first), [1] * (past - first)
        for token_span in group:
            rows[token_span.slot - first], lengths[token_span.slot - first] = token_span.first, token_span.stop
        stops = [s.stop for s in group]
        filled = self._index([s.slot - first for s in group]) if len(group) < past - first else None
        even = filled is None and min(stops) == max(stops)
        return SlotRange(
            slice(first, past), self._index(rows), self._index(lengths), min(stops), max(stops), even, filled
        )  # fmt: skip

    def decode_mask(self, slot_range: SlotRange, window: int | None, dtype: torch.dtype) -> tuple[slice, Tensor | None]:
        """Return the cached positions for a slot range, and the additive mask `[n, 1, 1, positions]` or None."""
        first = 0 if window is None else max(0, slot_range.shortest - window)
        positions = slice(first, slot_range.longest)
        if slot_range.even:
            return positions, None
        key = (slot_range, window, dtype)
        if key not in self._masks:
            position = torch.arange(first, slot_range.longest, device=self.device)
            visible = position < slot_range.lengths[:, None]
            if window is not None:
                visible &= position >= slot_range.lengths[:, None] - window
            # A slot without a token attends to one position, because a softmax over none is NaN.
            visible[:, 0] |= ~visible.any(-1)
            self._masks[key] = _additive(visible, dtype)[:, None, None]
        return positions, self._masks[key]

    def chunk_mask(self, token_span: TokenSpan, window: int | None, dtype: torch.dtype) -> tuple[slice, Tensor]:
        """Return the cached positions for the tokens of a span, and the additive mask `[count, positions]`."""
        first = 0 if window is None else max(0, token_span.start - window + 1)
        key = (token_span, window, dtype)
        if key not in self._masks:
            query = torch.arange(token_span.start, token_span.stop, device=self.device)[:, None]
            position = torch.arange(first, token_span.stop, device=self.device)
            visible = position <= query
            if window is not None:
                visible &= position > query - window
            self._masks[key] = _additive(visible, dtype)
        return slice(first, token_span.stop), self._masks[key]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)


@dataclass(slots=True)
class Rule:
    """Attention parameters of a layer; see `segment_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with one token per sequence.

        Args:
            q: `[n, H, D]`.
            k: `[n, G, L, D]`; each of its heads serves `H / G` consecutive heads of `q`.
            v: `[n, G, L, E]`.
            mask: additive mask, `[n, 1, 1, L]`.

        Returns:
            `[n, H, E]`.
        """
        # With one query token, the H / G query heads of a group take the place of the query sequence:
        # `[n, G, H / G, D]` attends to `[n, G, L, D]` without repeating keys for grouped-query attention.
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

    def extend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend with several tokens of one sequence.

        Args:
            q: `[c, H, D]`.
            k: `[G, L, D]`.
            v: `[G, L, E]`.
            mask: additive mask, `[c, L]`.

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
    """Return the softmax of `[..., L]`; a sink adds to the denominator only (gpt-oss)."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    top = scores.amax(-1, keepdim=True).maximum(sink)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sink - top).exp())


class CacheScope(Scope):
    """Context of a forward over the stream of a step: attention layers write to the KV cache and attend to it."""

    def __init__(self, metadata: AttentionMetadata, store: KVCache, switch: Switch, routing: Routing | None) -> None:
        """Prepare the scope; layers are counted from the first call of `attend`.

        Args:
            metadata: the tokens of the step, grouped by attention call.
            store: the KV cache.
            switch: replaces the model's attention by `attend`.
            routing: the adapter of each token.
        """
        super().__init__(_NONE, switch, routing)
        self.metadata, self.store = metadata, store
        self._layer = 0

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of the next layer: q, k and v are `[T, heads, size]`; returns `[T, H, E]`, 0 for padding."""
        keys, values = self.store.keys[self._layer], self.store.values[self._layer]
        self._layer += 1
        if not q.dtype == k.dtype == v.dtype == keys.dtype:  # autocast
            q, k, v = q.to(keys.dtype), k.to(keys.dtype), v.to(values.dtype)
        scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        rule = Rule(scale, options["window"], options["softcap"], options["sinks"])
        self._write(keys, values, k, v)  # before attention, because each token attends to itself too
        if self.metadata.pure_decode:  # pure decoding: one call, without gather and scatter of rows
            return self._decode(self.metadata.slot_ranges[0], rule, q, keys, values)
        out = v.new_zeros(len(q), q.shape[1], v.shape[2])
        if self.metadata.prefills:
            rows = self.metadata.prefill_rows
            out[rows] = segment_attention(
                q[rows], k[rows], v[rows], self.metadata.prefill_segments,
                scale=scale, window=rule.window, softcap=rule.softcap, sinks=rule.sinks,
            )  # fmt: skip
        for token_span in self.metadata.chunks:
            positions, mask = self.metadata.chunk_mask(token_span, rule.window, q.dtype)
            k, v = keys[token_span.slot, :, positions], values[token_span.slot, :, positions]
            out[token_span.rows] = rule.extend(q[token_span.rows], k, v, mask)
        for slot_range in self.metadata.slot_ranges:
            attended = self._decode(slot_range, rule, q[slot_range.rows], keys, values)
            if slot_range.filled is None:
                out[slot_range.rows] = attended
            else:  # drop the results of slots without a token
                out[slot_range.rows[slot_range.filled]] = attended[slot_range.filled]
        return out

    def _decode(self, slot_range: SlotRange, rule: Rule, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        positions, mask = self.metadata.decode_mask(slot_range, rule.window, q.dtype)
        return rule.decode(q, keys[slot_range.slots, :, positions], values[slot_range.slots, :, positions], mask)

    def _write(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> None:
        if self.metadata.decodes:
            if not self.metadata.pure_decode:
                rows = self.metadata.decode_rows
                self._write_decodes(keys, k[rows])
                self._write_decodes(values, v[rows])
            else:
                self._write_decodes(keys, k)
                self._write_decodes(values, v)
        for token_span in (*self.metadata.prefills, *self.metadata.chunks):
            _write_span(keys, token_span, k)
            _write_span(values, token_span, v)

    def _write_decodes(self, target: Tensor, tokens: Tensor) -> None:
        _, heads, capacity, size = target.shape
        target.view(-1, size).index_copy_(0, self.metadata.decode_indices(heads, capacity), tokens.reshape(-1, size))


def _write_span(target: Tensor, token_span: TokenSpan, tokens: Tensor) -> None:
    target[token_span.slot, :, token_span.start : token_span.stop] = tokens[token_span.rows].transpose(0, 1)
