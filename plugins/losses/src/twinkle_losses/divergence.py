"""How far a student's distributions are from a teacher's, a few tokens at a time, with the gradient by its logits.

With s and t the probabilities of the same events and m = beta t + (1 - beta) s, the divergence of a token is a sum over
events whose derivative by log s_j is a_j (up to what all events share); by the logits it is then `a_j - s_j sum_i a_i`:

    beta = 0    KL(t || s) = sum t log(t / s)                                  a = -t
    beta = 1    KL(s || t) = sum s log(s / t)                                  a = s log(s / t)
    else        beta sum t log(t / m) + (1 - beta) sum s log(s / m)            a = (1 - beta) s log(s / m)
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle_torch.head import wide


@dataclass(frozen=True, slots=True)
class Events:
    """The events that are compared at some tokens, with the probabilities of student and teacher.

    Attributes:
        log_s: `[n, m]` log-probabilities of the student; -inf is 0.
        log_t: `[n, m]` of the teacher.
        tokens: int64 `[n, k]`, the tokens that the events are; None if they are all of the vocabulary.
        rest: whether the last event stands for all other tokens; otherwise these are ignored.
    """

    log_s: Tensor
    log_t: Tensor
    tokens: Tensor | None = None
    rest: bool = False

    def by_logits(self, by_log_s: Tensor, z: Tensor) -> Tensor:
        """Return the derivative `[n, V]` by the student's logits `z` from a `[n, m]`."""
        by_event = by_log_s - self.log_s.exp().mul_(by_log_s.sum(-1, keepdim=True))
        if self.tokens is None:
            return by_event
        if not self.rest:
            return torch.zeros_like(z).scatter_(-1, self.tokens, by_event)
        outside = self.log_s[:, -1:]
        share = (z.log_softmax(-1) - outside).exp_().masked_fill_(outside == -math.inf, 0.0)
        return share.mul_(by_event[:, -1:]).scatter_(-1, self.tokens, by_event[:, :-1])


class Teacher(Protocol):
    """The distributions of a teacher at the trained tokens of a batch."""

    def events(self, part: slice, z: Tensor) -> Events:
        """Return the events of some of the trained tokens; `z` `[n, V]` are the student's scaled logits there."""


class Divergence(torch.autograd.Function):
    """The divergence of each trained token; forward and backward see `chunk` tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, columns: Tensor, teacher: Teacher, beta: float, temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the divergences, KL(t || s) and KL(s || t), `[N]` each; the latter two have no gradient.

        Args:
            ctx: of autograd.
            logits: `[B, T, V]` of the student.
            rows: int64 `[N]`, with `columns` the trained tokens.
            columns: int64 `[N]`.
            teacher: what it thinks of these tokens.
            beta: which divergence.
            temperature: divides the student's logits.
            chunk: tokens that are compared at one time.
        """
        out = [logits.new_empty(len(rows), dtype=wide(logits.dtype)) for _ in range(3)]
        for part in _parts(len(rows), chunk):
            events = teacher.events(part, _scaled(logits, rows[part], columns[part], temperature))
            both = distances(events.log_s, events.log_t)
            mixed = jensen_shannon(events.log_s, events.log_t, beta) if 0 < beta < 1 else both[int(beta)]
            for values, found in zip(out, (mixed, *both), strict=True):
                values[part] = found
        ctx.save_for_backward(logits, rows, columns)
        ctx.teacher, ctx.beta, ctx.temperature, ctx.chunk = teacher, beta, temperature, chunk
        ctx.mark_non_differentiable(*out[1:])
        return out[0], out[1], out[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the student's logits, in their dtype."""
        logits, rows, columns = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for part in _parts(len(rows), ctx.chunk):
            where = rows[part], columns[part]
            z = _scaled(logits, *where, ctx.temperature)
            events = ctx.teacher.events(part, z)
            by_z = events.by_logits(slopes(events.log_s, events.log_t, ctx.beta), z)
            grad[where] = by_z.mul_(g[part, None] / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None, None, None


def distances(log_s: Tensor, log_t: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(t || s) and KL(s || t), `[n]` each, of log-probabilities `[n, m]`; -inf is 0."""
    between = log_t - log_s
    return _mean(log_t, between).sum(-1), -_mean(log_s, between).sum(-1)


def jensen_shannon(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence `[n]` of log-probabilities `[n, m]`, beta in (0, 1)."""
    log_m = _mixture(log_s, log_t, beta)
    return beta * _mean(log_t, log_t - log_m).sum(-1) + (1 - beta) * _mean(log_s, log_s - log_m).sum(-1)


def slopes(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return the derivatives a `[n, m]` of the divergence by the student's log-probabilities `[n, m]`."""
    if beta == 0:
        return log_t.exp().neg_()
    if beta == 1:
        return _mean(log_s, log_s - log_t)
    return _mean(log_s, log_s - _mixture(log_s, log_t, beta)).mul_(1 - beta)


def _mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))


def _mean(log_p: Tensor, values: Tensor) -> Tensor:
    """Return p times values, 0 where p is 0, also for infinite values."""
    return log_p.exp().mul_(values).masked_fill_(log_p == -math.inf, 0.0)


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def _scaled(logits: Tensor, rows: Tensor, columns: Tensor, temperature: float) -> Tensor:
    z = logits[rows, columns].to(wide(logits.dtype))
    return z if temperature == 1 else z.div_(temperature)
