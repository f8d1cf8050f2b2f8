"""Attention over sequences that lie one after the other in one row: each token sees only its own sequence.

The kernel for unequal lengths does it where torch has one (CUDA); elsewhere sequences of equal length are stacked and
attended together, so that the cost is the sum of the squares of the lengths and no `[T, T]` mask is ever built.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import ArgumentError
from twinkle.torch.head import wide


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a packed row lie.

    Attributes:
        lengths: tokens of each sequence, in order, each at least 1.
        cu_seqlens: int32 `[n + 1]`, where each sequence begins, and the end; on the device of the tokens.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> "Segments":
        """Return the segments of sequences of these lengths.

        Raises:
            ArgumentError: there are none, or one has no tokens.
        """
        if not lengths or min(lengths) < 1:
            raise ArgumentError(f"segments of lengths {list(lengths)}; there must be one, and each needs a token")
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(map(int, lengths)), bounds if device is None else bounds.to(device))

    @cached_property
    def total(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """The numbers of the sequences of each length."""
        found: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            found.setdefault(length, []).append(number)
        return {length: tuple(numbers) for length, numbers in found.items()}


def by_segment(function: Callable[..., Tensor], segments: Segments, *tensors: Tensor) -> Tensor:
    """Apply a function to each sequence alone, to sequences of equal length in one call.

    Args:
        function: takes each of `tensors` as `[n, length, ...]` and returns `[n, length, ...]`; its rows must not
            depend on each other.
        segments: where the sequences lie.
        *tensors: `[T, ...]` each.

    Returns:
        the results, `[T, ...]`, in the order of the tokens.

    Raises:
        ArgumentError: a tensor does not have one entry for each token.
    """
    for tensor in tensors:
        if len(tensor) != segments.total:
            raise ArgumentError(f"segments hold {segments.total} tokens, but a tensor has {len(tensor)}")
    # One split, one backward: slices would each add a gradient as long as the whole row.
    pieces = [torch.split_with_sizes(tensor, segments.lengths) for tensor in tensors]
    results: list[Tensor | None] = [None] * len(segments.lengths)
    for numbers in segments.groups.values():
        stacked = [_stack([piece[number] for number in numbers]) for piece in pieces]
        for number, result in zip(numbers, function(*stacked).unbind(), strict=True):
            results[number] = result
    return torch.cat([result for result in results if result is not None])


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return causal attention within each segment.

    Args:
        q: `[T, H, D]`.
        k: `[T, G, D]`; each of its heads serves `H / G` consecutive heads of `q`.
        v: `[T, G, E]`.
        segments: where the sequences lie.
        scale: factor on the products of queries and keys; by default `1 / sqrt(D)`.
        window: number of tokens that each token sees, itself the last; None is all before it.
        softcap: c in `c * tanh(score / c)` on the scaled scores (Gemma 2).
        sinks: `[H]`, a score for each head that takes its share of the soft-max and gives nothing (gpt-oss).
        dropout: probability of leaving an attention weight out.

    Returns:
        `[T, H, E]`, in the dtype of `v` (of autocast, where that is on).

    Raises:
        ArgumentError: shapes do not fit, or an option is outside its range.
    """
    _check(q, k, v, segments, window, softcap, sinks)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if window is not None and window >= segments.longest:
        window = None
    kernel = _kernel(q, v) if softcap is None and sinks is None and not dropout else None
    if kernel is not None:
        bounds, longest = segments.cu_seqlens, segments.longest
        seen = (-1 if window is None else window - 1, 0)  # tokens before and after, itself not counted
        grouped = q.shape[1] != k.shape[1]
        out: Tensor = kernel(
            q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=seen, enable_gqa=grouped
        )
        return out
    rule = _Rule(scale, window, softcap, sinks, dropout)
    return by_segment(rule, segments, q, k, v)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Causal attention of stacked sequences of one length."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend `[n, l, H, D]` to `[n, l, G, D]` and `[n, l, G, E]`; returns `[n, l, H, E]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        length, groups = q.shape[2], q.shape[1] // k.shape[1]
        plain = self.softcap is None and self.sinks is None
        if plain and (self.window is None or length <= self.window):
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=True, scale=self.scale, enable_gqa=groups > 1
            )
            return out.transpose(1, 2)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if self.window is not None and length > self.window:
            return self._banded(q, k, v, self.window).transpose(1, 2)
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        return self._weigh(q, k, v, causal).transpose(1, 2)

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Attend block by block: a block of `window` queries sees its own keys and those of the block before."""
        rows, heads, length, _ = q.shape
        blocks = -(-length // window)
        spare = blocks * window - length
        q = nn.functional.pad(q, (0, 0, 0, spare)).reshape(rows, heads, blocks, window, -1)
        k, v = (nn.functional.pad(x, (0, 0, window, spare)).unfold(2, 2 * window, window).mT for x in (k, v))
        query = torch.arange(window, device=q.device)[:, None]
        key = torch.arange(2 * window, device=q.device)
        seen = (key > query) & (key <= query + window)
        first = seen & (key >= window)  # nothing lies before the first block
        allowed = torch.stack([first, *[seen] * (blocks - 1)])[:, None]
        q, k, v = (x.movedim(2, 1).flatten(0, 1) for x in (q, k, v))
        out = self._weigh(q, k, v, allowed.repeat(rows, 1, 1, 1))
        out = out.view(rows, blocks, heads, window, -1).movedim(1, 2)
        return out.reshape(rows, heads, blocks * window, -1)[:, :, :length]

    def _weigh(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if self.softcap is None and self.sinks is None:
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


def _stack(pieces: list[Tensor]) -> Tensor:
    return pieces[0][None] if len(pieces) == 1 else torch.stack(pieces)


def _check(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3 or not len(q) == len(k) == len(v) == segments.total:
        raise ArgumentError(f"segment_attention: {shapes}; each is [{segments.total} tokens, heads, size]")
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            f"segment_attention: {shapes}; q and k need one size, k and v as many heads, of which q has a multiple"
        )
    if window is not None and window < 1:
        raise ArgumentError(f"segment_attention: window is {window}; it is a number of tokens from 1, or None")
    if softcap is not None and softcap <= 0:
        raise ArgumentError(f"segment_attention: softcap is {softcap}; it is above 0, or None")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ArgumentError(f"segment_attention: sinks {list(sinks.shape)} for {q.shape[1]} heads; it is one a head")


def _kernel(q: Tensor, v: Tensor) -> Callable[..., Any] | None:
    """Return torch's kernel for unequal lengths where it can do this, else None."""
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256 and not q.shape[-1] % 8
    if not q.is_cuda or not fits or torch.are_deterministic_algorithms_enabled():
        return None
    return _varlen() if torch.cuda.get_device_capability(q.device) >= (8, 0) else None


@cache
def _varlen() -> Callable[..., Any] | None:
    """Return `varlen_attn`; None where this torch has none (before 2.10) or one without windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None
