"""Requests of sampling: prompts and their scores, the state of running sequences, stop rules, and handles."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from twinkle.data_format import SampleResponse, SamplingParams, StopReason
from twinkle.engine import SampledTokens
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.noise import uniform
from twinkle_transformers.sampling.grammars import Grammar
from twinkle_transformers.sampling.sampling_ops import draw_several, log_probs, most_probable

_DEFAULT_ROOM = 2048
_MEDIA = ("pixel_values", "pixel_values_videos", "images", "videos", "audios")
_NOTHING = -1
CacheKey = tuple[str, str | None]
"""Key of an adapter version ("" for the base model), and the salt of a request."""
_UNFINISHED = "\ufffd"  # decoded text of an incomplete UTF-8 character
_PATIENCE = 16  # most tokens to wait for the rest of a character; no character has as many bytes


def as_list(inputs: Any) -> list[Any]:
    """Return one row or several as a list of rows.

    Raises:
        DataError: something in it is not a dict.
    """
    rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is a {type(row).__name__}; give a trajectory or an encoded row, both dicts")
    return rows


def token_ids(feature: Mapping[str, Any], row: int, vocabulary: int) -> list[int]:
    """Return the real tokens of an encoded row, without padding.

    Args:
        feature: `input_ids` `[T]` and perhaps `attention_mask` `[T]`.
        row: its index, for errors.
        vocabulary: size of the model's embedding.

    Raises:
        DataError: the row has no tokens, has a token outside the vocabulary, or is a batch.
        Unsupported: the row has images, video or audio.
    """
    if media := [key for key in _MEDIA if feature.get(key) is not None]:
        raise Unsupported(f"row {row} holds {', '.join(media)}; TorchSampler reads text only, vLLMSampler the rest")
    ids = _plain(feature["input_ids"])
    if ids and not all(isinstance(token, int) for token in ids):
        raise DataError(
            f"row {row}: input_ids must be one sequence of integers, not a batch; give one row for each prompt"
        )
    mask = feature.get("attention_mask")
    if mask is not None:
        real = _plain(mask)
        if len(real) != len(ids):
            raise DataError(f"row {row}: attention_mask has {len(real)} values for {len(ids)} tokens")
        ids = [token for token, keep in zip(ids, real, strict=True) if keep]
    if not ids:
        raise DataError(f"row {row} has no tokens; a prompt needs at least one")
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise DataError(
            f"row {row}: token {wrong[0]} is outside the model's vocabulary of {vocabulary}; was it encoded with "
            "another model's tokenizer?"
        )
    return ids


def max_new_tokens_of(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int | None) -> list[int]:
    """Return the maximum number of new tokens of each prompt: `max_tokens` (None: 2048), limited by the context.

    Raises:
        DataError: a prompt is longer than the context, or leaves no room for new tokens.
    """
    limit = _DEFAULT_ROOM if max_tokens is None else max_tokens
    if context is None:
        return [limit] * len(prompts)
    for row, ids in enumerate(prompts):
        if len(ids) > context or (limit and len(ids) == context):
            raise DataError(
                f"row {row} has {len(ids)} tokens, the model's context {context}; shorten the prompt (max_length= of "
                "the template)"
            )
    return [min(limit, context - len(ids)) for ids in prompts]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text: those of the generation configuration, and the tokenizer's."""
    stop_ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        stop_ids.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(stop_ids)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


