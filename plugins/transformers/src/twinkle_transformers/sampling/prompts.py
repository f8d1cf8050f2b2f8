"""Prompts of a sampling call: checked, and scored where a request asks for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import SamplingParams
from twinkle.errors import DataError, Unsupported
from twinkle_transformers.noise import uniform
from twinkle_transformers.sampling.sampling_ops import draw_several, log_probs, most_probable

_DEFAULT_ROOM = 2048
_MEDIA = ("pixel_values", "pixel_values_videos", "images", "videos", "audios")


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


def context_of(config: Any) -> int | None:
    """Return how many positions a model was made for, or None where its configuration does not say."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text: those of the generation configuration, and the tokenizer's."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


_NOTHING = -1


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
