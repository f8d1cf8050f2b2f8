"""Runs a model on the token stream of a step, with the adapters of its rows and attention over the KV cache.

A step concatenates tokens of many sequences to one row `[1, T]` without padding between them. All layers but attention
treat tokens independently, so only attention must know the sequences: `CacheScope` replaces it during the forward.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import Unsupported
from twinkle.logging import get_logger
from twinkle_torch.head import is_plain, product_of, wide
from twinkle_torch.numerics import Evidence, judge, probe_tokens, turned_off
from twinkle_torch.segments import Segments, segment_attention
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.lowrank import products as lowrank
from twinkle_transformers.lowrank.grouped import Groups, runs
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.sampling.adapters import Banks, sites_of
from twinkle_transformers.sampling.kv_cache import KVCache, LayerShape
from twinkle_transformers.segments import Scope, Switch, is_routed
from twinkle_transformers.sites import Site, install

_GAP = 8  # largest distance of consecutive slots in one attention call
_NONE = Segments.of([1])
"""Unused segments of `CacheScope`, which gets its sequences from `AttentionMetadata`."""
Texts = tuple[tuple[int, ...], ...]
_DYNAMIC_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a call."""
_LENGTHS = (7, 5, 3)
_CUTS = (((0, 2), (2, 6), (6, 7)), ((0, 3), (3, 4), (4, 5)), ((0, 1), (1, 2), (2, 3)))


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


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The tokens that a step reads of one sequence.

    Attributes:
        slot: slot of the sequence in the KV cache.
        start: number of its tokens that are already in the cache.
        tokens: the tokens to read, at least one.
        version: the adapter, None for the base model.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    version: AdapterVersion | None


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The input of a step's forward.

    Attributes:
        ids: int64 `[1, T]`.
        positions: int64 `[1, T]`.
        metadata: the tokens of the step, grouped by attention call.
        firsts: first row of each piece, in the order of the pieces.
        owners: the adapter of each token, in the order of the stream; None for padding.
    """

    ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    firsts: list[int]
    owners: list[AdapterVersion | None]


def lay_out(pieces: Sequence[Piece], device: torch.device, multiple: int = 1) -> Stream:
    """Concatenate pieces: those of one adapter together, adapters of one layout together, the base model last.

    In this order, the low-rank terms of all adapters of one layout are one grouped product over contiguous rows, so
    that the number of matrix products does not increase with the number of adapters.

    Args:
        pieces: pieces of a step.
        device: device of the model.
        multiple: the stream is padded to a multiple of this number of tokens.
    """
    layouts: dict[object, int] = {}
    keys: dict[str, int] = {}
    for piece in pieces:
        if piece.version is not None:
            layouts.setdefault(piece.version.layout, len(layouts))
            keys.setdefault(piece.version.key, len(keys))

    def position(index: int) -> tuple[int, int, int]:
        version = pieces[index].version
        if version is None:
            return len(layouts), 0, pieces[index].slot
        return layouts[version.layout], keys[version.key], pieces[index].slot

    order = sorted(range(len(pieces)), key=position)
    firsts = [0] * len(pieces)
    ids: list[int] = []
    positions: list[int] = []
    owners: list[AdapterVersion | None] = []
    token_spans = []
    for index in order:
        piece = pieces[index]
        count = len(piece.tokens)
        firsts[index] = len(ids)
        token_spans.append(TokenSpan(piece.slot, piece.start, len(ids), count))
        ids += piece.tokens
        positions += range(piece.start, piece.start + count)
        owners += [piece.version] * count
    padding = -len(ids) % multiple
    padded = torch.tensor([ids + [0] * padding, positions + [0] * padding], device=device)
    return Stream(
        padded[:1],
        padded[1:],
        AttentionMetadata(token_spans, len(ids) + padding, device),
        firsts,
        owners + [None] * padding,
    )


def route(owners: Sequence[AdapterVersion | None], weights: Callable[[list[AdapterVersion]], Tensor]) -> Routing | None:
    """Return the adapter of each row as groups of rows; None if no row has an adapter.

    Args:
        owners: adapter of each row; rows of one adapter are contiguous.
        weights: function that stacks the weights of versions of one layout.
    """
    groups = [(owners[first], first, past - first) for first, past in runs(_keys(owners)) if owners[first] is not None]
    adapter_groups = []
    for first, past in runs([version.layout for version, _, _ in groups if version is not None]):
        group = groups[first:past]
        versions = [version for version, _, _ in group if version is not None]
        lengths = Groups(group[0][1], tuple(count for _, _, count in group))
        adapter_groups.append(AdapterGroup(versions[0].layout, lengths, weights(versions)))
    return Routing(adapter_groups, len(owners)) if adapter_groups else None


def _keys(owners: Sequence[AdapterVersion | None]) -> list[str | None]:
    return [None if version is None else version.key for version in owners]


class Read:
    """The result of a step's forward.

    Attributes:
        stream: its input.
        hidden: last hidden states `[T, H]`.
    """

    def __init__(self, stream: Stream, hidden: Tensor) -> None:
        self.stream, self.hidden = stream, hidden


class Runner:
    """Runs a causal language model step by step.

    Attributes:
        model: the Hugging Face module.
        device: device of the model.
        vocabulary: size of its embedding.
        evidence: measurement by `store`; None before.
    """

    def __init__(self, model: Any, *, row_multiple: int = 1, backbone: Backbone | None = None) -> None:
        """Inspect the model, without running it.

        Args:
            model: the Hugging Face module; layers inside may be wrapped by PEFT.
            row_multiple: steps are padded to a multiple of this number of rows.
            backbone: the model as body and head, with its evidence, if it was measured before.
        """
        self.model, self.row_multiple = model, row_multiple
        weight = model.get_input_embeddings().weight
        self.device: torch.device = weight.device
        self.vocabulary = int(weight.shape[0])
        self.evidence: Evidence | None = None
        self._banks = Banks()
        self._sites: dict[str, Site] | None = None
        self._structure: tuple[int, ...] = ()
        if backbone is not None:
            self.backbone = backbone

    @property
    def sites(self) -> dict[str, Site]:
        """The layers that adapters may adapt, by name; the first access installs the low-rank forward in them.

        Raises:
            Unsupported: a layer's forward was replaced.
        """
        if self._sites is None:
            sites = sites_of(self.model)
            install(list(sites.values()))
            self._sites = sites
        return self._sites

    def changed(self) -> bool:
        """Return whether weights of the base model were written since the last call; inspects its layers again.

        Writes through `.data` are not detected.
        """
        state: list[int] = []
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                state += parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
        structure = tuple(map(id, self.model.modules()))
        if structure != self._structure[: len(structure)] or len(self._structure) != len(structure) + len(state):
            self._sites = None
        before, self._structure = self._structure, (*structure, *state)
        return before != self._structure

    def store(self) -> KVCache:
        """Measure whether steps compute the same as a forward over whole sequences, and return an empty KV cache.

        Three texts are read in shared steps, and each one separately. The difference must be of the size of
        rounding, and changing one text must not change the others: otherwise sequences leak into each other.

        Raises:
            Unsupported: the results differ, or the model cannot run in steps. `evidence` has the numbers.
        """
        self.evidence = turned_off("steps") or self._judge()
        get_logger().debug("%s: %s", type(self.model).__name__, self.evidence)
        if not self.evidence.exact:
            raise Unsupported(self.evidence.reason)
        return self._store()

    def _judge(self) -> Evidence:
        if reason := self._refusal():
            return Evidence("steps", False, "structure", reason)
        texts, others = (
            tuple(tuple(probe_tokens(sum(_LENGTHS), self.vocabulary, changed=changed)[a:b]) for a, b in _bounds())
            for changed in (False, True)
        )
        changes = []
        for number, changed_text in enumerate(others):
            rows = [row for i, (a, b) in enumerate(_bounds()) if i != number for row in range(a, b)]
            changes.append(((*texts[:number], changed_text, *texts[number + 1 :]), rows))
        return judge("steps", self._in_steps, self._whole, texts, changes, routed=is_routed(self.model))

    def _store(self) -> KVCache:
        """Return an empty KV cache with the shapes of the layers, measured by a forward of one token."""
        probe = _Probe(self._switch)
        self._body(probe_tokens(1, self.vocabulary), probe)
        return KVCache(probe.layers, self.device)

    def read(self, pieces: Sequence[Piece], store: KVCache) -> Read:
        """Run one step; keys and values are written to the KV cache, from the start of each piece on."""
        if any(piece.version is not None for piece in pieces):
            _ = self.sites  # installs the low-rank forward
        stream = lay_out(pieces, self.device, self.row_multiple)
        routing = self.route(stream.owners)
        with CacheScope(stream.metadata, store, self._switch, routing):
            hidden = self._run(stream.ids, stream.positions)
        return Read(stream, hidden)

    def logits(self, read: Read, rows: Sequence[int]) -> Tensor:
        """Return the logits `[n, V]` of rows of the stream, in ascending order, float32 or wider."""
        hidden = read.hidden if len(rows) == len(read.hidden) else read.hidden[torch.tensor(rows, device=self.device)]
        head: Any = self.backbone.head
        owners = [read.stream.owners[row] for row in rows]
        if padding := -len(hidden) % self.row_multiple:
            hidden = nn.functional.pad(hidden, (0, 0, 0, padding))
            owners += [None] * padding
        routing = self.route(owners) if self.head_name else None
        if routing is not None and routing.at(self.head_name):
            base = getattr(head, "base_layer", head)
            raw = lowrank.linear(hidden, base.weight, base.bias, routing, self.head_name)
        else:
            raw = self._plain_head(hidden, head)
        return self.backbone.transform.apply_(raw[: len(rows)].to(wide(raw.dtype)))

    def _plain_head(self, hidden: Tensor, head: Any) -> Tensor:
        base = getattr(head, "base_layer", head)
        if is_plain(base):
            logits: Tensor = nn.functional.linear(*product_of(hidden, base))
            return logits
        out: Tensor = base(hidden)
        return out

    @cached_property
    def backbone(self) -> Backbone:
        """The model as body and head."""
        return Backbone.of(self.model)

    @cached_property
    def head_name(self) -> str:
        """Path of the output projection in the model; "" if it is not found."""
        head = self.model.get_output_embeddings()
        return next((name for name, module in self.model.named_modules() if module is head), "")

    @property
    def _switch(self) -> Switch:
        return self.backbone.segmenter._switch

    def route(self, owners: Sequence[AdapterVersion | None]) -> Routing | None:
        """Return the adapter of each row; see the function `route`."""
        return route(owners, self._stacked)

    def _stacked(self, versions: list[AdapterVersion]) -> Tensor:
        kind = self.device.type
        on = torch.is_autocast_enabled(kind)
        return self._banks.of(versions, torch.get_autocast_dtype(kind) if on else self.model.dtype)

    def _refusal(self) -> str | None:
        backbone, config = self.backbone, self.model.config.get_text_config()
        if backbone.segmenter.check() is not None:
            return f"several sequences in one row are off: {backbone.segmenter.reason}"
        if not backbone.splits:
            return "its body and head, one after the other, do not give its own logits"
        if self._switch.mixers:
            return f"{type(self._switch.mixers[0]).__name__} keeps a state of its own"
        if "position_ids" not in inspect.signature(self.model.base_model.forward).parameters:
            return "it takes no position_ids"
        if kinds := sorted(set(_rope_types(getattr(config, "rope_parameters", None))) & set(_DYNAMIC_ROPE)):
            return f"its rotary embedding ({kinds[0]}) changes with the longest sequence of a batch"
        return None

    def _body(self, ids: Sequence[int], scope: "_Probe") -> Tensor:
        inputs = torch.tensor([ids, range(len(ids))], device=self.device)
        with scope:
            return self._run(inputs[:1], inputs[1:])

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states `[T, H]`.

        The mask is all ones and has no effect; without it transformers would search `position_ids` for packed rows.
        """
        mask = torch.ones_like(ids, dtype=torch.bool)
        body = self.model.base_model
        out = body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _whole(self, texts: Texts) -> Tensor:
        """Return the hidden states of the texts, each from a separate forward."""
        return torch.cat([self._body(text, _Probe(self._switch)) for text in texts])

    def _in_steps(self, texts: Texts) -> Tensor:
        """Return the hidden states of the texts, read together in shared steps."""
        store = self._store()
        store.resize(len(texts), max(map(len, texts)))
        hidden_states: list[list[Tensor]] = [[] for _ in texts]
        for bounds in zip(*_CUTS, strict=True):
            pieces = [Piece(slot, start, texts[slot][start:stop], None) for slot, (start, stop) in enumerate(bounds)]
            read = self.read(pieces, store)
            for outputs, piece, first in zip(hidden_states, pieces, read.stream.firsts, strict=True):
                outputs.append(read.hidden[first : first + len(piece.tokens)])
        return torch.cat([torch.cat(outputs) for outputs in hidden_states])


def _bounds() -> list[tuple[int, int]]:
    ends = [0, *accumulate(_LENGTHS)]
    return list(pairwise(ends))


class _Probe(Scope):
    """Records the shapes of keys and values of the layers."""

    def __init__(self, switch: Switch) -> None:
        from twinkle_torch.segments import Segments

        super().__init__(Segments.of([1]), switch)
        self.layers: list[LayerShape] = []

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Record the shapes, and attend."""
        from twinkle_torch.segments import Segments

        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
        self.layers.append(LayerShape((k.shape[1], k.shape[2]), (v.shape[1], v.shape[2]), dtype))
        self.segments = Segments.of([len(q)], q.device)
        return super().attend(module, q, k, v, **options)


def _rope_types(parameters: Any) -> list[str]:
    """Return the types of rotary embedding in `rope_parameters`, which may have one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    types = [parameters["rope_type"]] if isinstance(parameters.get("rope_type"), str) else []
    return types + [kind for value in parameters.values() for kind in _rope_types(value)]
