"""RMS norms of transformers' models that keep less for the backward and compute it in fewer passes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNormKernel(nn.Module):
    """`weight * normed` with the norm in float32, the RMSNorm of Llama, Mistral, Qwen2, Qwen3 and their like.

    Zhang and Sennrich 2019, arXiv:1910.07467. Autograd of the layer's own forward keeps the normed values; this keeps
    the input, which the residual stream keeps anyway, and one number a row. The forward's numbers are the layer's, bit
    for bit. The layer has a `weight` `[H]` and `variance_epsilon`.
    """

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normed states.

        Args:
            hidden_states: `[..., H]`, any floating dtype.
        """
        result: Tensor = _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
        return result


class ShiftedRMSNormKernel(nn.Module):
    """`(1 + weight) * normed`, all in float32 and rounded once: the RMSNorm of Gemma, Qwen3-Next and Qwen3.5.

    The layer has a `weight` `[H]` and `eps`. What it keeps is what `RMSNormKernel` keeps.
    """

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed states; `x` is `[..., H]`."""
        result: Tensor = _ShiftedRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class _RMSNorm(torch.autograd.Function):
    """With n = x r, r = (mean(x^2) + eps)^-1/2 and g = dy w: dx = r (g - n mean(g n)), dw = sum of dy n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale, normed = _normed(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        normed = normed.to(x.dtype)
        return normed.mul_(weight) if normed.dtype == weight.dtype else weight * normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad, by_weight = _times(x, x.float(), scale), None, None
        if ctx.needs_input_grad[1]:
            by_weight = (grads[0] * normed.to(x.dtype)).reshape(-1, weight.numel()).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad = _by_input((grads[0] * weight).to(x.dtype).float(), normed, scale).to(x.dtype)
        return grad, by_weight, None


class _ShiftedRMSNorm(torch.autograd.Function):
    """The same with 1 + w in place of w, and no rounding in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale, normed = _normed(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return normed.mul_(weight.float() + 1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, top = _times(x, x.float(), scale), grads[0].float()
        grad, by_weight = None, None
        if ctx.needs_input_grad[1]:
            by_weight = (top * normed).reshape(-1, weight.numel()).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad = _by_input(top * (weight.float() + 1), normed, scale).to(x.dtype)
        return grad, by_weight, None


def _normed(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `(mean(x^2) + epsilon)^-1/2` `[..., 1]` and `x` times that, both new float32 tensors.

    Computed in the order of the layers, so that the numbers are theirs.
    """
    wide = x.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return scale, _times(x, wide, scale)


def _times(x: Tensor, wide: Tensor, scale: Tensor) -> Tensor:
    """Return `wide * scale`, in the memory of `wide` where that is a copy of `x`."""
    return wide * scale if wide is x else wide.mul_(scale)


def _by_input(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient by the input; overwrites `grad`, a fresh tensor."""
    along = (grad * normed).mean(-1, keepdim=True)
    return grad.addcmul_(normed, along, value=-1).mul_(scale)
