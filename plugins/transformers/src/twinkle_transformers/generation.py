"""The decode loop: prompts of uneven lengths in chunks, each read once, its samples drawn token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinkle.data_format import SamplingParams, StopReason
from twinkle.errors import NonFiniteError
from twinkle_transformers.cached import CachedModel, Frontier
from twinkle_transformers.drawing import (
    draw,
    drawn_log_probs,
    log_probs,
    most_probable,
    noise_of,
    penalize,
    with_logprobs,
)
from twinkle_transformers.prompt_scores import PromptScores
from twinkle_transformers.stopping import StopRule, StopWatch

_SCORING_BYTES = 1 << 30  # logits of whole prompts held at once, unless a single prompt needs more


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call.

    Attributes:
        row: its index in the call.
        ids: its token ids.
        room: how many tokens may be drawn; 0 for all prompts of a call or for none.
        scores: what of it is scored.
    """

    row: int
    ids: list[int]
    room: int
    scores: PromptScores


@dataclass(slots=True)
class Draft:
    """One sequence in the making: its tokens, log-probabilities and alternatives where asked for, and why it ended."""

    row: int
    sample: int
    room: int
    watch: StopWatch
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    reason: StopReason | None = None

    def take(self, token: int) -> None:
        """Append a token and note whether the sequence ends with it."""
        self.tokens.append(token)
        if self.watch.ends(token):
            self.reason = "stop"
        elif len(self.tokens) >= self.room:
            self.reason = "length"


@dataclass(slots=True)
class Generated:
    """All samples of one prompt; its scores are written where the prompt has them."""

    drafts: list[Draft]


def generate(
    model: CachedModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    stop: StopRule,
    seed: int | Sequence[int],
    max_batch_size: int,
) -> list[Generated]:
    """Draw `params.num_samples` sequences for each prompt.

    The noise of a token is a function of (seed, row, sample, position), so neither neighbours in the batch nor its
    size change what is drawn (but for the rounding of the model itself).

    Args:
        model: the model; the caller has put it into evaluation mode, without gradients.
        prompts: at least one token each.
        params: `max_tokens` and `seed` are not read here: `Prompt.room` and `seed` say the same, resolved.
        stop: what ends a sequence.
        seed: of the noise.
        max_batch_size: sequences decoded at once.

    Returns:
        one result for each prompt, in order.

    Raises:
        NonFiniteError: the model returns logits that are NaN.
    """
    found: dict[int, Generated] = {}
    for chunk in _chunks(model, prompts, params, max_batch_size):
        found |= _generate_chunk(model, chunk, params, stop, seed, max_batch_size)
    return [found[prompt.row] for prompt in prompts]


