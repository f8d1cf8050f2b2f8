"""The loss head: log-probabilities of chosen tokens from hidden states, without building `[tokens, vocabulary]`.

There are two autograd functions, one for a head that is frozen and one for a head that is trained, and a variant with
several targets per position: one soft-max, K log-probabilities. A model may transform its logits before the soft-max.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from twinkle.errors import ArgumentError

__all__ = [
    "CHUNK_TOKENS",
    "LogitTransform",
    "TokenScores",
    "is_plain",
    "product_of",
    "score_tokens",
    "transform_of",
    "wide",
]
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to the product of hidden states and head: `softcap(z * scale) / temperature`.

    Attributes:
        scale: factor on the raw logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: c in `c * tanh(z / c)` (Gemma 2, arXiv:2408.00118, section 2); None is off.
        temperature: temperature of the distribution whose log-probabilities are computed.
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

    def apply_(self, raw: Tensor) -> Tensor:
        """Transform `raw` in place, for tensors that no graph needs."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw if self.temperature == 1.0 else raw.div_(self.temperature)

    @property
    def factor(self) -> float:
        """The constant part of d z / d raw."""
        return self.scale / self.temperature

    def bend(self, z: Tensor) -> Tensor | None:
        """Return the part of d z / d raw that depends on the logits, `1 - tanh^2`, in z's shape; None is 1."""
        if self.softcap is None:
            return None
        capped = z * (self.temperature / self.softcap)
        return capped.square_().neg_().add_(1.0)


