"""The one loss head of the house: log-probabilities of chosen tokens from hidden states, never `[tokens, vocabulary]`.

With z the logits of a position, y its target and p = softmax(z), the gradients are d logp_y / dz = onehot(y) - p and,
for the entropy H = -sum p log p, dH / dz = -p (log p + H). Neither depends on the loss, so a frozen head needs no
second look at the logits: the forward stores d logp_y / dh and dH / dh (`[N, H]` each) and the backward scales them.
A trainable head recomputes its logits chunk by chunk in the backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to the product of hidden states and head: `softcap(z * scale) / temperature`.

    Attributes:
        scale: factor on the raw logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: c in `c * tanh(z / c)` (Gemma 2); None is off.
        temperature: of the distribution whose log-probabilities are wanted.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the transformed logits of `raw`, same shape."""
        z = raw if self.scale == 1.0 else raw * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if self.temperature == 1.0 else z / self.temperature

    def pull_back(self, grad: Tensor, z: Tensor) -> Tensor:
        """Turn a gradient at the transformed logits `z` into one at the raw logits, in place."""
        if self.softcap is not None:
            capped = z * self.temperature / self.softcap
            grad.mul_(1.0 - capped * capped)
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the head says about each position, all `[N]`.

    Attributes:
        logps: log-probability of the target; float32 (float64 for float64 hidden states), with gradient.
        entropies: entropy of the distribution, with gradient, if asked for.
        predictions: most probable token, int64, if asked for.
    """

    logps: Tensor
    entropies: Tensor | None = None
    predictions: Tensor | None = None


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Module,
    *,
    transform: LogitTransform | None = None,
    entropies: bool = False,
    predictions: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Score `targets` under `softmax(transform(head(hidden)))`.

    Args:
        hidden: `[N, H]` last hidden states of the positions to score.
        targets: int64 `[N]`, each in `[0, V)`.
        head: the output projection. A plain `nn.Linear` takes the fast paths; anything else (an adapter on the head)
            is called chunk by chunk and recomputed in the backward.
        transform: what the model does to the logits.
        entropies: also compute entropies.
        predictions: also compute the most probable token.
        chunk_tokens: positions whose logits exist at one time; memory is `2 * chunk_tokens * V` numbers.

    Under autocast the products run in autocast's dtype; soft-maxes are always at least float32.
    """
    transform = transform or LogitTransform()
    want = (entropies, predictions)
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return _score_by_module(hidden, targets, head, transform, want, chunk_tokens)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
    weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
    frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    function = _FrozenHead if frozen or not torch.is_grad_enabled() else _TrainableHead
    with torch.autocast(kind, enabled=False):
        logps, entropy, best = function.apply(  # type: ignore[no-untyped-call]
            hidden.to(dtype), targets, weight, bias, transform, want, chunk_tokens
        )
    return TokenScores(logps, entropy if entropies else None, best if predictions else None)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which soft-maxes and sums of `dtype` numbers are done: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    return transform(nn.functional.linear(h, weight, bias).to(wide(h.dtype)))