@dataclass(slots=True, eq=False)
class PromptScores:
    """Scores of one prompt. Row i of the logits predicts token i + 1.

    Attributes:
        ids: the prompt.
        params: sampling parameters, which select the scores.
        first: first row that is needed; the number of tokens if none is.
        past: end of the rows that are needed.
        logprobs: log-probabilities of the prompt's tokens; None for tokens that are not scored.
        topk: the most probable tokens at each position.
        targets: log-probabilities of the targets; None for targets of -1.
        draws: sampled tokens at the position of each token except the first.
    """

    ids: Sequence[int]
    params: SamplingParams
    first: int = 0
    past: int = 0
    logprobs: list[float | None] | None = None
    topk: list[list[tuple[int, float]] | None] | None = None
    targets: list[list[float | None]] | None = None
    draws: list[list[tuple[int, float]]] | None = None
    _requested_targets: Tensor | None = None
    _scored: range = range(0)

    @classmethod
    def of(
        cls, ids: Sequence[int], params: SamplingParams, row: int, vocabulary: int, *, alone: bool
    ) -> "PromptScores":
        """Return the scores of a prompt, still empty.

        Args:
            ids: the prompt.
            params: parameters of the request.
            row: its index, for errors.
            vocabulary: number of token ids.
            alone: no tokens are sampled, so that the prompt is always scored.

        Raises:
            DataError: the targets are not a table of token ids that fits the prompt.
        """
        scores = cls(ids, params)
        count = len(ids)
        if params.prompt_logprobs or alone:
            last = params.prompt_logprobs_last
            scores._scored = range(0 if last is None else max(0, count - 1 - last), count - 1)
            scores.logprobs = [None] * count
            scores.topk = [None] * count if params.prompt_logprobs else None
        if params.prompt_targets is not None:
            scores._requested_targets = _table(params.prompt_targets, row, count, vocabulary)
            scores.targets = [[None] * scores._requested_targets.shape[1] for _ in scores._requested_targets]
        if params.prompt_draws:
            scores.draws = [[] for _ in range(count - 1)]
        needed = [rows for rows in scores._needed() if rows]
        scores.first = min((rows.start for rows in needed), default=count)
        scores.past = max((rows.stop for rows in needed), default=count)
        return scores

    def _needed(self) -> Iterator[range]:
        yield self._scored
        targets = self._requested_targets
        if targets is not None and len(rows := (targets != _NOTHING).any(1).nonzero()):
            yield range(int(rows[0]), int(rows[-1]) + 1)
        if self.draws:
            yield range(len(self.draws))

    def write(self, start: int, logits: Tensor, seed: int | Sequence[int], row: int) -> bool:
        """Write the scores of some rows; returns False and writes nothing if a needed score is NaN.

        Args:
            start: index of the first row.
            logits: `[n, V]`.
            seed: seed of the noise.
            row: index of the prompt in its call, which is part of the noise.
        """
        first = max(start, self.first)
        logits = logits[first - start :]
        past = min(first + len(logits), self.past)
        if past <= first:
            return True
        sampling_temperature = self.params.temperature
        temperature = sampling_temperature if self.params.prompt_temperature is None else self.params.prompt_temperature
        table = log_probs(logits[: past - first], temperature)
        if bool(table.isnan().any()):
            return False
        rows = range(first, past)
        logits = logits[: past - first]
        self._write_tokens(_intersection(rows, self._scored), table, first)
        self._write_targets(rows, table)
        if self.draws:
            positions = _intersection(rows, range(len(self.ids) - 1))
            drawn = logits[: len(positions)]
            same = temperature == sampling_temperature
            scores = table[: len(positions)] if same else log_probs(drawn, sampling_temperature)
            self._write_draws(positions, drawn, scores, seed, row)
        return True

    def _write_tokens(self, rows: range, table: Tensor, first: int) -> None:
        if self.logprobs is None or not rows:
            return
        table = table[rows.start - first : rows.stop - first]
        index = torch.tensor(self.ids[rows.start + 1 : rows.stop + 1], device=table.device)
        positions = slice(rows.start + 1, rows.stop + 1)
        self.logprobs[positions] = table.gather(-1, index[:, None]).squeeze(-1).tolist()
        if self.topk is not None and self.params.prompt_logprobs:
            self.topk[positions] = most_probable(table, self.params.prompt_logprobs)

    def _write_targets(self, rows: range, table: Tensor) -> None:
        if self._requested_targets is None or self.targets is None:
            return
        requested = self._requested_targets[rows.start : rows.stop]
        logprobs = table[: len(requested)].gather(-1, requested.clamp(min=0).to(table.device)).tolist()
        for position, (tokens, scores) in enumerate(zip(requested.tolist(), logprobs, strict=True), rows.start):
            self.targets[position] = [
                None if token == _NOTHING else score for token, score in zip(tokens, scores, strict=True)
            ]

    def _write_draws(self, rows: range, logits: Tensor, table: Tensor, seed: int | Sequence[int], row: int) -> None:
        if self.draws is None or not rows:
            return
        noise = _noise(seed if isinstance(seed, int) else seed[0], row, rows, self.params.prompt_draws)
        tokens = draw_several(logits, noise, temperature=self.params.temperature)
        scores = table.gather(-1, tokens)
        for position, ids, values in zip(rows, tokens.tolist(), scores.tolist(), strict=True):
            self.draws[position] = list(zip(ids, values, strict=True))


def _noise(seed: int, row: int, positions: range, count: int) -> Tensor:
    """Return float64 `[positions, count]` in [0, 1) with 48 random bits, by seed, row, position and column."""
    index = torch.arange(positions.start, positions.stop)[:, None] * 2**32 + torch.arange(count)
    high, low = (uniform(seed, (row, half), index).double() for half in range(2))
    return high + low * 2.0**-24


