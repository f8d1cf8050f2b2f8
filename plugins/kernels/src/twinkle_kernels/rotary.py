"""Rotary position embeddings in fewer passes over the memory."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RotaryKernel:
    """`apply_rotary_pos_emb(q, k, cos, sin)` of Llama, Mistral, Qwen2, Qwen3 and Gemma: Su et al., arXiv:2104.09864.

    Each half of a head is multiplied and added in place, without the negated and joined copy that the function of
    transformers makes. In bfloat16 it rounds once less. `cos` and `sin` get no gradient.
    """

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Return queries and keys, rotated.

        Args:
            q: `[B, N, T, D]`, or `[B, T, N, D]` with `unsqueeze_dim=2`; any floating dtype.
            k: the same with its own number of heads.
            cos: `[B, T, D]` or `[1, T, D]`, of that dtype.
            sin: same shape and dtype.
            unsqueeze_dim: where the heads are.
        """
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)


class _Rotate(torch.autograd.Function):
    """Linear in x, so that the backward is the transposed rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half, out = x.shape[-1] // 2, x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad = grads[0]
        half, out = grad.shape[-1] // 2, grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result
