"""Requests of sampling: prompts and their scores, sequences while they run and what ends them, and handles."""

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
from twinkle_transformers.sampling.sampling_ops import draw_several, log_probs, most_probable

_DEFAULT_ROOM = 2048
_MEDIA = ("pixel_values", "pixel_values_videos", "images", "videos", "audios")
_NOTHING = -1
_UNFINISHED = "\ufffd"  # what a decoder shows for bytes that do not make a character yet
_PATIENCE = 16  # tokens that may wait for a character to be finished; no character has so many bytes


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
        row: its number, for errors.
        vocabulary: size of the model's embedding.

    Raises:
        DataError: there are none, or one is outside the vocabulary, or the row is a batch.
        Unsupported: it holds images, video or audio.
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


def rooms(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int | None) -> list[int]:
    """Return how many tokens each prompt may be given: `max_tokens` (None: 2048), or what the context leaves.

    Raises:
        DataError: a prompt is longer than the context, or fills it although tokens are asked for.
    """
    wanted = _DEFAULT_ROOM if max_tokens is None else max_tokens
    if context is None:
        return [wanted] * len(prompts)
    for row, ids in enumerate(prompts):
        if len(ids) > context or (wanted and len(ids) == context):
            raise DataError(
                f"row {row} has {len(ids)} tokens, the model's context {context}; shorten the prompt (max_length= of "
                "the template)"
            )
    return [min(wanted, context - len(ids)) for ids in prompts]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text: those of the generation configuration, and the tokenizer's."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


@dataclass(slots=True, eq=False)
class PromptScores:
    """Scores of one prompt. Row i of the logits stands behind its token i, at the place of token i + 1.

    Attributes:
        ids: the prompt.
        params: what is wanted.
        first: the first row that is needed; as many as the prompt has tokens where none is.
        past: the row behind the last that is needed.
        logprobs: of the prompt's tokens, None for those that are not scored.
        topk: the most probable tokens at each place.
        targets: scores of the targets, None where nothing was asked.
        draws: what was drawn at the place of each token but the first.
    """

    ids: Sequence[int]
    params: SamplingParams
    first: int = 0
    past: int = 0
    logprobs: list[float | None] | None = None
    topk: list[list[tuple[int, float]] | None] | None = None
    targets: list[list[float | None]] | None = None
    draws: list[list[tuple[int, float]]] | None = None
    _asked: Tensor | None = None
    _scored: range = range(0)

    @classmethod
    def of(
        cls, ids: Sequence[int], params: SamplingParams, row: int, vocabulary: int, *, alone: bool
    ) -> "PromptScores":
        """Return the scores of a prompt, none of them known.

        Args:
            ids: the prompt.
            params: of the request.
            row: its number, for errors.
            vocabulary: number of token ids.
            alone: nothing will be drawn, so that the prompt is scored in any case.

        Raises:
            DataError: the targets are no table of token ids that fits the prompt.
        """
        scores = cls(ids, params)
        count = len(ids)
        if params.prompt_logprobs or alone:
            last = params.prompt_logprobs_last
            scores._scored = range(0 if last is None else max(0, count - 1 - last), count - 1)
            scores.logprobs = [None] * count
            scores.topk = [None] * count if params.prompt_logprobs else None
        if params.prompt_targets is not None:
            scores._asked = _table(params.prompt_targets, row, count, vocabulary)
            scores.targets = [[None] * scores._asked.shape[1] for _ in scores._asked]
        if params.prompt_draws:
            scores.draws = [[] for _ in range(count - 1)]
        needed = [rows for rows in scores._needed() if rows]
        scores.first = min((rows.start for rows in needed), default=count)
        scores.past = max((rows.stop for rows in needed), default=count)
        return scores

    def _needed(self) -> Iterator[range]:
        yield self._scored
        if self._asked is not None and len(asked := (self._asked != _NOTHING).any(1).nonzero()):
            yield range(int(asked[0]), int(asked[-1]) + 1)
        if self.draws:
            yield range(len(self.draws))

    def write(self, start: int, logits: Tensor, seed: int | Sequence[int], row: int) -> bool:
        """Write the numbers of some rows; False, and nothing is written, if one that counts is NaN.

        Args:
            start: the first row.
            logits: `[n, V]`.
            seed: of the noise.
            row: of the request in its call, which is part of the noise.
        """
        first = max(start, self.first)
        logits = logits[first - start :]
        past = min(first + len(logits), self.past)
        if past <= first:
            return True
        own = self.params.temperature
        wanted = own if self.params.prompt_temperature is None else self.params.prompt_temperature
        table = log_probs(logits[: past - first], wanted)
        if bool(table.isnan().any()):
            return False
        rows = range(first, past)
        logits = logits[: past - first]
        self._write_tokens(_cut(rows, self._scored), table, first)
        self._write_targets(rows, table)
        if self.draws:
            places = _cut(rows, range(len(self.ids) - 1))
            drawn = logits[: len(places)]
            self._write_draws(
                places, drawn, table[: len(places)] if wanted == own else log_probs(drawn, own), seed, row
            )
        return True

    def _write_tokens(self, rows: range, table: Tensor, first: int) -> None:
        if self.logprobs is None or not rows:
            return
        table = table[rows.start - first : rows.stop - first]
        index = torch.tensor(self.ids[rows.start + 1 : rows.stop + 1], device=table.device)
        places = slice(rows.start + 1, rows.stop + 1)
        self.logprobs[places] = table.gather(-1, index[:, None]).squeeze(-1).tolist()
        if self.topk is not None and self.params.prompt_logprobs:
            self.topk[places] = most_probable(table, self.params.prompt_logprobs)

    def _write_targets(self, rows: range, table: Tensor) -> None:
        if self._asked is None or self.targets is None:
            return
        asked = self._asked[rows.start : rows.stop]
        found = table[: len(asked)].gather(-1, asked.clamp(min=0).to(table.device)).tolist()
        for place, (tokens, scores) in enumerate(zip(asked.tolist(), found, strict=True), rows.start):
            self.targets[place] = [
                None if token == _NOTHING else score for token, score in zip(tokens, scores, strict=True)
            ]

    def _write_draws(self, rows: range, logits: Tensor, table: Tensor, seed: int | Sequence[int], row: int) -> None:
        if self.draws is None or not rows:
            return
        noise = _noise(seed if isinstance(seed, int) else seed[0], row, rows, self.params.prompt_draws)
        tokens = draw_several(logits, noise, temperature=self.params.temperature)
        scores = table.gather(-1, tokens)
        for place, ids, values in zip(rows, tokens.tolist(), scores.tolist(), strict=True):
            self.draws[place] = list(zip(ids, values, strict=True))


