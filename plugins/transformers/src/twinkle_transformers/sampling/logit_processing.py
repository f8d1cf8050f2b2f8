"""Changes of logits before a token is sampled: bias, penalties, and grammars."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle.data_format import SamplingParams
from twinkle_torch.head import wide
from twinkle_transformers.sampling.grammars import mask_of
from twinkle_transformers.sampling.requests import SequenceState, changes_logits
from twinkle_transformers.sampling.sampling_ops import penalize

Row = tuple[SamplingParams, Sequence[int], SequenceState]
"""Parameters, prompt and state of a sequence."""


def processed(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the logits `[n, V]` from which the next tokens are sampled.

    In this order: the bias is added, the repetition penalty and the presence and frequency penalties are applied, and
    tokens that do not fit the grammar get -inf.

    Args:
        logits: `[n, V]`, or `[1, V]` for all n sequences; not changed.
        rows: the sequences.

    Returns:
        `logits` itself if no sequence changes them; otherwise a new tensor, in float32 or wider.

    Raises:
        ArgumentError: a grammar is too complex.
    """
    changed = [index for index, (params, _, _) in enumerate(rows) if changes_logits(params)]
    if not changed:
        return logits
    out = logits.to(wide(logits.dtype)).expand(len(rows), -1).clone()
    for index in changed:
        params, prompt, draft = rows[index]
        row = out[index]
        if params.logit_bias:
            inside = {token: bias for token, bias in params.logit_bias.items() if token < len(row)}
            row[_indices(inside, row)] += torch.tensor(list(inside.values()), dtype=row.dtype, device=row.device)
        if params.repetition_penalty != 1:
            seen = torch.zeros(len(row), dtype=torch.bool, device=row.device)
            seen[_indices([*prompt, *draft.tokens], row)] = True
            row.copy_(penalize(row, seen, params.repetition_penalty))
        if draft.tokens and (params.presence_penalty or params.frequency_penalty):
            tokens, counts = torch.unique(_indices(draft.tokens, row), return_counts=True)
            row[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    _constrain(out, rows)
    return out


def _indices(tokens: object, like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)  # type: ignore[call-overload]


def _constrain(logits: Tensor, rows: Sequence[Row]) -> None:
    """Exclude the tokens that do not fit the grammars, in place."""
    grammars = [(index, draft.watch.grammar) for index, (_, _, draft) in enumerate(rows)]
    constrained = [(index, grammar) for index, grammar in grammars if grammar is not None]
    if not constrained:
        return
    allowed = mask_of([grammar for _, grammar in constrained], logits.shape[-1], logits.device)
    for (index, _), row in zip(constrained, allowed, strict=True):
        logits[index].masked_fill_(~row, float("-inf"))
