"""Attention of a step's tokens to what their sequences have in the store, and to each other."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from twinkle_torch.head import wide
from twinkle_torch.segments import Segments, segment_attention
from twinkle_transformers.lowrank.products import Routing
from twinkle_transformers.sampling.reach import Reach, Span, Stretch
from twinkle_transformers.sampling.store import Store
from twinkle_transformers.segments import Scope, Switch


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

    def __init__(self, reach: Reach, store: Store, switch: Switch, routing: Routing | None) -> None:
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