def _noise(seed: int, row: int, places: range, count: int) -> Tensor:
    """Return float64 `[places, count]` in [0, 1) with 48 random bits, functions of seed, row, place and column."""
    index = torch.arange(places.start, places.stop)[:, None] * 2**32 + torch.arange(count)
    high, low = (uniform(seed, (row, half), index).double() for half in range(2))
    return high + low * 2.0**-24


def _cut(rows: range, bounds: range) -> range:
    return range(max(rows.start, bounds.start), min(rows.stop, bounds.stop))


def _table(targets: Any, row: int, length: int, vocabulary: int) -> Tensor:
    """Return targets as int64 `[N, K]`."""
    try:
        table = torch.as_tensor(targets)
    except (TypeError, ValueError) as error:
        raise DataError(f"row {row}: prompt_targets are no table of token ids [N, K] ({error})") from error
    if not table.numel():  # of which torch takes the type for float
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
    """What ends a sequence.

    Attributes:
        token_ids: each ends the sequence and is its last token.
        strings: each ends it where the text first contains it, special tokens included.
        tokenizer: decodes for `strings`; not needed without them.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Any = None

    def watch(self) -> "StopWatch":
        """Return a fresh watch over one sequence."""
        return StopWatch(self)

    def trim(self, tokens: Sequence[int]) -> str:
        """Return the text of a sequence without special tokens, its stop token, and all from its stop string on."""
        if tokens and tokens[-1] in self.token_ids:
            tokens = tokens[:-1]
        if self.strings:
            text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
            if (start := _first(text, self.strings)) >= 0:
                return _without_special(text[:start], self.tokenizer)
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class StopWatch:
    """Follows one sequence and says when it ends.

    Text is decoded a few tokens at a time: a token's text is the difference that it makes to the tokens before it,
    which keeps the spaces that decoders drop at the start and holds back bytes of an unfinished character.
    """

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._tail: list[int] = []
        self._known = 0
        self._text = ""
        self._reach = max((len(string) for string in rule.strings), default=0)

    def ends(self, token: int) -> bool:
        """Take the next token and return whether the sequence ends with it."""
        if token in self._rule.token_ids:
            return True
        return bool(self._rule.strings) and self._string_ends(token)

    def _string_ends(self, token: int) -> bool:
        self._tail.append(token)
        decode = self._rule.tokenizer.decode
        before = decode(self._tail[: self._known], skip_special_tokens=False)
        after = decode(self._tail, skip_special_tokens=False)
        whole = after.rstrip(_UNFINISHED)
        found = _first(self._text + whole[len(before) :], self._rule.strings) >= 0
        finished = whole == after and len(after) > len(before)
        if finished or len(self._tail) - self._known > _PATIENCE:
            # Only so much text is kept as the longest stop string may still need.
            self._text = (self._text + after[len(before) :])[-self._reach :]
            self._tail = self._tail[self._known :]
            self._known = len(self._tail)
        return found


def _first(text: str, strings: Sequence[str]) -> int:
    """Return where the earliest of `strings` begins in `text`, or -1."""
    found = [at for string in strings if (at := text.find(string)) >= 0]
    return min(found, default=-1)


def _without_special(text: str, tokenizer: Any) -> str:
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text


class TextStream:
    """Turns tokens into text piece by piece; the pieces together are what `StopRule.trim` says of all tokens."""

    def __init__(self, rule: StopRule) -> None:
        """Begin without text.

        Args:
            rule: what ends the text; it has a tokenizer.
        """
        self._rule = rule
        self._tail: list[int] = []
        self._known = 0
        self._sent = self._held = ""

    def add(self, token: int) -> str:
        """Take the next token and return the text that is certain now: no stop string can begin in it."""
        if token in self._rule.token_ids:
            return ""
        self._tail.append(token)
        before, after = self._decode(self._tail[: self._known]), self._decode(self._tail)
        finished = not after.endswith(_UNFINISHED) and len(after) > len(before)
        if not finished and len(self._tail) - self._known <= _PATIENCE:
            return ""
        self._tail = self._tail[self._known :]
        self._known = len(self._tail)
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
    """Return how many characters at the end of `text` are the beginning of `string`, or hold all of it."""
    if (at := text.find(string)) >= 0:
        return len(text) - at
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)


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
class SequenceState:
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

    drafts: list[SequenceState]


@dataclass(slots=True, eq=False)
class Place:
    """A slot of the store that is taken; whoever tidies the store changes `slot`."""

    slot: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its samples.

    Attributes:
        prompt: its tokens, its row in the call, and how many tokens each sample may have.
        params: how to draw.
        stop: what ends a sample.
        seed: of the noise; a list has one for each sample.
        version: the adapter, None for the base model.
        result: what is known so far.
        read: prompt tokens that are in the store.
        known: prompt tokens that were there of other prompts.
        places: slots that begin with the prompt.
        idle: those of them that no sample runs in.
        pending: samples that have a first token and no slot.
        error: why it failed.
        done: whether nothing more will come.
        cancelled: whether nobody wants it any more.
        stale: whether what it has in the store is not what a prompt that begins now would have.
    """

    prompt: Prompt
    params: SamplingParams
    stop: StopRule
    seed: int | Sequence[int]
    version: AdapterVersion | None
    result: Generated = field(init=False)
    read: int = 0
    known: int = 0
    places: list[Place] = field(default_factory=list)
    idle: list[Place] = field(default_factory=list)
    pending: deque[SequenceState] = field(default_factory=deque)
    error: Exception | None = None
    done: bool = False
    cancelled: bool = False
    stale: bool = False

    def __post_init__(self) -> None:
        row, room = self.prompt.row, self.prompt.room
        self.result = Generated(
            [SequenceState(row, n, room, self.stop.watch()) for n in range(self.params.num_samples)]
        )

    @property
    def reading(self) -> bool:
        """Whether some of the prompt is not in the store."""
        return self.read < len(self.prompt.ids)

    @property
    def key(self) -> str:
        """Says whose keys and values its prompt has: those of an adapter's exact weights, "" for the base model."""
        return "" if self.version is None else self.version.key

    @property
    def over(self) -> bool:
        """Whether it failed or is not wanted any more."""
        return self.cancelled or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether everything that was asked for is there."""
        if self.prompt.room == 0:
            return not self.reading
        return all(draft.reason is not None for draft in self.result.drafts)

    @property
    def most(self) -> int:
        """Tokens that one of its sequences may have in the store."""
        return len(self.prompt.ids) + max(0, self.prompt.room - 1)

    @property
    def drawing(self) -> tuple[float, ...]:
        """What decides how tokens are drawn: rows that agree in it are drawn together."""
        p = self.params
        scores = p.logprobs or 0, p.topk_logprobs, p.sampled_logprobs, p.raw_logprobs
        return p.temperature, p.top_k, p.top_p, p.repetition_penalty, *scores


@dataclass(slots=True, eq=False)
class Running:
    """A sample that has a slot.

    Attributes:
        request: whose it is.
        draft: the sample.
        place: its slot.
    """

    request: Request
    draft: SequenceState
    place: Place

    @property
    def length(self) -> int:
        """Tokens that its slot has: all but the last that was drawn, which is the next to read."""
        return len(self.request.prompt.ids) + len(self.draft.tokens) - 1


class Server(Protocol):
    """Whoever serves requests."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Work, or wait, until something is so."""

    def cancel(self, request: Request) -> None:
        """Stop a request."""