def _intersection(rows: range, bounds: range) -> range:
    return range(max(rows.start, bounds.start), min(rows.stop, bounds.stop))


def _table(targets: Any, row: int, length: int, vocabulary: int) -> Tensor:
    """Return targets as int64 `[N, K]`."""
    try:
        table = torch.as_tensor(targets)
    except (TypeError, ValueError) as error:
        raise DataError(f"row {row}: prompt_targets must be a table of token ids [N, K] ({error})") from error
    if not table.numel():  # torch infers float for an empty list
        table = table.long() if table.ndim == 2 else table.long().reshape(0, 0)
    if table.ndim != 2 or table.is_floating_point() or len(table) > length:
        raise DataError(
            f"row {row}: prompt_targets have the shape {list(table.shape)} and the type {table.dtype}, the prompt "
            f"{length} tokens; give token ids [N, K], N at most {length}, -1 where nothing is asked"
        )
    wrong = (table < _NOTHING) | (table >= vocabulary)
    if bool(wrong.any()):
        raise DataError(
            f"row {row}: prompt_targets hold {int(table[wrong][0])}, outside the model's vocabulary of {vocabulary}"
        )
    return table.long()


@dataclass(frozen=True)
class StopRule:
    """The stop tokens and stop strings of a sequence, and the grammar that it follows to its end.

    Attributes:
        token_ids: each ends the sequence and becomes its last token.
        strings: each ends the sequence when its text, with special tokens, contains it.
        tokenizer: decodes text for `strings`; not needed without them.
        grammar: state of an empty sequence; a sequence whose grammar is complete ends.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Any = None
    grammar: Grammar | None = None

    def watch(self) -> "StopWatch":
        """Return a new watch for one sequence."""
        return StopWatch(self)

    def trim(self, tokens: Sequence[int]) -> str:
        """Return the text of a sequence, without special tokens, stop token, and everything from the stop string on."""
        if tokens and tokens[-1] in self.token_ids:
            tokens = tokens[:-1]
        if self.strings:
            text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
            if (start := _first(text, self.strings)) >= 0:
                return _without_special(text[:start], self.tokenizer)
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class StopWatch:
    """Checks after each token whether a sequence ends.

    Text is decoded incrementally: the text of a token is the difference between decoding with and without it, after a
    few tokens of context. This keeps spaces that decoders drop at the start, and delays incomplete characters.

    Attributes:
        grammar: state of the sequence in its grammar; None without one.
    """

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self.grammar = None if rule.grammar is None else rule.grammar.copy()
        self._tail: list[int] = []
        self._decoded = 0
        self._text = ""
        self._max_overlap = max((len(string) for string in rule.strings), default=0)

    def ends(self, token: int) -> bool:
        """Add the next token and return whether the sequence ends with it."""
        if token in self._rule.token_ids:
            return True
        if self.grammar is not None:
            if token in self.grammar.ends:
                return True
            self.grammar.take(token)
            if self.grammar.complete and not self._rule.token_ids:
                return True  # otherwise a stop token follows, as the model was trained
        return bool(self._rule.strings) and self._string_ends(token)

    def _string_ends(self, token: int) -> bool:
        self._tail.append(token)
        decode = self._rule.tokenizer.decode
        before = decode(self._tail[: self._decoded], skip_special_tokens=False)
        after = decode(self._tail, skip_special_tokens=False)
        whole = after.rstrip(_UNFINISHED)
        is_match = _first(self._text + whole[len(before) :], self._rule.strings) >= 0
        finished = whole == after and len(after) > len(before)
        if finished or len(self._tail) - self._decoded > _PATIENCE:
            # Keep only as much text as the longest stop string can overlap.
            self._text = (self._text + after[len(before) :])[-self._max_overlap :]
            self._tail = self._tail[self._decoded :]
            self._decoded = len(self._tail)
        return is_match


def _first(text: str, strings: Sequence[str]) -> int:
    """Return where the earliest of `strings` begins in `text`, or -1."""
    starts = [start for string in strings if (start := text.find(string)) >= 0]
    return min(starts, default=-1)


def _without_special(text: str, tokenizer: Any) -> str:
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text


class TextStream:
    """Decodes tokens incrementally; the concatenated text equals `StopRule.trim` of all tokens."""

    def __init__(self, rule: StopRule) -> None:
        """Create a stream without text.

        Args:
            rule: stop rule with a tokenizer.
        """
        self._rule = rule
        self._tail: list[int] = []
        self._decoded = 0
        self._sent = self._held = ""

    def add(self, token: int) -> str:
        """Add the next token and return the text that is final: no stop string can begin in it."""
        if token in self._rule.token_ids:
            return ""
        self._tail.append(token)
        before, after = self._decode(self._tail[: self._decoded]), self._decode(self._tail)
        finished = not after.endswith(_UNFINISHED) and len(after) > len(before)
        if not finished and len(self._tail) - self._decoded <= _PATIENCE:
            return ""
        self._tail = self._tail[self._decoded :]
        self._decoded = len(self._tail)
        text = self._held + after[len(before) :]
        certain = len(text) - max((_begun(text, string) for string in self._rule.strings), default=0)
        self._held = text[certain:]
        self._sent += text[:certain]
        return text[:certain]

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest of the text of all tokens."""
        whole = self._rule.trim(tokens)
        return whole[len(self._sent) :] if whole.startswith(self._sent) else ""

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._rule.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _begun(text: str, string: str) -> int:
    """Return how many characters at the end of `text` may belong to an occurrence of `string`."""
    if (at := text.find(string)) >= 0:
        return len(text) - at
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call.

    Attributes:
        row: its index in the call.
        ids: its token ids.
        max_new_tokens: maximum number of new tokens; 0 for all prompts of a call or for none.
        scores: its scores.
    """

    row: int
    ids: list[int]
    max_new_tokens: int
    scores: PromptScores


@dataclass(slots=True)
class SequenceState:
    """A sequence that is being sampled: prompt, tokens, requested log-probabilities, stop reason, recorded experts."""

    row: int
    sample: int
    max_new_tokens: int
    watch: StopWatch
    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    reason: StopReason | None = None
    experts: Tensor | None = None

    def take(self, token: int) -> None:
        """Append a token, and set the stop reason if the sequence ends with it."""
        self.tokens.append(token)
        if self.watch.ends(token):
            self.reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens:
            self.reason = "length"


@dataclass(slots=True)
class Generated:
    """All samples of one prompt; scores of the prompt are in `Prompt.scores`."""

    drafts: list[SequenceState]


def changes_logits(params: SamplingParams) -> bool:
    """Return whether bias, penalties or a grammar change the logits of requests with these parameters."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1
    return any(penalties) or bool(params.logit_bias) or params.structured_outputs is not None


