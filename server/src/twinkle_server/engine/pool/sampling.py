"""Sampling requests in the sampler's engine, a step at a time, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twinkle import registry
from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.errors import CapacityError
from twinkle_server.engine.backend import Sampled
from twinkle_server.engine.pool.faults import check_device, told
from twinkle_server.engine.pool.requests import like_targets, read_sample
from twinkle_server.engine.pool.sources import Sources
from twinkle_server.operations import ModelInfo
from twinkle_server.payloads import Sample
from twinkle_server.wire import codec
from twinkle_server.wire.arrays import Sparse
from twinkle_server.wire.codec import Array, SampledPrompt, SampledText, TopK


@dataclass(slots=True)
class _Waiting:
    """A request that is not over."""

    sample: Sample
    handle: Any
    targets: Array | Sparse | None
    source: Path | None


class Sampling:
    """Samples from the base model and from checkpoints; the weights of a checkpoint never change.

    Args:
        model: the model of the pool, whose weights are shared.
        info: its context and vocabulary.
        options: further arguments of the sampler.
    """

    def __init__(self, model: Any, info: ModelInfo, options: Mapping[str, Any]) -> None:
        self._sampler: Any = registry().build("TorchSampler", "sampler", model=model, **options)
        self._info = info
        self._sources = Sources(model.pool.read_version)
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def evidence(self) -> list[Any]:
        """Return what was measured about sampling step by step."""
        found: list[Any] = self._sampler.evidence()
        return found

    def submit(self, key: int, sample: Sample, source: Path | None) -> None:
        """Take a request; see `Backend.sample`."""
        params, targets = read_sample(sample, self._info)
        how: dict[str, Any] = {"use_base_model": True}
        if source is not None:
            how = {"adapter_version": self._sources.take(source)}
        try:
            handle = self._submit(sample, params, how)
        except BaseException:
            if source is not None:
                self._sources.give_back(source)
            raise
        self._waiting[key] = _Waiting(sample, handle, targets, source)

    def _submit(self, sample: Sample, params: Mapping[str, Any], how: Mapping[str, Any]) -> Any:
        row = {"input_ids": sample.tokens}
        try:
            return self._sampler.submit(row, params, **how)
        except CapacityError:
            if sample.max_tokens is not None:
                raise
            return self._sampler.submit(row, {**params, "max_tokens": None}, **how)  # as many as there is room for

    def step(self) -> list[Sampled]:
        """Take one step, and return the requests that are over; see `Backend.decode`."""
        if not self._waiting:
            return []
        try:
            moved = self._sampler.step()
        except Exception as error:
            check_device(error)
            return [self._over(key, error) for key in list(self._waiting)]
        if not moved and not any(item.handle.done for item in self._waiting.values()):
            self._wait(next(iter(self._waiting.values())).handle)
        return [self._over(key) for key, item in list(self._waiting.items()) if item.handle.done]

    @staticmethod
    def _wait(handle: Any) -> None:
        """Sample a request to its end: the model cannot run step by step."""
        try:
            handle.result()
        except Exception as error:
            check_device(error)  # else its own: `_over` tells it

    def cancel(self, key: int) -> None:
        """Drop a request; one that is not there is no error."""
        if key in self._waiting:
            self._pop(key).handle.cancel()

    def _pop(self, key: int) -> _Waiting:
        item = self._waiting.pop(key)
        if item.source is not None:
            self._sources.give_back(item.source)
        return item

    def _over(self, key: int, error: Exception | None = None) -> Sampled:
        item = self._pop(key)
        try:
            if error is not None:
                raise error
            response: SampleResponse = item.handle.result()
            return Sampled(key, _answer(response, item), tokens=sum(len(s.tokens) for s in response.sequences))
        except Exception as found:
            item.handle.cancel()
            return Sampled(key, None, told(found))


def _answer(response: SampleResponse, item: _Waiting) -> bytes:
    sample, length = item.sample, len(item.sample.tokens)
    wanted = item.targets
    prompt = SampledPrompt(
        logprobs=_floats(response.prompt_logprobs or [None] * length) if _scores_prompt(sample) else None,
        topk=_topk(response.topk_prompt_logprobs or [None] * length, sample.topk_prompt_logprobs),
        hits=response.cached_tokens,
        targets=None if wanted is None else like_targets(_scores(response.prompt_target_logprobs, wanted), wanted),
        alternatives=_drawn(response.prompt_draws, sample.alternatives, length),
    )
    return codec.sample_response([_text(sequence, sample) for sequence in response.sequences], prompt)


def _scores_prompt(sample: Sample) -> bool:
    """Return whether a request asks for the prompt's log-probabilities: to ask for the likeliest tokens does so too."""
    return sample.prompt_logprobs or sample.topk_prompt_logprobs > 0


def _text(sequence: SampledSequence, sample: Sample) -> SampledText:
    if sequence.stop_reason not in ("stop", "length") or not sequence.tokens or sequence.logprobs is None:
        raise RuntimeError(f"a sequence ended with {sequence.stop_reason!r} after {len(sequence.tokens)} tokens")
    return SampledText(
        np.asarray(sequence.tokens, np.int32),
        np.asarray([pairs[0][1] for pairs in sequence.logprobs], np.float32),
        "stop" if sequence.stop_reason == "stop" else "length",
        _topk(sequence.topk_logprobs or [], sample.topk_sample_logprobs),
    )


def _topk(rows: Sequence[Sequence[tuple[int, float]] | None], count: int) -> TopK | None:
    if not count:
        return None
    tokens = np.zeros((len(rows), count), np.int32)
    logprobs = np.full((len(rows), count), codec.EMPTY_LOGPROB, np.float32)
    for number, row in enumerate(rows):
        for place, (token, logprob) in enumerate((row or [])[:count]):
            tokens[number, place], logprobs[number, place] = token, logprob
    return TopK(tokens, logprobs)


def _floats(values: Sequence[float | None]) -> Any:
    return np.asarray([np.nan if value is None else value for value in values], np.float32)


def _scores(values: Sequence[Sequence[float | None]] | None, wanted: Array | Sparse) -> Array:
    rows = wanted.shape[0]
    if values is None or len(values) != rows:
        raise RuntimeError(f"{rows} rows of targets were asked for, and {len(values or [])} were scored")
    return np.asarray([[np.nan if v is None else v for v in row] for row in values], np.float32).reshape(rows, -1)


def _drawn(rows: Sequence[Sequence[tuple[int, float]]] | None, count: int, length: int) -> tuple[Array, Array] | None:
    if not count:
        return None
    if rows is None or len(rows) != length - 1:
        raise RuntimeError(f"{length - 1} rows of alternatives were asked for, and {len(rows or [])} were drawn")
    tokens = np.asarray([[pair[0] for pair in row] for row in rows], np.int64).reshape(length - 1, count)
    logprobs = np.asarray([[pair[1] for pair in row] for row in rows], np.float32).reshape(length - 1, count)
    return tokens, logprobs
