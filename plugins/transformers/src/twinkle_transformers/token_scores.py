"""Scores of tokens at the trained positions, from hidden states or logits; what a forward must compute for them."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import ArgumentError
from twinkle.loss import FusedLoss, HeadProduct
from twinkle_torch.head import (
    CHUNK_TOKENS,
    LogitTransform,
    TokenScores,
    is_plain,
    product_of,
    score_tokens,
    top_of,
    wide,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a forward must compute beside `logps`, from the loss, the metrics and the call.

    Attributes:
        logits: whole logits.
        logps: whether log-probabilities need a gradient, where whole logits are computed.
        entropies: the entropy at each trained position.
        uniform_logps: the mean log-probability of the vocabulary at each trained position.
        predictions: the most probable token at each trained position.
        top: how many of the most probable tokens at each trained position.
        embeddings: one vector a row, and nothing else.
        skip_weight_zero: positions with `loss_scale` 0 need no scores.
        chunk_tokens: number of positions whose logits exist at the same time; None is the default of the head.
        softcap: cap of the logits that the loss expects; None is any.
        fuse: computes the loss from the product of hidden states and head, or returns None.
    """

    logits: bool = False
    logps: bool = True
    entropies: bool = False
    uniform_logps: bool = False
    predictions: bool = False
    top: int = 0
    embeddings: bool = False
    skip_weight_zero: bool = False
    chunk_tokens: int | None = None
    softcap: float | None = None
    fuse: Callable[[HeadProduct], FusedLoss | None] | None = None


IGNORE = -100


def has_targets(labels: Any) -> TypeGuard[Tensor]:
    """Return whether `labels` are target tokens, int64 `[B, T]` or `[B, T, K]`, and not numbers of whole rows."""
    return isinstance(labels, Tensor) and labels.ndim in (2, 3) and not labels.is_floating_point()


def targets_at(labels: Tensor, places: Tensor) -> Tensor:
    """Return the targets `[N]` (or `[N, K]`) at indices of the flattened batch; token 0 replaces ignored targets."""
    return labels.reshape(-1, *labels.shape[2:])[places].clamp(min=0)


def check_top(needs: Needs, scored: bool) -> None:
    """Refuse a request for the most probable tokens where no position is scored.

    Raises:
        ArgumentError: `scored` is False, and `needs.top` is not 0.
    """
    if needs.top and not scored:
        raise ArgumentError(
            "topk_logprobs requires positions with a label, and there are none; give rows with `labels` (one "
            "token a position), task='causal_lm', and a model that predicts tokens"
        )


def score_hidden(
    hidden: Tensor, batch: dict[str, Any], head: nn.Module, transform: LogitTransform, needs: Needs
) -> ModelOutput:
    """Score the trained positions without computing whole logits.

    Args:
        hidden: `[B, T, H]` last hidden states.
        batch: `labels` int64 `[B, T]` (or `[B, T, K]`) and optional `loss_scale` of that shape, on the CPU.
        head: the output projection.
        transform: transformation of the product into logits.
        needs: what to compute beside log-probabilities.
    """
    labels, device = batch["labels"], hidden.device
    chosen = trained_places(batch, needs)
    targets, where = targets_at(labels, chosen).to(device), chosen.to(device)
    rows = hidden.reshape(-1, hidden.shape[-1])[where]
    if (
        needs.fuse is not None
        and labels.ndim == 2
        and (outputs := _fused(rows, targets, chosen, batch, head, transform, needs)) is not None
    ):
        return outputs
    scores = score_tokens(
        rows,
        targets,
        head,
        transform=transform,
        entropies=needs.entropies,
        uniform_logps=needs.uniform_logps,
        predictions=needs.predictions,
        top=needs.top,
        chunk_tokens=needs.chunk_tokens or CHUNK_TOKENS,
    )
    return scatter_scores(labels, where, scores)


def score_logits(logits: Tensor, batch: dict[str, Any], needs: Needs) -> ModelOutput:
    """Score the trained positions of whole logits `[B, T, V]`; the rest is as in `score_hidden`.

    Scores without a gradient are computed in chunks of positions.
    """
    labels = batch["labels"]
    chosen = trained_places(batch, needs)
    targets, where = targets_at(labels, chosen).to(logits.device), chosen.to(logits.device)
    flat = logits.reshape(-1, logits.shape[-1])
    differentiated = needs.logps or needs.entropies or needs.uniform_logps
    if differentiated and torch.is_grad_enabled() and logits.requires_grad:
        return scatter_scores(labels, where, _read(flat[where], targets, needs))
    chunk = needs.chunk_tokens or CHUNK_TOKENS
    with torch.no_grad():
        pieces = [slice(start, start + chunk) for start in range(0, max(len(where), 1), chunk)]
        return scatter_scores(labels, where, _join([_read(flat[where[part]], targets[part], needs) for part in pieces]))


