"""Attention over sequences that lie one after the other in one row: each token sees only its own sequence.

A sequence may go on after another one, its parent, so that a prefix which several share lies there once. The kernel for
unequal lengths does all this where torch has one (CUDA); elsewhere sequences of equal length are stacked and attended
together, so that the cost is the sum of the squares of the lengths and no `[T, T]` mask is ever built.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle_torch.attention import Rule
from twinkle_torch.places import Segments
from twinkle_torch.prefix_attention import attend_in_parts, fits, gather

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
        Unsupported: a sequence goes on after another one.
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
    """Return causal attention within each segment, and to all of what it goes on after.

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
    seen = (-1 if window is None else window - 1, 0)  # tokens before and after, itself not counted
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
