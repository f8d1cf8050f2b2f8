"""The decode loop of models that cannot run step by step: decodes the rows of one call together until all end."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import SamplingParams
from twinkle.errors import CapacityError, NonFiniteError
from twinkle_torch.segments import Segments
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.lowrank.products import Routing
from twinkle_transformers.sampling.logit_processing import processed
from twinkle_transformers.sampling.requests import Generated, Prompt, Request, SequenceState, StopRule
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sampling.sampling_ops import (
    draw,
    drawn_log_probs,
    log_probs,
    most_probable,
    noise_of,
    with_logprobs,
)
from twinkle_transformers.segments import Scope
from twinkle_transformers.sites import install

Within = Callable[[int], AbstractContextManager[Any]]
"""Returns the context of a forward with a given number of tokens."""


@dataclass(slots=True)
class Frontier:
    """Sequences that a model has read, ready for the next token.

    Attributes:
        cache: the model's key-value cache of B sequences.
        mask_BT: int64 `[B, T]`: 1 where a token is real; rows are padded on the left.
        positions_B: int64 `[B]`: position of the next token.
        logits_BV: `[B, V]`: logits of the next token.
    """

    cache: Any
    mask_BT: Tensor
    positions_B: Tensor
    logits_BV: Tensor

    def repeated(self, count: int, *, last: bool) -> "Frontier":
        """Return a frontier with each row repeated `count` times; with `last` this one may be reused."""
        cache = self.cache if last else copy.deepcopy(self.cache)
        frontier = Frontier(cache, self.mask_BT, self.positions_B, self.logits_BV)
        if count > 1:
            frontier.keep([row for row in range(len(self.mask_BT)) for _ in range(count)])
        return frontier

    def keep(self, rows: Sequence[int]) -> None:
        """Select rows in place; an index may occur several times."""
        index = torch.tensor(rows, device=self.mask_BT.device)
        self.cache.reorder_cache(index)  # the only selection that layers with a recurrent state support too
        self.mask_BT, self.positions_B = self.mask_BT[index], self.positions_B[index]
        self.logits_BV = self.logits_BV[index]


class CachedModel:
    """Runs a causal language model of transformers with its key-value cache."""

    def __init__(self, module: nn.Module, base: nn.Module, within: Within | None = None) -> None:
        """Wrap a module.

        Args:
            module: the module to call: the model, or PEFT's wrapper around it.
            base: the model itself.
            within: returns the context of a call with a number of tokens, including padding.
        """
        self.module = module
        self._within = within or (lambda tokens: nullcontext())
        embedding: Any = base.get_input_embeddings()  # type: ignore[operator]
        self.device: torch.device = embedding.weight.device
        self.vocabulary = int(embedding.weight.shape[0])
        self._last_only = "logits_to_keep" in inspect.signature(base.forward).parameters

    def prefill(self, prompts: Sequence[Sequence[int]], *, whole: bool = False) -> tuple[Frontier, Tensor]:
        """Read prompts of any lengths, padded on the left.

        Args:
            prompts: token ids, at least one per row.
            whole: compute the logits of every position.

        Returns:
            the frontier, and logits `[B, T, V]` of every position (of the last one only, T = 1, unless `whole`).
        """
        size = max(len(ids) for ids in prompts)
        ids_BT = torch.tensor([[0] * (size - len(ids)) + list(ids) for ids in prompts], device=self.device)
        mask_BT = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in prompts], device=self.device)
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        logits_BTV, cache = self._run(ids_BT, mask_BT, positions_BT, None, whole)
        return Frontier(cache, mask_BT, positions_BT[:, -1] + 1, logits_BTV[:, -1]), logits_BTV

    def step(self, frontier: Frontier, tokens_B: Tensor) -> None:
        """Read one more token per row, in place."""
        frontier.mask_BT = torch.cat([frontier.mask_BT, torch.ones_like(frontier.mask_BT[:, :1])], dim=-1)
        logits_BTV, frontier.cache = self._run(
            tokens_B[:, None], frontier.mask_BT, frontier.positions_B[:, None], frontier.cache, False
        )
        frontier.positions_B = frontier.positions_B + 1
        frontier.logits_BV = logits_BTV[:, -1]

    def _run(
        self, ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: Any, whole: bool
    ) -> tuple[Tensor, Any]:
        last = {"logits_to_keep": 1} if self._last_only and not whole else {}
        with self._within(ids_BT.numel()):
            output = self.module(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache,
                use_cache=True, **last,
            )  # fmt: skip
        logits_BTV = output.logits if whole else output.logits[:, -1:]
        return logits_BTV, output.past_key_values


@dataclass(frozen=True, slots=True)
class SequenceBytes:
    """Bytes that a decode loop needs for a sequence: `fixed + per_token * tokens`, and those of one step.

    Attributes:
        fixed: states of constant size.
        per_token: keys and values.
        per_prompt_token: activations of one layer while a prompt is read.
        step: logits, and their copies during sampling.
    """

    fixed: int
    per_token: int
    per_prompt_token: int
    step: int

    @classmethod
    def of(cls, model: CachedModel, hidden: int) -> "SequenceBytes":
        """Measure a model on two short prompts; `hidden` is the size of its hidden states."""
        sizes = [_cache_bytes(model.prefill([[1] * length])[0].cache) for length in _MEASURED]
        per_token = max(0, sizes[1] - sizes[0]) // (_MEASURED[1] - _MEASURED[0])
        # A gated layer computes 12 to 16 values per hidden value; sampling copies logits in float32 and int64.
        return cls(max(0, sizes[0] - per_token * _MEASURED[0]), per_token, 64 * hidden, 32 * model.vocabulary)

    def needed(self, tokens: int, prompt: int) -> int:
        """Return the bytes for a sequence of `tokens` tokens; keys and values are copied as they grow."""
        return 2 * (self.fixed + self.per_token * tokens) + self.per_prompt_token * prompt + self.step


_MEASURED = (4, 8)


def _cache_bytes(cache: Any) -> int:
    layers = getattr(cache, "layers", None) or [cache]
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


_SCORING_BYTES = 1 << 30  # most bytes of prompt logits at one time, unless a single prompt needs more


def generate(
    model: CachedModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    stop: StopRule,
    seed: int | Sequence[int],
    max_batch_size: int,
) -> list[Generated]:
    """Sample `params.num_samples` sequences for each prompt.

    The noise of a token is a function of (seed, row, sample, position). Therefore the samples do not depend on other
    rows or on the batch size, except for rounding in the model.

    Args:
        model: the model; the caller has put it into evaluation mode, without gradients.
        prompts: at least one token each.
        params: sampling parameters; `Prompt.max_new_tokens` and `seed` replace `max_tokens` and `seed`.
        stop: stop rule.
        seed: seed of the noise.
        max_batch_size: maximum number of sequences to decode at once.

    Returns:
        One result for each prompt, in order.

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
    """Yield batches of prompts of similar length, the longest first, so that too large a batch fails immediately."""
    most = max(1, max_batch_size // params.num_samples)
    chunk: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda prompt: -len(prompt.ids)):
        limit = most
        if any(_scored(one) for one in (*chunk, prompt)):  # then the logits of all positions are computed
            limit = min(most, max(1, _SCORING_BYTES // (4 * model.vocabulary * len((chunk or [prompt])[0].ids))))
        if len(chunk) >= limit:
            yield chunk
            chunk = []
        chunk.append(prompt)
    if chunk:
        yield chunk


def scoring_bytes(prompts: Sequence[Prompt], vocabulary: int) -> int:
    """Return the bytes for scores of prompts: the logits of a batch, and temporary tensors of one prompt."""
    if not any(map(_scored, prompts)):
        return 0
    one = 4 * vocabulary * max(len(prompt.ids) for prompt in prompts)
    return max(one, min(_SCORING_BYTES, one * len(prompts))) + 2 * one


def _scored(prompt: Prompt) -> bool:
    return prompt.scores.first < len(prompt.ids) or prompt.max_new_tokens == 0


def _generate_chunk(
    model: CachedModel,
    chunk: list[Prompt],
    params: SamplingParams,
    stop: StopRule,
    seed: int | Sequence[int],
    max_batch_size: int,
) -> dict[int, Generated]:
    scored = any(_scored(prompt) for prompt in chunk)
    frontier, logits_BTV = model.prefill([prompt.ids for prompt in chunk], whole=scored)
    found = {prompt.row: Generated([]) for prompt in chunk}
    if scored:
        for prompt, logits_TV in zip(chunk, logits_BTV, strict=True):
            _score_prompt(prompt, logits_TV, seed)
    del logits_BTV
    if chunk[0].max_new_tokens == 0:
        for prompt in chunk:
            drafts = [SequenceState(prompt.row, n, 0, stop.watch(), reason="length") for n in range(params.num_samples)]
            found[prompt.row].drafts = drafts
        return found
    at_once = max(1, max_batch_size // len(chunk))
    for first in range(0, params.num_samples, at_once):
        samples = range(first, min(first + at_once, params.num_samples))
        drafts = [
            SequenceState(prompt.row, sample, prompt.max_new_tokens, stop.watch(), prompt.ids)
            for prompt in chunk
            for sample in samples
        ]
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
    model: CachedModel,
    frontier: Frontier,
    drafts: list[SequenceState],
    params: SamplingParams,
    seed: int | Sequence[int],
) -> None:
    """Decode until every sequence has ended. Ended rows are removed once they are half of the batch."""
    rows = drafts
    while True:
        going = [index for index, draft in enumerate(rows) if draft.reason is None]
        if not going:
            return
        if 2 * len(going) <= len(rows):
            frontier.keep(going)
            rows = [rows[index] for index in going]
        tokens_B = _draw_step(frontier, rows, params, seed)
        if any(draft.reason is None for draft in rows):
            model.step(frontier, tokens_B)


def _draw_step(
    frontier: Frontier, rows: list[SequenceState], params: SamplingParams, seed: int | Sequence[int]
) -> Tensor:
    raw_BV = frontier.logits_BV
    _require_finite(raw_BV, [draft.row for draft in rows])
    for draft in rows:
        if draft.reason is not None:
            draft.watch.grammar = None  # an ended row is computed, but not used
    logits_BV = processed(raw_BV, [(params, draft.prompt, draft) for draft in rows])
    noise = [noise_of(seed, draft.row, draft.sample, len(draft.tokens)) for draft in rows]
    noise_B = torch.tensor(noise, dtype=torch.float64)
    tokens_B = draw(
        logits_BV, noise_B, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
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
    """Return `sampled_logprobs` and `raw_logprobs` of sampled tokens; None for those that are not requested.

    Args:
        logits_BV: logits that the tokens were sampled from.
        raw_BV: the same before bias, penalties and grammar.
        tokens_B: the sampled tokens.
        params: sampling parameters.
    """
    sampled = raw = None
    if params.sampled_logprobs:
        sampled = drawn_log_probs(
            logits_BV, tokens_B, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
            min_p=params.min_p,
        )  # fmt: skip
    if params.raw_logprobs:
        raw = drawn_log_probs(raw_BV, tokens_B, temperature=1.0)
    return sampled, raw


def _note(rows: list[SequenceState], table_BV: Tensor, tokens_B: Tensor, params: SamplingParams) -> None:
    """Append the log-probabilities of the last tokens to all sequences that had not ended before."""
    if params.logprobs:
        for draft, pairs in zip(rows, with_logprobs(table_BV, tokens_B, params.logprobs), strict=True):
            if len(draft.logprobs) < len(draft.tokens):
                draft.logprobs.append(pairs)
    if params.topk_logprobs:
        for draft, best in zip(rows, most_probable(table_BV, params.topk_logprobs), strict=True):
            if len(draft.topk) < len(draft.tokens):
                draft.topk.append(best)


def _require_finite(logits: Tensor, rows: list[int]) -> None:
    """Raise for NaN in any row of the first dimension; -inf is allowed, because models use it to exclude tokens."""
    broken = logits.isnan().flatten(1).any(-1)
    if bool(broken.any()):
        raise broken_logits(min(rows[index] for index in broken.nonzero().flatten().tolist()))


def broken_logits(row: int) -> NonFiniteError:
    """Return the error of a row whose logits are NaN."""
    return NonFiniteError(
        f"row {row}: the model's logits are NaN; its weights are broken (a diverged run?) or its dtype overflows"
    )


Ready = Callable[[str | None], AbstractContextManager[nn.Module]]


class WholeCalls:
    """Serves requests by the decode loop with the cache of transformers, one call at a time."""

    def __init__(
        self, base: Callable[[], Any], ready: Ready, max_batch_size: int, budget: Callable[[], int]
    ) -> None:  # fmt: skip
        """Create it without requests.

        Args:
            base: returns the Hugging Face model.
            ready: returns the context that yields the module with an adapter of PEFT active.
            max_batch_size: maximum number of sequences to decode at once, if memory allows.
            budget: returns the limit of a call, in bytes.
        """
        self._base, self._ready, self._most, self._budget = base, ready, max_batch_size, budget
        self._bytes: tuple[Any, SequenceBytes] | None = None
        self._waiting: list[tuple[Request, str | None]] = []
        self._known: Runner | None = None
        self._lock = RLock()

    @property
    def idle(self) -> bool:
        """Whether no request is waiting."""
        return not self._waiting

    def admit(self, request: Request, adapter: str | None) -> None:
        """Queue a request; a later call of `drive` or `step` serves it.

        Args:
            request: the request; those of one call have the same parameters, stop rule and seed.
            adapter: its name in PEFT, "" for the base model, None for the active one.
        """
        self._waiting.append((request, adapter))

    def cancel(self, request: Request) -> None:
        """Remove a request that has not started; a running request is not interrupted."""
        with self._lock:
            if not request.done:
                self._waiting = [pair for pair in self._waiting if pair[0] is not request]
                for draft in request.result.drafts:
                    draft.reason = draft.reason or "abort"
                request.done = True

    def drive(self, until: Callable[[], bool]) -> None:
        """Serve calls in order until the condition holds."""
        while not until():
            with self._lock:
                if not until():
                    self._next_call()

    def step(self) -> bool:
        """Serve the next call completely; False if none is waiting."""
        with self._lock:
            if self._waiting:
                self._next_call()
                return True
            return False

    def _next_call(self) -> None:
        first, adapter = self._waiting[0]
        mine = [r for r, a in self._waiting if a == adapter and _same_call(r, first)]
        try:
            with self._ready(adapter) as module:
                model = CachedModel(module, self._base(), self._within(first.version))
                prompts = [request.prompt for request in mine]
                found = generate(
                    model, prompts, first.params, stop=first.stop, seed=first.seed,
                    max_batch_size=self._at_once(model, prompts),
                )  # fmt: skip
            for request, result in zip(mine, found, strict=True):
                request.result = result
        except Exception as error:  # raised in the threads that wait for these requests
            for request in mine:
                request.error = error
        for request in mine:
            request.done = True
        self._waiting = [pair for pair in self._waiting if not pair[0].done]

    def _at_once(self, model: CachedModel, prompts: Sequence[Prompt]) -> int:
        """Return how many sequences may be decoded at once.

        Raises:
            CapacityError: a sequence does not fit into the budget.
        """
        base = self._base()
        if self._bytes is None or self._bytes[0] is not base:
            hidden = getattr(base.config.get_text_config(), "hidden_size", None) or 0
            self._bytes = base, SequenceBytes.of(model, hidden)
        longest = max(prompts, key=lambda prompt: len(prompt.ids) + prompt.max_new_tokens)
        tokens, widest = len(longest.ids) + longest.max_new_tokens, max(len(prompt.ids) for prompt in prompts)
        needed, budget = self._bytes[1].needed(tokens, widest), self._budget()
        scores = scoring_bytes(prompts, model.vocabulary)
        if needed + scores > budget:
            what = f"{tokens} tokens{' and the scores of their prompt' if scores else ''}"
            raise CapacityError(
                f"row {longest.row}: {what} need about {(needed + scores) / 2**20:.1f} MiB, but the sampler may use "
                f"{budget / 2**20:.1f} MiB; lower max_tokens or increase cache_bytes"
            )
        return min(self._most, (budget - scores) // needed)

    def _within(self, version: AdapterVersion | None) -> Within | None:
        """Return the context in which all rows use one adapter version outside of PEFT."""
        if version is None:
            return None
        runner = self._runner()
        sites = runner.sites  # installs the low-rank forward
        if head := [site for site in sites.values() if site.head]:
            # On each call, because a pool whose model is patched restores the forward of its head.
            install(head, head=True)

        def route(rows: int) -> Routing | None:
            return runner.route([version] * rows)

        return lambda tokens: Scope(_ONE, None, route(tokens), route)

    def _runner(self) -> Runner:
        model = self._base()
        if self._known is None or self._known.model is not model:
            self._known = Runner(model)
        return self._known


_ONE = Segments.of([1])
"""Placeholder; the model's own attention ignores it."""


def _same_call(one: Request, other: Request) -> bool:
    return one.stop is other.stop and one.params is other.params and one.version is other.version
