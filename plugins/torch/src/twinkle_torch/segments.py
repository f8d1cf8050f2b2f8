"""Attention over sequences that are concatenated in one row: each token sees only its own sequence.

A sequence may continue another one, its parent, so that a prefix that several share is stored once. The kernel for
unequal lengths computes this where torch has one (CUDA); elsewhere sequences of equal length are stacked and attended
together, so that the cost is the sum of the squares of the lengths and no `[T, T]` mask is ever built.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import ArgumentError, Unsupported
from twinkle_torch.head import wide
from twinkle_torch.prefix_attention import Part, attend_in_parts, fits, gather


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a packed row lie.

    Attributes:
        lengths: tokens of each sequence, in order, each at least 1; without those of its parent.
        cu_seqlens: int32 `[n + 1]`, where each sequence begins, and the end; on the device of the tokens.
        parents: for each sequence the index of the one that it continues, or -1; empty if no sequence has a parent.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    parents: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str | None = None,
        parents: Sequence[int] | None = None,
    ) -> "Segments":
        """Return the segments of sequences of these lengths.

        Args:
            lengths: tokens of each sequence, without those of its parent.
            device: where `cu_seqlens` shall be.
            parents: for each sequence the number of an earlier one whose tokens, and those of that one's own parent,
                come before its own; -1 for a sequence that begins by itself.

        Raises:
            ArgumentError: there are no sequences, one has no tokens, or a parent does not come before its child.
        """
        if not lengths or min(lengths) < 1:
            raise ArgumentError(f"segments of lengths {list(lengths)}; there must be one, and each needs a token")
        found = () if parents is None else tuple(map(int, parents))
        if parents is not None and len(found) != len(lengths):
            raise ArgumentError(f"{len(found)} parents for {len(lengths)} segments; give one for each, -1 for none")
        for number, parent in enumerate(found):
            if not -1 <= parent < number:
                raise ArgumentError(f"segment {number} has the parent {parent}; a parent comes before its children")
        if max(found, default=-1) < 0:
            found = ()
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(map(int, lengths)), bounds if device is None else bounds.to(device), found)

    @cached_property
    def total(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence, its parent's tokens not counted."""
        return max(self.lengths)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each sequence begins and ends."""
        return tuple(pairwise((0, *accumulate(self.lengths))))

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """For each sequence the numbers of those that come before it: its parent last."""
        chains: list[tuple[int, ...]] = []
        for parent in self.parents or [-1] * len(self.lengths):
            chains.append(() if parent < 0 else (*chains[parent], parent))
        return tuple(chains)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of the first token of each sequence: the number of tokens that come before it."""
        return tuple(sum(self.lengths[number] for number in chain) for chain in self.chains)

    @cached_property
    def reach(self) -> int:
        """Number of tokens that the last token of some sequence sees, at most."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, int64 `[T]`, on the device of `cu_seqlens`."""
        pairs = zip(self.starts, self.lengths, strict=True)
        counted = torch.cat([torch.arange(start, start + length) for start, length in pairs])
        return counted.to(self.cu_seqlens.device)

    @cached_property
    def families(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The numbers of the sequences of each parent and length."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, length in enumerate(self.lengths):
            found.setdefault((self.parents[number] if self.parents else -1, length), []).append(number)
        return {key: tuple(numbers) for key, numbers in found.items()}

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The calls that attend without copying: neighbours of one length to themselves, children to each parent."""
        own: list[Part] = []
        for start, stop in self.bounds:
            last = own[-1] if own else None
            if last is not None and (last.queries[1] - last.queries[0]) // last.count == stop - start:
                own[-1] = Part((last.queries[0], stop), (last.queries[0], stop), last.count + 1)
            else:
                own.append(Part((start, stop), (start, stop)))
        return (*own, *self._parts_of_parents())

    def _parts_of_parents(self) -> list[Part]:
        runs: dict[int, list[tuple[int, int]]] = {}
        for chain, (start, stop) in zip(self.chains, self.bounds, strict=True):
            for number in chain:
                known = runs.setdefault(number, [])
                if known and known[-1][1] == start:
                    known[-1] = known[-1][0], stop
                else:
                    known.append((start, stop))
        return [Part(run, self.bounds[number]) for number, found in runs.items() for run in found]

    @cached_property
    def keys(self) -> "Keys":
        """What each sequence sees, one after the other."""
        seen = [[self.bounds[n] for n in (*chain, number)] for number, chain in enumerate(self.chains)]
        lengths = [sum(stop - start for start, stop in pieces) for pieces in seen]
        index = torch.cat([torch.arange(*piece) for pieces in seen for piece in pieces])
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        device = self.cu_seqlens.device
        return Keys(index.to(device), bounds.to(device))


@dataclass(frozen=True, slots=True)
class Keys:
    """The tokens that sequences see, gathered.

    Attributes:
        index: int64 `[K]`, index of each of them in the row.
        cu_seqlens: int32 `[n + 1]`, where those of each sequence begin, and the end.
    """

    index: Tensor
    cu_seqlens: Tensor


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
        first = seen & (key >= window - given)  # only given keys precede the first block
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


__all__ = ["Segments", "by_segment", "segment_attention"]


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
        Unsupported: a sequence continues another one.
    """
    if segments.parents:
        raise Unsupported(
            "what runs on each sequence alone (convolutions, the gated delta rule, Mamba) cannot go on after a prefix "
            "that several sequences share: its state there is not kept; give each sequence its prefix"
        )
    for tensor in tensors:
        if len(tensor) != segments.total:
            raise ArgumentError(f"segments hold {segments.total} tokens, but a tensor has {len(tensor)}")
    return _by_family(function, segments, *tensors)


def _by_family(function: Callable[..., Tensor], segments: Segments, *tensors: Tensor) -> Tensor:
    """Apply `function(*stacked)` to the sequences of each parent and length.

    Where they have a parent, it is also given what comes before them in all tensors but the first: keys and values.
    """
    # One split, one backward: slices would each add a gradient as long as the whole row.
    pieces = [torch.split_with_sizes(tensor, segments.lengths) for tensor in tensors]
    results: list[Tensor | None] = [None] * len(segments.lengths)
    for numbers in segments.families.values():
        stacked = [_stack([piece[number] for number in numbers]) for piece in pieces]
        if chain := segments.chains[numbers[0]]:
            found = function(*stacked, [torch.cat([piece[n] for n in chain]) for piece in pieces[1:]])
        else:
            found = function(*stacked)
        for number, result in zip(numbers, found.unbind(), strict=True):
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
    """Return causal attention within each segment and to the whole prefix that it continues.

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
    if window is not None and window >= segments.reach:
        window = None
    rule = Rule(scale, window, softcap, sinks, dropout)
    kernel = _kernel(q, v) if rule.plain and not dropout else None
    if kernel is not None:
        return _by_kernel(kernel, q, k, v, segments, scale, window)
    if segments.parents and rule.plain and not dropout and window is None and fits(q, k, v):
        return attend_in_parts(q, k, v, segments.parts, scale)
    return _by_family(rule, segments, q, k, v)


def _by_kernel(
    kernel: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend by the kernel for unequal lengths; where it has more keys than queries, the last of both belong together.

    That is flash attention's rule since its version 2.1, for causal order and for windows.
    """
    bounds, reach = segments.cu_seqlens, segments.reach
    if segments.parents:
        bounds = segments.keys.cu_seqlens
        k, v = gather(k, segments.keys.index), gather(v, segments.keys.index)
    seen = (-1 if window is None else window - 1, 0)  # number of tokens before and after the token itself
    return kernel(
        q, k, v, segments.cu_seqlens, bounds, segments.longest, reach,
        scale=scale, window_size=seen, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


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
