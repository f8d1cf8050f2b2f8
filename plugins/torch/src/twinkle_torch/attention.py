"""Causal attention of stacked sequences of one length, which may go on after tokens that they all share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinkle_torch.head import wide


@dataclass(frozen=True, slots=True)
class Rule:
    """How tokens attend.

    Attributes:
        scale: factor on the products of queries and keys.
        window: number of tokens that each token sees, itself the last; None is all before it.
        softcap: c in `c * tanh(score / c)` on the scaled scores.
        sinks: `[H]`, a score for each head that takes its share of the soft-max and gives nothing.
        dropout: probability of leaving an attention weight out.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float

    @property
    def plain(self) -> bool:
        """Whether the soft-max is of the scaled products alone."""
        return self.softcap is None and self.sinks is None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, before: Sequence[Tensor] = ()) -> Tensor:
        """Attend `[n, l, H, D]` to `[n, l, G, D]` and `[n, l, G, E]`; returns `[n, l, H, E]`.

        Args:
            q: queries.
            k: keys; each of their heads serves `H / G` consecutive heads of `q`.
            v: values.
            before: keys `[m, G, D]` and values `[m, G, E]` of `m` tokens that come before each of
                the sequences.
        """
        given = 0
        if before:
            k, v = self._after(before[0], k), self._after(before[1], v)
            given = k.shape[1] - q.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        length, groups = q.shape[2], q.shape[1] // k.shape[1]
        bound = self.window is not None and given + length > self.window
        if self.plain and not bound:
            causal = _causal(length, given, None, q.device) if given else None
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, causal, self.dropout, is_causal=causal is None, scale=self.scale, enable_gqa=groups > 1
            )
            return out.transpose(1, 2)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if self.window is not None and length > self.window:
            return self._banded(q, k, v, self.window).transpose(1, 2)
        return self._weigh(q, k, v, _causal(length, given, self.window, q.device)).transpose(1, 2)

    def _after(self, before: Tensor, own: Tensor) -> Tensor:
        """Return `[n, m + l, ...]`; of what comes before, only what the first token of `own` sees."""
        if self.window is not None:
            before = before[max(len(before) - self.window + 1, 0) :]
        return torch.cat([before.expand(len(own), *before.shape), own], 1)

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Attend block by block: a block of `window` queries sees its own keys and those of the block before."""
        rows, heads, length, _ = q.shape
        given = k.shape[2] - length
        blocks = -(-length // window)
        spare = blocks * window - length
        q = nn.functional.pad(q, (0, 0, 0, spare)).reshape(rows, heads, blocks, window, -1)
        k, v = (nn.functional.pad(x, (0, 0, window - given, spare)).unfold(2, 2 * window, window).mT for x in (k, v))
        query = torch.arange(window, device=q.device)[:, None]
        key = torch.arange(2 * window, device=q.device)
        seen = (key > query) & (key <= query + window)
        first = seen & (key >= window - given)  # before the first block lies what was given, and nothing else
        allowed = torch.stack([first, *[seen] * (blocks - 1)])[:, None]
        q, k, v = (x.movedim(2, 1).flatten(0, 1) for x in (q, k, v))
        out = self._weigh(q, k, v, allowed.repeat(rows, 1, 1, 1))
        out = out.view(rows, blocks, heads, window, -1).movedim(1, 2)
        return out.reshape(rows, heads, blocks * window, -1)[:, :, :length]

    def _weigh(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if self.plain:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=self.dropout, scale=self.scale
            )
        scores = (q @ k.mT).to(wide(q.dtype)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~allowed, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return nn.functional.dropout(weights, self.dropout).to(v.dtype) @ v


def _causal(length: int, given: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask `[length, given + length]` of keys that each query sees."""
    seen = torch.ones(length, given + length, dtype=torch.bool, device=device).tril(given)
    return seen if window is None else seen.triu(given - window + 1)