class SampleHandle:
    """One prompt that is being sampled. Whoever waits for it works for all requests of the sampler.

    May be used from several threads. A handle that nobody waits for goes on only while somebody waits for another.
    """

    def __init__(self, request: Request, server: Server, respond: Callable[[Request], SampleResponse]) -> None:
        self._request, self._server, self._respond = request, server, respond

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._request.done

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._request.error

    def tokens(self, sample: int = 0) -> Iterator[int]:
        """Yield the tokens of a sample as they are drawn.

        Args:
            sample: its number.

        Raises:
            ArgumentError: there is no such sample.
            NonFiniteError: the model's logits are NaN.
        """
        for _, tokens, _ in self._grow(sample):
            yield from tokens

    def text(self, sample: int = 0) -> Iterator[tuple[str, StopReason | None]]:
        """Yield what each token adds to the text of a sample, and why it ended with the last one (None before).

        The pieces together are `decoded` of the result: without special tokens, and nothing of a stop string.

        Args:
            sample: its number.
        """
        stream = TextStream(self._request.stop)
        for draft, tokens, reason in self._grow(sample):
            added = "".join(stream.add(token) for token in tokens)
            if reason is not None:
                yield added + stream.finish(draft.tokens), reason
            elif added:
                yield added, None

    def progress(self, sample: int = 0, start: int = 0) -> SampledTokens:
        """Return what has been drawn so far, without computing anything.

        Args:
            sample: index of the sample.
            start: number of tokens to leave out.

        Raises:
            ArgumentError: there is no such sample.
            NonFiniteError: the model's logits are NaN.
        """
        self._check()
        draft = self._draft(sample)
        tokens = draft.tokens[start:]
        logprobs = [pairs[0][1] for pairs in draft.logprobs[start : start + len(tokens)] if pairs]
        return SampledTokens(tokens, logprobs, draft.reason)

    def result(self) -> SampleResponse:
        """Wait for all samples and return them; those that were cancelled end with the reason "abort".

        Raises:
            NonFiniteError: the model's logits are NaN.
        """
        self._server.drive(lambda: self._request.done)
        self._check()
        return self._respond(self._request)

    def cancel(self) -> None:
        """Stop; what was drawn stays. Does nothing when it is done."""
        if not self._request.done:
            self._server.cancel(self._request)

    def _draft(self, sample: int) -> SequenceState:
        drafts = self._request.result.drafts
        if not 0 <= sample < len(drafts):
            raise ArgumentError(f"sample {sample} of a request with {len(drafts)} samples; they count from 0")
        return drafts[sample]

    def _grow(self, sample: int) -> Iterator[tuple[SequenceState, list[int], StopReason | None]]:
        """Yield the draft, its new tokens, and with the last of them why it ended."""
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