@dataclass(slots=True, eq=False)
class CacheSlot:
    """An allocated slot of the KV cache; compaction of the cache changes its `index`."""

    index: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its samples.

    Attributes:
        prompt: its tokens, its row in the call, and how many tokens each sample may have.
        params: sampling parameters.
        stop: stop rule.
        seed: seed of the noise; a list has one for each sample.
        version: the adapter, None for the base model.
        cache_salt: only requests with equal salts share keys and values.
        result: the samples so far.
        read: number of prompt tokens in the KV cache.
        known: number of these that were copied from other prompts.
        slots: slots that contain the prompt.
        idle: slots of these without a running sample.
        pending: samples with a first token but without a slot.
        error: the error of a failed request.
        done: whether the result is complete.
        cancelled: whether the request was cancelled.
        changes: whether its logits are changed before a token is sampled.
        stale: whether the base model has changed since it was read, so that its keys and values cannot be shared.
    """

    prompt: Prompt
    params: SamplingParams
    stop: StopRule
    seed: int | Sequence[int]
    version: AdapterVersion | None
    cache_salt: str | None = None
    result: Generated = field(init=False)
    read: int = 0
    known: int = 0
    slots: list[CacheSlot] = field(default_factory=list)
    idle: list[CacheSlot] = field(default_factory=list)
    pending: deque[SequenceState] = field(default_factory=deque)
    error: Exception | None = None
    done: bool = False
    cancelled: bool = False
    stale: bool = False
    changes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.changes = changes_logits(self.params)
        prompt = self.prompt
        self.result = Generated(
            [
                SequenceState(prompt.row, n, prompt.max_new_tokens, self.stop.watch(), prompt.ids)
                for n in range(self.params.num_samples)
            ]
        )

    @property
    def reading(self) -> bool:
        """Whether a part of the prompt is not in the KV cache yet."""
        return self.read < len(self.prompt.ids)

    @property
    def key(self) -> CacheKey:
        """Key of what it computes; requests with equal keys can share keys and values."""
        return "" if self.version is None else self.version.key, self.cache_salt

    @property
    def over(self) -> bool:
        """Whether it failed or was cancelled."""
        return self.cancelled or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether all samples have ended, or without samples the prompt was read."""
        if self.prompt.max_new_tokens == 0:
            return not self.reading
        return all(draft.reason is not None for draft in self.result.drafts)

    @property
    def most(self) -> int:
        """Maximum number of tokens of one of its sequences in the KV cache."""
        return len(self.prompt.ids) + max(0, self.prompt.max_new_tokens - 1)

    @property
    def drawing(self) -> tuple[float, ...]:
        """The parameters of a sampling call; rows with equal parameters are sampled in one call."""
        p = self.params
        scores = p.logprobs or 0, p.topk_logprobs, p.sampled_logprobs, p.raw_logprobs
        return p.temperature, p.top_k, p.top_p, p.min_p, *scores


