"""The loss head's two autograd functions: one for a head that is frozen, one for a head that is trained.

With z the logits of a position, y its target, V the size of the vocabulary and p = softmax(z):

- log-probability `l = log p_y`, d l / dz = onehot(y) - p
- entropy `H = -sum p log p`, d H / dz = -p (log p + H)
- uniform log-probability `u = mean_v log p_v`, d u / dz = 1/V - p

None of them depends on the loss, so a frozen head needs no second look at the logits: its forward stores what follows
for the hidden states, `[N, H]` each, and its backward only scales that. A trained head makes its logits again, chunk by
chunk, in the backward. `scale`, `softcap` and `temperature` multiply each d / dz by `factor * bend` (see `logits`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle_torch.logits import LogitTransform, Wanted, logits_of, wide


class FrozenHead(torch.autograd.Function):
    """Scores with a head that takes no gradient; saves one to three `[N, H]` tensors of derivatives."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform,
                want: Wanted, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return log-probabilities, entropies, uniform log-probabilities and predictions of `h` `[N, H]`."""
        scores = _empty_scores(h, want)
        slopes = _Slopes(h, weight, transform, want) if ctx.needs_input_grad[0] else None
        for start in range(0, h.shape[0], chunk):
            part = slice(start, start + chunk)
            # Logits that nothing else names are gone before the next chunk's are made.
            _score(logits_of(h[part], weight, bias, transform), y[part], part, scores, want, slopes)
        ctx.save_for_backward(*(slopes.made() if slopes else ()))
        ctx.want = want
        _mark(ctx, scores, want)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_uniform: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Scale the stored derivatives by the gradients of the scores, `[N]` each."""
        d_logp, *rest = ctx.saved_tensors
        grad = d_logp * g_logp[:, None].to(d_logp.dtype)
        others = [g for g, wanted in ((g_entropy, ctx.want.entropies), (g_uniform, ctx.want.uniform)) if wanted]
        for slope, g in zip(rest, others, strict=True):
            grad.addcmul_(slope, g[:, None].to(slope.dtype))
        return grad, None, None, None, None, None, None


