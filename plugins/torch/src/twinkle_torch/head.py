"""The one loss head of the house: log-probabilities of chosen tokens from hidden states, never `[tokens, vocabulary]`.

`head_gradients` has the formulas and the autograd functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinkle.errors import ArgumentError
from twinkle_torch.head_gradients import FrozenHead, TrainedHead
from twinkle_torch.head_targets import FrozenTargets
from twinkle_torch.logits import LogitTransform, Wanted, wide

__all__ = ["CHUNK_TOKENS", "LogitTransform", "TokenScores", "is_plain", "product_of", "score_tokens", "wide"]

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the head says about each position, all `[N]`.

    Attributes:
        logps: log-probability of the target, or `[N, K]` of K targets; float32 (float64 for float64 hidden states),
            with gradient.
        entropies: entropy of the distribution, with gradient, if asked for.
        uniform_logps: mean over the vocabulary of the log-probabilities, with gradient, if asked for. A target smoothed
            by e, `(1 - e) onehot(y) + e / V`, has the log-likelihood `(1 - e) logps + e uniform_logps`.
        predictions: most probable token, int64, if asked for.
        top_logps: log-probabilities `[N, k]` of the k most probable tokens, descending, if asked for.
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
        raise ArgumentError(f"the {count} most probable of {log_p.shape[-1]} tokens were asked for; ask for fewer")
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