@dataclass(slots=True, eq=False)
class Running:
    """A running sample, with a slot.

    Attributes:
        request: its request.
        draft: the sample.
        slot: its slot.
    """

    request: Request
    draft: SequenceState
    slot: CacheSlot

    @property
    def length(self) -> int:
        """Number of tokens in its slot: all but the last sampled token, which is read next."""
        return len(self.request.prompt.ids) + len(self.draft.tokens) - 1


class Server(Protocol):
    """Serves requests."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Run steps, or wait for another thread that does, until the condition holds."""

    def cancel(self, request: Request) -> None:
        """Stop a request."""


class SampleHandle:
    """A prompt that is being sampled. A thread that waits for it runs the steps for all requests of the sampler.

    Handles can be used from several threads. Without a waiting thread no handle of the sampler makes progress.
    """

    def __init__(self, request: Request, server: Server, respond: Callable[[Request], SampleResponse]) -> None:
        self._request, self._server, self._respond = request, server, respond

    @property
    def done(self) -> bool:
        """Whether the result is complete."""
        return self._request.done

    @property
    def error(self) -> Exception | None:
        """The error of a failed request, else None."""
        return self._request.error

    def tokens(self, sample: int = 0) -> Iterator[int]:
        """Yield the tokens of a sample as they are sampled.

        Args:
            sample: index of the sample.

        Raises:
            ArgumentError: the sample does not exist.
            NonFiniteError: the model's logits are NaN.
        """
        for _, tokens, _ in self._grow(sample):
            yield from tokens

    def text(self, sample: int = 0) -> Iterator[tuple[str, StopReason | None]]:
        """Yield the text that each token adds to a sample, with the stop reason (None before the end).

        The concatenated pieces equal `decoded` of the result: without special tokens and without the stop string.

        Args:
            sample: index of the sample.
        """
        stream = TextStream(self._request.stop)
        for draft, tokens, reason in self._grow(sample):
            added = "".join(stream.add(token) for token in tokens)
            if reason is not None:
                yield added + stream.finish(draft.tokens), reason
            elif added:
                yield added, None

    def progress(self, sample: int = 0, start: int = 0) -> SampledTokens:
        """Return the tokens sampled so far, without computing anything.

        Args:
            sample: index of the sample.
            start: number of tokens to leave out.

        Raises:
            ArgumentError: the sample does not exist.
            NonFiniteError: the model's logits are NaN.
        """
        self._check()
        draft = self._draft(sample)
        tokens = draft.tokens[start:]
        past = start + len(tokens)
        logprobs = [pairs[0][1] for pairs in draft.logprobs[start:past] if pairs]
        return SampledTokens(tokens, logprobs, draft.reason, draft.topk[start:past], self._request.known)

    def result(self) -> SampleResponse:
        """Wait for all samples and return them; cancelled samples have the stop reason "abort".

        Raises:
            NonFiniteError: the model's logits are NaN.
        """
        self._server.drive(lambda: self._request.done)
        self._check()
        return self._respond(self._request)

    def cancel(self) -> None:
        """Stop the request; it keeps its tokens. No-op if it is done."""
        if not self._request.done:
            self._server.cancel(self._request)

    def _draft(self, sample: int) -> SequenceState:
        drafts = self._request.result.drafts
        if not 0 <= sample < len(drafts):
            raise ArgumentError(f"sample {sample} of a request with {len(drafts)} samples; they count from 0")
        return drafts[sample]

    def _grow(self, sample: int) -> Iterator[tuple[SequenceState, list[int], StopReason | None]]:
        """Yield the sample, its new tokens, and with the last of them the stop reason."""
        seen = 0

        def more() -> bool:
            draft = self._draft(sample)
            return len(draft.tokens) > seen or draft.reason is not None or self._request.done

        self._draft(sample)
        while True:
            self._server.drive(more)
            self._check()
            draft = self._draft(sample)
            reason, tokens = draft.reason, draft.tokens[seen:]
            seen += len(tokens)
            yield draft, tokens, reason
            if reason is not None:
                return

    def _check(self) -> None:
        if self._request.error is not None:
            raise self._request.error