class _FrozenHead(torch.autograd.Function):
    """Scores with a head that takes no gradient; saves one or two `[N, H]` vectors of derivatives."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform,
                want: tuple[bool, bool], chunk: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        n, slope = h.shape[0], ctx.needs_input_grad[0]
        logps, entropy, best = _empty_scores(h, want)
        d_logp = torch.empty_like(h) if slope else None
        d_entropy = torch.empty_like(h) if slope and want[0] else None
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            z = _logits(h[part], weight, bias, transform)
            log_z = z.logsumexp(-1, keepdim=True)
            logps[part] = (z.gather(-1, y[part, None]) - log_z).squeeze(-1)
            if want[1]:
                best[part] = z.argmax(-1)
            if not slope and not want[0]:
                continue
            if d_entropy is None and not want[0] and _is_plain(transform):
                # d logp / dh = W[y] - p W, without ever forming onehot(y) - p.
                p = z.sub_(log_z).exp_().to(h.dtype)
                d_logp[part] = weight[y[part]] - p @ weight  # type: ignore[index]
                continue
            log_p = z - log_z
            p = log_p.exp()
            if want[0]:
                entropy[part] = -(p * log_p).sum(-1)
            if d_entropy is not None:
                grad = transform.pull_back(-p * (log_p + entropy[part, None]), z)
                d_entropy[part] = grad.to(h.dtype) @ weight
            if d_logp is not None:
                grad = p.neg_()
                grad.scatter_add_(-1, y[part, None], torch.ones_like(log_z))
                d_logp[part] = transform.pull_back(grad, z).to(h.dtype) @ weight
        ctx.save_for_backward(*(t for t in (d_logp, d_entropy) if t is not None))
        ctx.mark_non_differentiable(best)
        if not want[0]:
            ctx.mark_non_differentiable(entropy)
        return logps, entropy, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        d_logp, *rest = ctx.saved_tensors
        grad = d_logp * g_logp[:, None].to(d_logp.dtype)
        if rest:
            grad += rest[0] * g_entropy[:, None].to(d_logp.dtype)
        return grad, None, None, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    """Scores with a head that is trained; the backward makes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform,
                want: tuple[bool, bool], chunk: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        logps, entropy, best = _empty_scores(h, want)
        log_zs = logps.new_empty(h.shape[0], 1)
        for start in range(0, h.shape[0], chunk):
            part = slice(start, start + chunk)
            z = _logits(h[part], weight, bias, transform)
            log_z = log_zs[part] = z.logsumexp(-1, keepdim=True)
            logps[part] = (z.gather(-1, y[part, None]) - log_z).squeeze(-1)
            if want[1]:
                best[part] = z.argmax(-1)
            if want[0]:
                log_p = z.sub_(log_z)
                entropy[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(h, y, weight, bias, log_zs, entropy)
        ctx.transform, ctx.want, ctx.chunk = transform, want, chunk
        ctx.mark_non_differentiable(best)
        if not want[0]:
            ctx.mark_non_differentiable(entropy)
        return logps, entropy, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        h, y, weight, bias, log_zs, entropy = ctx.saved_tensors
        d_h = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if ctx.needs_input_grad[2] else None
        d_bias = (
            torch.zeros_like(bias, dtype=wide(bias.dtype)) if bias is not None and ctx.needs_input_grad[3] else None
        )
        for start in range(0, h.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = _logits(h[part], weight, bias, ctx.transform)
            log_p = z - log_zs[part]
            p = log_p.exp()
            g = g_logp[part, None].to(p.dtype)
            grad = p * -g
            grad.scatter_add_(-1, y[part, None], g)
            if ctx.want[0]:
                grad -= g_entropy[part, None].to(p.dtype) * p * (log_p + entropy[part, None])
            grad = ctx.transform.pull_back(grad, z)
            if d_bias is not None:
                d_bias += grad.sum(0)
            small = grad.to(h.dtype)
            if d_h is not None:
                d_h[part] = small @ weight
            if d_weight is not None:
                d_weight += small.T @ h[part]
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(weight.dtype)
        return d_h, None, d_weight, d_bias, None, None, None


def _empty_scores(h: Tensor, want: tuple[bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    n, dtype = h.shape[0], wide(h.dtype)
    return (
        h.new_empty(n, dtype=dtype),
        h.new_empty(n if want[0] else 0, dtype=dtype),
        torch.empty(n if want[1] else 0, dtype=torch.int64, device=h.device),
    )


def _is_plain(transform: LogitTransform) -> bool:
    return transform.softcap is None and transform.scale == 1.0 and transform.temperature == 1.0


def _score_by_module(
    hidden: Tensor, targets: Tensor, head: nn.Module, transform: LogitTransform, want: tuple[bool, bool], chunk: int
) -> TokenScores:
    def score(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = head(h)
        log_p = transform(raw.to(wide(raw.dtype))).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if want[0] else log_p.new_empty(0)
        best = log_p.argmax(-1) if want[1] else y.new_empty(0)
        return log_p.gather(-1, y[:, None]).squeeze(-1), entropy, best

    run: Callable[[Tensor, Tensor], Any] = score
    if torch.is_grad_enabled():
        run = partial(checkpoint, score, use_reentrant=False)
    starts = range(0, max(hidden.shape[0], 1), chunk)
    parts = [run(hidden[s : s + chunk], targets[s : s + chunk]) for s in starts]
    logps, entropy, best = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenScores(logps, entropy if want[0] else None, best if want[1] else None)
