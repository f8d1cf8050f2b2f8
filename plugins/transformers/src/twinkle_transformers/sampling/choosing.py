"""Draws the next tokens of sequences with parameters of their own, those with equal ones together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle_transformers.drawing import draw, log_probs, most_probable, noise_of, penalize, with_logprobs
from twinkle_transformers.generation import Draft, broken_logits, more_logprobs
from twinkle_transformers.sampling.requests import Request

Row = tuple[Request, Draft]


def choose(logits: Tensor, rows: Sequence[Row]) -> None:
    """Give each draft its next token; a request with NaN in a row gets its error instead.

    Args:
        logits: `[n, V]`; one row serves all where there are fewer than drafts.
        rows: the drafts, and whose they are.
    """
    kinds: dict[tuple[float, ...], list[int]] = {}
    for index, (request, _) in enumerate(rows):
        kinds.setdefault(request.drawing, []).append(index)
    for indices in kinds.values():
        mine = [rows[index] for index in indices]
        if len(logits) == 1:
            _choose_alike(logits.expand(len(mine), -1), mine)
        elif len(indices) == len(logits):
            _choose_alike(logits, mine)
        else:
            _choose_alike(logits[torch.tensor(indices, device=logits.device)], mine)


def _choose_alike(raw: Tensor, rows: Sequence[Row]) -> None:
    params = rows[0][0].params
    logits = raw
    if params.repetition_penalty != 1:
        logits = penalize(raw, torch.stack([_seen(*row, raw) for row in rows]), params.repetition_penalty)
    if params.temperature == 0 and logits is raw:
        highest, tokens = raw.max(-1)
    else:
        highest = raw.amax(-1)
        places = [noise_of(r.seed, d.row, d.sample, len(d.tokens)) for r, d in rows] if params.temperature else None
        noise = None if places is None else torch.tensor(places, dtype=torch.float64)
        tokens = draw(logits, noise, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    broken = highest.isnan().tolist()  # NaN is the greatest of all numbers here
    table = log_probs(raw, params.temperature) if params.logprobs or params.topk_logprobs else raw
    pairs = with_logprobs(table, tokens, params.logprobs) if params.logprobs else None
    best = most_probable(table, params.topk_logprobs) if params.topk_logprobs else None
    sampled, own = more_logprobs(logits, raw, tokens, params)
    for index, ((request, draft), token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        if broken[index]:
            request.error = request.error or broken_logits(request.prompt.row)
            continue
        if pairs is not None:
            draft.logprobs.append(pairs[index])
        if best is not None:
            draft.topk.append(best[index])
        if sampled is not None:
            draft.sampled.append(sampled[index])
        if own is not None:
            draft.raw.append(own[index])
        try:
            draft.take(token)
        except Exception as error:  # a tokenizer that fails on one request's text is no matter of the others
            request.error = request.error or error


def _seen(request: Request, draft: Draft, like: Tensor) -> Tensor:
    seen = torch.zeros(like.shape[-1], dtype=torch.bool)
    seen[torch.tensor([*request.prompt.ids, *draft.tokens])] = True
    return seen.to(like.device)
