"""The loss head with several targets a position: one soft-max, K log-probabilities.

With z the logits of a position and p their soft-max, `l_k = z[y_k] - log sum exp z` and `d l_k / dz = onehot(y_k) - p`.
Weighted by the gradients g_k of a loss that is `sum_k g_k W[y_k] - (sum_k g_k) p W` at the hidden states: the forward
keeps `p W`, `[N, H]`, and the backward adds the rows of the head that the targets name.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle_torch.logits import LogitTransform, logits_of, wide


class FrozenTargets(torch.autograd.Function):
    """Scores several targets a position with a head that takes no gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform,
                chunk: int) -> Tensor:  # fmt: skip
        """Return log-probabilities `[N, K]` of targets `y` `[N, K]` at hidden states `h` `[N, H]`."""
        logps = h.new_empty(y.shape, dtype=wide(h.dtype))
        wanted = ctx.needs_input_grad[0]
        means = torch.empty_like(h) if wanted else None
        bends = torch.empty_like(logps) if wanted and transform.softcap is not None else None
        for start in range(0, h.shape[0], chunk):
            part = slice(start, start + chunk)
            z = logits_of(h[part], weight, bias, transform)
            bend = transform.bend(z) if wanted else None
            z.sub_(z.amax(-1, keepdim=True))
            target = z.gather(-1, y[part])
            p = z.exp_()
            total = p.sum(-1, keepdim=True)
            torch.sub(target, total.log(), out=logps[part])
            if means is not None:
                p.div_(total)
                means[part] = ((p if bend is None else p * bend).to(weight.dtype) @ weight).mul_(transform.factor)
            if bends is not None and bend is not None:
                bends[part] = bend.gather(-1, y[part])
            del z, p
        ctx.save_for_backward(*(() if means is None else (means, y, weight, bends)))
        ctx.factor, ctx.chunk = transform.factor, max(1, chunk // max(1, y.shape[1]))
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the hidden states."""
        means, y, weight, bends = ctx.saved_tensors
        grad = means * -g.sum(-1, keepdim=True).to(means.dtype)
        own = (g if bends is None else g * bends).mul(ctx.factor).to(weight.dtype)
        for start in range(0, len(y), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad[part] += torch.bmm(own[part, None], weight[y[part]]).squeeze(1)
        return grad, None, None, None, None, None