def _read(logits: Tensor, targets: Tensor, needs: Needs) -> TokenScores:
    """Return the scores of some positions from their logits `[N, V]`, with a graph where they have one."""
    log_p = logits.to(wide(logits.dtype)).log_softmax(-1)
    columns = targets if targets.ndim == 2 else targets[:, None]
    return TokenScores(
        log_p.gather(-1, columns).view(targets.shape),
        -(log_p.exp() * log_p).sum(-1) if needs.entropies else None,
        log_p.mean(-1) if needs.uniform_logps else None,
        log_p.argmax(-1) if needs.predictions else None,
        *(top_of(log_p, needs.top) if needs.top else ()),
    )


def _join(parts: list[TokenScores]) -> TokenScores:
    columns = [[getattr(part, field.name) for part in parts] for field in fields(TokenScores)]
    joined: list[Any] = [None if column[0] is None else torch.cat(column) for column in columns]
    return TokenScores(*joined)


def trained_places(batch: dict[str, Any], needs: Needs) -> Tensor:
    """Return the indices of the positions to score, computed on the CPU to avoid a device synchronization."""
    trained: Tensor = batch["labels"] != IGNORE
    if needs.skip_weight_zero and (weights := batch.get("loss_scale")) is not None:
        trained &= weights != 0
    if trained.ndim == 3:
        trained = trained.any(-1)
    return trained.reshape(-1).nonzero().squeeze(-1)


def _fused(
    rows: Tensor, targets: Tensor, chosen: Tensor, batch: dict[str, Any], head: nn.Module, transform: LogitTransform,
    needs: Needs,
) -> ModelOutput | None:  # fmt: skip
    """Return the outputs of a fused loss, or None if the loss or the head does not support fusing."""
    capped_late = transform.softcap is not None and transform.temperature != 1.0
    if needs.fuse is None or needs.entropies or not is_plain(head) or capped_late or not len(chosen):
        return None
    weights = batch.get("loss_scale")
    with_scale = rows if transform.factor == 1.0 else rows * transform.factor
    hidden, weight, bias = product_of(with_scale, head)
    if bias is not None and transform.factor != 1.0:
        bias = bias * transform.factor
    product = HeadProduct(
        hidden,
        targets,
        weight,
        bias,
        transform.softcap,
        None if weights is None else weights.reshape(-1)[chosen],
        needs.predictions,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        fused = needs.fuse(product)
    if fused is None:
        return None
    output: ModelOutput = {"fused_loss_sum": fused.loss_sum}
    if fused.predictions is not None:
        output["predictions"] = _place(batch["labels"].shape[:2], chosen.to(rows.device), fused.predictions, IGNORE)
    return output


def scatter_scores(labels: Tensor, where: Tensor, scores: TokenScores) -> ModelOutput:
    """Return scores of some positions as outputs `[B, T]`; `logps` have the shape of the labels.

    Args:
        labels: `[B, T]` or `[B, T, K]`, on the CPU.
        where: int64 `[N]`, indices of the positions in the flattened batch.
        scores: scores of the positions.
    """
    shape = labels.shape[:2]
    logps = _place(shape, where, scores.logps, 0.0)
    if labels.ndim == 3:
        logps = torch.where((labels != IGNORE).to(logps.device), logps, 0.0)
    output: ModelOutput = {"logps": logps}
    if scores.entropies is not None:
        output["entropies"] = _place(shape, where, scores.entropies, 0.0)
    if scores.uniform_logps is not None:
        output["uniform_logps"] = _place(shape, where, scores.uniform_logps, 0.0)
    if scores.predictions is not None:
        output["predictions"] = _place(shape, where, scores.predictions, IGNORE)
    if scores.top_logps is not None and scores.top_tokens is not None:
        output["topk_logprobs"] = _place(shape, where, scores.top_logps, 0.0)
        output["topk_indices"] = _place(shape, where, scores.top_tokens, 0)
    return output


def _place(shape: torch.Size, where: Tensor, values: Tensor, empty: float) -> Tensor:
    places = where // shape[1], where % shape[1]
    return values.new_full((*shape, *values.shape[1:]), empty).index_put(
        places, values
    )  # no view: FSDP2 hooks what a pass returns