def transform_of(config: Any) -> LogitTransform:
    """Return the transform of logits that a transformers text configuration defines.

    Args:
        config: with `logit_scale` (Cohere), `logits_scaling` (Granite; a divisor) or `final_logit_softcapping` (Gemma
            2), any of them absent or None.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale = scale / divisor
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to compute in addition to the log-probabilities of the targets."""

    entropies: bool = False
    uniform: bool = False
    predictions: bool = False
    top: int = 0
    """How many of the most probable tokens."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which soft-maxes and sums of `dtype` numbers are done: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def logits_of(h: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """Return `transform(h @ weight.T + bias)` in a wide dtype, without a graph.

    Args:
        h: `[n, H]`.
        weight: `[V, H]` of the same dtype.
        bias: `[V]` or None.
        transform: what the model does to the product.
    """
    return transform.apply_(nn.functional.linear(h, weight, bias).to(wide(h.dtype)))


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
            grad = gradient_of_logits(
                z, y[part, None], log_zs[part], g_logp[part, None], of_entropy, of_uniform, ctx.transform
            )
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
        """Return the requested values, in the order of the scores."""
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


def gradient_of_logits(
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


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The results of the head for each position, all `[N]`.

    Attributes:
        logps: log-probability of the target, or `[N, K]` of K targets; float32 (float64 for float64 hidden states),
            with gradient.
        entropies: entropy of the distribution, with gradient, if requested.
        uniform_logps: mean over the vocabulary of the log-probabilities, with gradient, if requested. A target smoothed
            by e, `(1 - e) onehot(y) + e / V`, has the log-likelihood `(1 - e) logps + e uniform_logps`.
        predictions: most probable token, int64, if requested.
        top_logps: log-probabilities `[N, k]` of the k most probable tokens, descending, if requested.
        top_tokens: these tokens, int64 `[N, k]`.
    """

    logps: Tensor
    entropies: Tensor | None = None
    uniform_logps: Tensor | None = None
    predictions: Tensor | None = None
    top_logps: Tensor | None = None
    top_tokens: Tensor | None = None


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Module,
    *,
    transform: LogitTransform | None = None,
    entropies: bool = False,
    uniform_logps: bool = False,
    predictions: bool = False,
    top: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Score `targets` under `softmax(transform(head(hidden)))`.

    Args:
        hidden: `[N, H]` last hidden states of the positions to score.
        targets: int64 `[N]`, each in `[0, V)`; or `[N, K]`, several for each position.
        head: the output projection. A plain `nn.Linear` takes the fast paths; anything else (an adapter on the head)
            is called chunk by chunk and recomputed in the backward.
        transform: what the model does to the logits.
        entropies: also compute entropies.
        uniform_logps: also compute the mean log-probability of the whole vocabulary.
        predictions: also compute the most probable token.
        top: also find so many of the most probable tokens.
        chunk_tokens: positions whose logits exist at one time. A plain head needs at most `2 * chunk_tokens * V`
            numbers of float32 for logits, 4 of them with entropies or a soft cap.

    Under autocast the products run in autocast's dtype; soft-maxes are always at least float32.

    Raises:
        ArgumentError: `chunk_tokens` is not a whole number of at least 1, or `top` is more than there are tokens.
    """
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise ArgumentError(f"score_tokens: chunk_tokens={chunk_tokens!r}; it must be a whole number of at least 1")
    transform = transform or LogitTransform()
    want = Wanted(entropies, uniform_logps, predictions, top)
    if top or not is_plain(head):
        return _score_by_module(hidden, targets, head, transform, want, chunk_tokens)
    frozen = not any(parameter.requires_grad for parameter in head.parameters())
    if targets.dim() == 2 and (want != Wanted() or (torch.is_grad_enabled() and not frozen)):
        return _score_by_module(hidden, targets, head, transform, want, chunk_tokens)
    hidden, weight, bias = product_of(hidden, head)
    if targets.dim() == 2:
        with torch.autocast(hidden.device.type, enabled=False):
            logps = FrozenTargets.apply(  # type: ignore[no-untyped-call]
                hidden, targets, weight, bias, transform, chunk_tokens
            )
        return TokenScores(logps)
    function = FrozenHead if frozen or not torch.is_grad_enabled() else TrainedHead
    with torch.autocast(hidden.device.type, enabled=False):
        scores = function.apply(  # type: ignore[no-untyped-call]
            hidden, targets, weight, bias, transform, want, chunk_tokens
        )
    return _asked_for(scores, want)


def is_plain(head: nn.Module) -> bool:
    """Return whether `head` is a linear layer and nothing more: no adapter on it, no hooks."""
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def product_of(hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias in the dtype in which a plain head multiplies them here."""
    kind = hidden.device.type
    weight: Tensor = head.weight  # type: ignore[assignment]
    bias: Tensor | None = head.bias  # type: ignore[assignment]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _score_by_module(
    hidden: Tensor, targets: Tensor, head: nn.Module, transform: LogitTransform, want: Wanted, chunk: int
) -> TokenScores:
    def score(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        raw = head(h)
        log_p = transform(raw.to(wide(raw.dtype))).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if want.entropies else log_p.new_empty(0)
        uniform = log_p.mean(-1) if want.uniform else log_p.new_empty(0)
        best = log_p.argmax(-1) if want.predictions else y.new_empty(0)
        columns = y if y.dim() == 2 else y[:, None]
        return log_p.gather(-1, columns).view(y.shape), entropy, uniform, best, *top_of(log_p, want.top)

    run: Callable[[Tensor, Tensor], Any] = score
    if torch.is_grad_enabled():
        run = partial(checkpoint, score, use_reentrant=False)
    starts = range(0, max(hidden.shape[0], 1), chunk)
    parts = [run(hidden[s : s + chunk], targets[s : s + chunk]) for s in starts]
    return _asked_for(tuple(torch.cat(column) for column in zip(*parts, strict=True)), want)


def top_of(log_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each line of `log_p` `[N, V]`, descending, and their columns, `[N, count]` each.

    Raises:
        ArgumentError: there are not so many.
    """
    if count > log_p.shape[-1]:
        raise ArgumentError(
            f"the {count} most probable tokens were requested, but the vocabulary has {log_p.shape[-1]}; request fewer"
        )
    values, columns = log_p.topk(count, dim=-1)
    return values, columns


def _asked_for(scores: tuple[Tensor, ...], want: Wanted) -> TokenScores:
    logps, entropies, uniform, best, *top = scores
    return TokenScores(
        logps,
        entropies if want.entropies else None,
        uniform if want.uniform else None,
        best if want.predictions else None,
        *(top if want.top else ()),
    )
