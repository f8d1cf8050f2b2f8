"""Attention over sequences that share prefixes, on a CPU: keys of a prefix are read in place, without copies.

A sequence's own part and its prefix are attended to apart and put together by their log-sum-exp, so that keys are never
copied and lengths need not be equal. The gradient of a part is that of flash attention with the output and the
log-sum-exp of the whole: with `P = exp(S - lse)` and `D = sum(dO * O)` it is `dS = P * (dO V' - D)`, part by part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from twinkle_torch.head import wide

_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, slots=True)
class Part:
    """One call: `count` runs of `queries / count` tokens, each with as many of the keys.

    Attributes:
        queries: first and last + 1 of the tokens that attend.
        keys: first and last + 1 of the tokens that they attend to: themselves, causally, or others, all of them.
        count: number of runs of equal length.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    count: int = 1

    @property
    def own(self) -> bool:
        """Whether the tokens attend to themselves."""
        return self.queries == self.keys

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views `[count, heads, length, size]` of `[T, heads, size]` each."""
        return self.of_queries(q), self.of_keys(k), self.of_keys(v)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the view `[count, heads, length, ...]` of what the queries have in `[T, heads, ...]`."""
        return _stacked(x, self.queries, self.count)

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the view `[count, heads, length, ...]` of what the keys have in `[T, heads, ...]`."""
        return _stacked(x, self.keys, self.count)


def fits(*tensors: Tensor) -> bool:
    """Return whether torch has the kernel for these tensors; torch itself checks neither devices nor dtypes."""
    dtypes = {x.dtype for x in tensors}
    return len(dtypes) == 1 and dtypes <= _DTYPES and all(x.device.type == "cpu" for x in tensors) and has_kernel()


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], scale: float) -> Tensor:
    """Return attention whose keys are given part by part.

    Args:
        q: `[T, H, D]`.
        k: `[T, G, D]`.
        v: `[T, G, E]`.
        parts: those of tokens that attend to themselves come first, and every token is in one of them.
        scale: factor on the products of queries and keys.

    Returns:
        `[T, H, E]`.
    """
    size, out = q.shape[-1], v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    # The kernel supports one head size; padding queries and keys with zeros does not change their products.
    if size < out:
        q, k = (nn.functional.pad(x, (0, out - size)) for x in (q, k))
    elif out < size:
        v = nn.functional.pad(v, (0, size - out))
    attended: Tensor = _InParts.apply(q, k, v, parts, scale)  # type: ignore[no-untyped-call]
    return attended[..., :out]


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], scale: float) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=wide(q.dtype))
        for part in parts:
            found, weight = _forward(*part.take(q, k, v), 0.0, part.own, scale=scale)
            whole, known = part.of_queries(out), part.of_queries(lse)
            if part.own:
                whole.copy_(found)
                known.copy_(weight)
            else:
                share = torch.sigmoid(weight - known)[..., None]
                whole.copy_(torch.lerp(whole.to(share.dtype), found.to(share.dtype), share))
                known.copy_(torch.logaddexp(known, weight))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts: Sequence[Part] = ctx.parts
        gradient = gradient.contiguous()
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for part in parts:
            rest = part.of_queries(gradient), part.of_queries(out), part.of_queries(lse)
            made = _backward(*part.take(q, k, v), *rest, part.own, ctx.scale)
            for whole, piece in zip(part.take(*found), made, strict=True):
                whole.copy_(piece) if part.own else whole.add_(piece)
        return *found, None, None


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]` of `[T, ...]`, whose gradient is summed in float32 at least, however many share an entry."""
    found: Tensor = _Gather.apply(x, index)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = len(x)
        return x[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        whole = gradient.new_zeros((ctx.tokens, *gradient.shape[1:]), dtype=wide(gradient.dtype))
        return whole.index_add_(0, index, gradient.to(whole.dtype)).to(gradient.dtype), None


_NAME = "_scaled_dot_product_flash_attention_for_cpu"


@cache
def has_kernel() -> bool:
    """Return whether torch has the kernel, with grouped heads and a log-sum-exp; it is no public one."""
    q = torch.linspace(-1, 1, 12, dtype=torch.float64, device="cpu").view(1, 2, 3, 2)
    k = q[:, :1] + 1
    wanted = (q @ k.mT).logsumexp(-1)
    try:
        out, lse = _forward(q, k, k, 0.0, False, scale=1.0)
        if lse.dtype != wanted.dtype or lse.shape != wanted.shape or not torch.allclose(lse, wanted):
            return False
        made = _backward(q, k, k, q, out, lse, False, 1.0)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return [x.shape for x in made] == [q.shape, k.shape, k.shape]


def _forward(*tensors: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores."""
    found: tuple[Tensor, Tensor] = getattr(torch.ops.aten, _NAME)(*tensors, scale=scale)
    return found


def _backward(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    kernel = getattr(torch.ops.aten, f"{_NAME}_backward")
    found: tuple[Tensor, Tensor, Tensor] = kernel(gradient, q, k, v, out, lse, 0.0, causal, scale=scale)
    return found


def _stacked(x: Tensor, bounds: tuple[int, int], count: int) -> Tensor:
    start, stop = bounds
    return x[start:stop].view(count, -1, *x.shape[1:]).transpose(1, 2)