class TrainedHead(torch.autograd.Function):
    """Scores with a head that is trained; the backward makes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform,
                want: Wanted, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return log-probabilities, entropies, uniform log-probabilities and predictions of `h` `[N, H]`."""
        scores = _empty_scores(h, want)
        log_zs = scores[0].new_empty(h.shape[0], 1)
        for start in range(0, h.shape[0], chunk):
            part = slice(start, start + chunk)
            z = logits_of(h[part], weight, bias, transform)
            log_zs[part] = _score(z, y[part], part, scores, want, None)
            del z
        ctx.save_for_backward(h, y, weight, bias, log_zs, scores[1])
        ctx.transform, ctx.want, ctx.chunk = transform, want, chunk
        _mark(ctx, scores, want)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_uniform: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias."""
        h, y, weight, bias, log_zs, entropy = ctx.saved_tensors
        needs_h, _y, needs_weight, needs_bias, *_rest = ctx.needs_input_grad
        d_h = torch.empty_like(h) if needs_h else None
        d_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide(bias.dtype)) if needs_bias else None
        for start in range(0, h.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = logits_of(h[part], weight, bias, ctx.transform)
            of_entropy = (g_entropy[part, None], entropy[part, None]) if ctx.want.entropies else None
            of_uniform = g_uniform[part, None] if ctx.want.uniform else None
            grad = _gradient(z, y[part, None], log_zs[part], g_logp[part, None], of_entropy, of_uniform, ctx.transform)
            if d_bias is not None:
                d_bias += grad.sum(0)
            small = grad.to(h.dtype)
            if d_h is not None:
                torch.mm(small, weight, out=d_h[part])
            if d_weight is not None and d_weight.dtype == small.dtype:
                d_weight.addmm_(small.T, h[part])
            elif d_weight is not None:
                d_weight += small.T @ h[part]
            del z, grad, small
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(bias.dtype)
        return d_h, None, d_weight, d_bias, None, None, None


class _Slopes:
    """Derivatives of the scores by the hidden states, `[N, H]` each, filled chunk by chunk."""

    def __init__(self, h: Tensor, weight: Tensor, transform: LogitTransform, want: Wanted) -> None:
        self.weight, self.transform = weight, transform
        self.logp = torch.empty_like(h)
        self.entropy = torch.empty_like(h) if want.entropies else None
        self.uniform = torch.empty_like(h) if want.uniform else None
        self._mean = weight.mean(0, dtype=wide(weight.dtype)).to(weight.dtype) if want.uniform else None

    def made(self) -> tuple[Tensor, ...]:
        """Return those that are wanted, in the order of the scores."""
        return tuple(slope for slope in (self.logp, self.entropy, self.uniform) if slope is not None)

    def straight(self, part: slice, y: Tensor, p: Tensor, total: Tensor | float) -> None:
        """Fill without softcap and entropy: `W_y - p W` needs no gradient at the logits. `p` sums to `total`."""
        mean = (p.to(self.weight.dtype) @ self.weight).div_(total)
        torch.sub(self.weight[y], mean, out=self.logp[part]).mul_(self.transform.factor)
        if self.uniform is not None and self._mean is not None:
            torch.sub(self._mean, mean, out=self.uniform[part]).mul_(self.transform.factor)

    def bent(self, part: slice, y: Tensor, p: Tensor, bend: Tensor | None, d_entropy: Tensor | None) -> None:
        """Fill from gradients at the logits; `d_entropy` is used up, and so is `p`."""
        if self.entropy is not None and d_entropy is not None:
            self.entropy[part] = self._pulled(d_entropy, bend)
        if self.uniform is not None:
            self.uniform[part] = self._pulled((1.0 / p.shape[-1]) - p, bend)
        grad = p.neg_()
        grad.scatter_add_(-1, y[:, None], grad.new_ones(len(y), 1))
        self.logp[part] = self._pulled(grad, bend)

    def _pulled(self, grad: Tensor, bend: Tensor | None) -> Tensor:
        if bend is not None:
            grad.mul_(bend)
        return (grad.to(self.weight.dtype) @ self.weight).mul_(self.transform.factor)


def _score(
    z: Tensor, y: Tensor, part: slice, scores: tuple[Tensor, ...], want: Wanted, slopes: _Slopes | None
) -> Tensor:
    """Write the scores (and slopes) of a chunk of logits `z`, which are used up; return log sum exp z, `[n, 1]`."""
    logps, entropy, uniform, best = scores
    if want.predictions:
        best[part] = z.argmax(-1)
    mean = z.mean(-1, keepdim=True) if want.uniform else None
    bend = slopes.transform.bend(z) if slopes is not None else None
    largest = z.amax(-1, keepdim=True)
    z.sub_(largest)
    target = z.gather(-1, y[:, None])
    if want.entropies:
        p = z.exp()
        log_total = p.sum(-1, keepdim=True).log_()
        log_p = z.sub_(log_total)
        torch.exp(log_p, out=p)
        entropy[part] = -(p * log_p).sum(-1)
        if slopes is not None:
            slopes.bent(part, y, p, bend, log_p.add_(entropy[part, None]).mul_(p).neg_())
    else:
        p = z.exp_()
        total = p.sum(-1, keepdim=True)
        log_total = total.log()
        if slopes is not None:
            # In float16, p before its division could overflow the product with the head.
            if bend is not None or slopes.weight.dtype is torch.float16:
                p.div_(total)
                total = torch.ones_like(total)
            if bend is not None:
                slopes.bent(part, y, p, bend, None)
            else:
                slopes.straight(part, y, p, total)
    logps[part] = (target - log_total).squeeze(-1)
    log_z = largest + log_total
    if mean is not None:
        uniform[part] = (mean - log_z).squeeze(-1)
    return log_z


def _gradient(
    z: Tensor, y: Tensor, log_z: Tensor, g_logp: Tensor, of_entropy: tuple[Tensor, Tensor] | None,
    g_uniform: Tensor | None, transform: LogitTransform,
) -> Tensor:  # fmt: skip
    """Return the gradient at the raw logits of a chunk; the logits `z` are used up. All others are `[n, 1]`."""
    bend = transform.bend(z)
    log_p = z.sub_(log_z)
    g_logp = g_logp.to(z.dtype)
    weight = g_logp if g_uniform is None else g_logp + g_uniform
    if of_entropy is not None:
        g_entropy, entropy = of_entropy
        weight = (log_p + entropy).mul_(g_entropy).add_(weight)
    grad = log_p.exp_().mul_(weight).neg_()
    if g_uniform is not None:
        grad.add_(g_uniform / z.shape[-1])
    grad.scatter_add_(-1, y, g_logp)
    if bend is not None:
        grad.mul_(bend)
    return grad if transform.factor == 1.0 else grad.mul_(transform.factor)


def _empty_scores(h: Tensor, want: Wanted) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, dtype = h.shape[0], wide(h.dtype)
    return (
        h.new_empty(n, dtype=dtype),
        h.new_empty(n if want.entropies else 0, dtype=dtype),
        h.new_empty(n if want.uniform else 0, dtype=dtype),
        torch.empty(n if want.predictions else 0, dtype=torch.int64, device=h.device),
    )


def _mark(ctx: Any, scores: tuple[Tensor, ...], want: Wanted) -> None:
    _, entropy, uniform, best = scores
    unwanted = [t for t, wanted in ((entropy, want.entropies), (uniform, want.uniform)) if not wanted]
    ctx.mark_non_differentiable(best, *unwanted)
