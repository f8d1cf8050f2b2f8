"""Scores of target tokens from whole logits, a few positions at a time, for callers that have no hidden states."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import DataError
from twinkle_torch.head import CHUNK_TOKENS, LogitTransform, gradient_of_logits, wide

_FROM_LOGITS = ("logps", "entropies", "uniform_logps")


def scores_of_logits(inputs: InputBatch, outputs: ModelOutput, name: str, ignore_index: int = -100) -> Tensor | None:
    """Return `outputs[name]`; if it is missing, compute it from `outputs["logits"]` and store it in `outputs`.

    Beside the logits and their gradient, this takes memory for `2 * CHUNK_TOKENS * V` numbers. Gradients flow to the
    logits.

    Args:
        inputs: `labels` int64 `[B, T]`, or flat `[N]`.
        outputs: outputs of a forward; `logits` `[B, T, V]`, or `[N, V]` for flat labels.
        name: `logps`, `entropies` or `uniform_logps`; other outputs are not computed.
        ignore_index: a label that is not trained, in addition to -100.

    Returns:
        float32 (float64 for float64 logits) in the shape of the labels, 0 at positions that are not trained; None
        without logits.

    Raises:
        DataError: labels and logits do not have the same positions, or a label is not in the vocabulary.
    """
    found: Tensor | None = outputs.get(name)  # type: ignore[assignment]
    logits = outputs.get("logits")
    if found is not None or logits is None or name not in _FROM_LOGITS:
        return found
    labels = inputs["labels"]
    if logits.dim() not in (2, 3) or tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise DataError(
            f"{name} are computed from logits [B, T, V] and labels [B, T], got logits {list(logits.shape)} and labels "
            f"{list(labels.shape)}; give one label (a token or -100) for each position"
        )
    shape = labels.shape
    if logits.dim() == 2:  # flat labels are those of one row
        logits, labels = logits[None], labels[None]
    rows, columns = ((labels != -100) & (labels != ignore_index)).nonzero(as_tuple=True)
    targets = labels[rows, columns]
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
        raise DataError(f"labels must be below the {logits.shape[-1]} columns of the logits, got {int(targets.max())}")
    place = rows.to(logits.device), columns.to(logits.device)
    scores = _Scores.apply(logits, targets.to(logits.device), *place, CHUNK_TOKENS)  # type: ignore[no-untyped-call]
    for key, values in zip(_FROM_LOGITS, scores, strict=True):
        if key not in outputs:
            filled = values.new_zeros(logits.shape[:2]).index_put(place, values).view(shape)
            outputs[key] = filled  # type: ignore[literal-required]
    return outputs[name]  # type: ignore[literal-required, no-any-return]


class _Scores(torch.autograd.Function):
    """Log-probability, entropy and uniform log-probability of each trained position."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, rows: Tensor, columns: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return three scores `[N]` of the positions (`rows`, `columns`) of `logits` `[B, T, V]`."""
        scores = [logits.new_empty(len(rows), dtype=wide(logits.dtype)) for _ in range(3)]
        log_zs = torch.empty_like(scores[0])
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            z = logits[rows[part], columns[part]].to(log_zs.dtype)
            log_zs[part] = z.logsumexp(-1)
            log_p = z.sub_(log_zs[part, None])
            scores[0][part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            scores[1][part] = -(log_p.exp() * log_p).sum(-1)
            scores[2][part] = log_p.mean(-1)
        ctx.save_for_backward(logits, targets, rows, columns, log_zs, scores[1])
        ctx.chunk = chunk
        return scores[0], scores[1], scores[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_uniform: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, in their dtype."""
        logits, targets, rows, columns, log_zs, entropies = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for start in range(0, len(rows), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = logits[rows[part], columns[part]].to(log_zs.dtype)
            of_entropy = g_entropy[part, None], entropies[part, None]
            by_z = gradient_of_logits(
                z, targets[part, None], log_zs[part, None], g_logp[part, None], of_entropy, g_uniform[part, None],
                LogitTransform(),
            )  # fmt: skip
            grad[rows[part], columns[part]] = by_z.to(grad.dtype)
        return grad, None, None, None, None