def _chunks(
    model: CachedModel, prompts: Sequence[Prompt], params: SamplingParams, max_batch_size: int
) -> Iterator[list[Prompt]]:
    """Yield prompts of similar length together, the longest first, so that too large a batch fails at once."""
    most = max(1, max_batch_size // params.num_samples)
    chunk: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda prompt: -len(prompt.ids)):
        limit = most
        if any(_scored(one) for one in (*chunk, prompt)):  # logits of all prompts are whole then
            limit = min(most, max(1, _SCORING_BYTES // (4 * model.vocabulary * len((chunk or [prompt])[0].ids))))
        if len(chunk) >= limit:
            yield chunk
            chunk = []
        chunk.append(prompt)
    if chunk:
        yield chunk


def scoring_bytes(prompts: Sequence[Prompt], vocabulary: int) -> int:
    """Return the bytes that scores of prompts need: whole logits of a chunk, and what is computed from one prompt's."""
    if not any(map(_scored, prompts)):
        return 0
    one = 4 * vocabulary * max(len(prompt.ids) for prompt in prompts)
    return max(one, min(_SCORING_BYTES, one * len(prompts))) + 2 * one


def _scored(prompt: Prompt) -> bool:
    return prompt.scores.first < len(prompt.ids) or prompt.room == 0


def _generate_chunk(
    model: CachedModel,
    chunk: list[Prompt],
    params: SamplingParams,
    stop: StopRule,
    seed: int | Sequence[int],
    max_batch_size: int,
) -> dict[int, Generated]:
    scored = any(_scored(prompt) for prompt in chunk)
    frontier, logits_BTV = model.prefill(
        [prompt.ids for prompt in chunk], whole=scored, seen=params.repetition_penalty != 1
    )
    found = {prompt.row: Generated([]) for prompt in chunk}
    if scored:
        for prompt, logits_TV in zip(chunk, logits_BTV, strict=True):
            _score_prompt(prompt, logits_TV, seed)
    del logits_BTV
    if chunk[0].room == 0:
        for prompt in chunk:
            drafts = [Draft(prompt.row, n, 0, stop.watch(), reason="length") for n in range(params.num_samples)]
            found[prompt.row].drafts = drafts
        return found
    at_once = max(1, max_batch_size // len(chunk))
    for first in range(0, params.num_samples, at_once):
        samples = range(first, min(first + at_once, params.num_samples))
        drafts = [Draft(prompt.row, sample, prompt.room, stop.watch()) for prompt in chunk for sample in samples]
        _decode(
            model, frontier.repeated(len(samples), last=samples[-1] + 1 == params.num_samples), drafts, params, seed
        )
        for draft in drafts:
            found[draft.row].drafts.append(draft)
    return found


def _score_prompt(prompt: Prompt, logits_TV: Tensor, seed: int | Sequence[int]) -> None:
    if not prompt.scores.write(0, logits_TV[-len(prompt.ids) :], seed, prompt.row):
        raise broken_logits(prompt.row)


def _decode(
    model: CachedModel, frontier: Frontier, drafts: list[Draft], params: SamplingParams, seed: int | Sequence[int]
) -> None:
    """Draw until every draft has ended. Rows that ended are dropped once they are half of the batch."""
    rows = drafts
    while True:
        going = [index for index, draft in enumerate(rows) if draft.reason is None]
        if not going:
            return
        if 2 * len(going) <= len(rows):
            frontier.keep(going)
            rows = [rows[index] for index in going]
        tokens_B = _draw_step(frontier, rows, params, seed)
        if frontier.seen_BV is not None:
            frontier.seen_BV.scatter_(-1, tokens_B[:, None], True)
        if any(draft.reason is None for draft in rows):
            model.step(frontier, tokens_B)


def _draw_step(frontier: Frontier, rows: list[Draft], params: SamplingParams, seed: int | Sequence[int]) -> Tensor:
    logits_BV = raw_BV = frontier.logits_BV
    _require_finite(raw_BV, [draft.row for draft in rows])
    if frontier.seen_BV is not None:
        logits_BV = penalize(logits_BV, frontier.seen_BV, params.repetition_penalty)
    noise = [noise_of(seed, draft.row, draft.sample, len(draft.tokens)) for draft in rows]
    noise_B = torch.tensor(noise, dtype=torch.float64)
    tokens_B = draw(logits_BV, noise_B, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    for draft, token in zip(rows, tokens_B.tolist(), strict=True):
        if draft.reason is None:
            draft.take(token)
    if params.logprobs or params.topk_logprobs:
        _note(rows, log_probs(raw_BV, params.temperature), tokens_B, params)
    sampled, raw = more_logprobs(logits_BV, raw_BV, tokens_B, params)
    for row, draft in enumerate(rows):
        for kept, values in ((draft.sampled, sampled), (draft.raw, raw)):
            if values is not None and len(kept) < len(draft.tokens):
                kept.append(values[row])
    return tokens_B


def more_logprobs(
    logits_BV: Tensor, raw_BV: Tensor, tokens_B: Tensor, params: SamplingParams
) -> tuple[list[float] | None, list[float] | None]:
    """Return `sampled_logprobs` and `raw_logprobs` of tokens that were drawn, where they were asked for.

    Args:
        logits_BV: what they were drawn from.
        raw_BV: the same before the repetition penalty.
        tokens_B: what was drawn.
        params: how.
    """
    sampled = raw = None
    if params.sampled_logprobs:
        sampled = drawn_log_probs(
            logits_BV, tokens_B, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
        )
    if params.raw_logprobs:
        raw = drawn_log_probs(raw_BV, tokens_B, temperature=1.0)
    return sampled, raw


def _note(rows: list[Draft], table_BV: Tensor, tokens_B: Tensor, params: SamplingParams) -> None:
    """Give drafts the log-probabilities of their last tokens; not those that had ended before."""
    if params.logprobs:
        for draft, pairs in zip(rows, with_logprobs(table_BV, tokens_B, params.logprobs), strict=True):
            if len(draft.logprobs) < len(draft.tokens):
                draft.logprobs.append(pairs)
    if params.topk_logprobs:
        for draft, best in zip(rows, most_probable(table_BV, params.topk_logprobs), strict=True):
            if len(draft.topk) < len(draft.tokens):
                draft.topk.append(best)


def _require_finite(logits: Tensor, rows: list[int]) -> None:
    """Refuse NaN, row by row of the first dimension; -inf is a model's way to forbid a token."""
    broken = logits.isnan().flatten(1).any(-1)
    if bool(broken.any()):
        raise broken_logits(min(rows[index] for index in broken.nonzero().flatten().tolist()))


def broken_logits(row: int) -> NonFiniteError:
    """Return the error of a row whose logits are NaN."""
    return NonFiniteError(
        f"row {row}: the model's logits are NaN; its weights are broken (a diverged run?) or its dtype overflows"
    )
