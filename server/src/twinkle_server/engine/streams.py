"""Requests whose tokens are sent while they are sampled, from a checkpoint or from the present weights of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.data_format import SamplingParams
from twinkle.engine import AdapterVersion, Engine, SampleRequest
from twinkle.errors import Unsupported
from twinkle_server.engine.errors import UserError, public_error
from twinkle_server.engine.samples import Sampled, Versions
from twinkle_server.operations import Generate

Entry = list[Any]
"""`[key, parts, end]` of the message `TOKENS`: `parts` are `[sample, tokens, logprobs, topk, stop reason]`; `end` is
None while the request runs, and then a dict with `cached_tokens` and the requested scores of the prompt."""


@dataclass(slots=True)
class _Stream:
    """A request that has not ended.

    Attributes:
        request: of the engine.
        source: folder of its weights; None for the base model and for a model in memory.
        sent: number of tokens that were sent, by sample.
        running: samples that have not ended.
        scored: whether the scores of the prompt were requested.
    """

    request: SampleRequest
    source: Path | None
    sent: list[int]
    running: set[int]
    scored: bool


class Streams:
    """Streamed requests.

    Args:
        engine: samples.
        versions: weights of checkpoints.
        present: returns the present weights of a model, given its id.
    """

    def __init__(self, engine: Engine, versions: Versions, present: Callable[[str], AdapterVersion]) -> None:
        self._engine, self._versions, self._present = engine, versions, present
        self._running: dict[int, _Stream] = {}

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    def submit(self, key: int, generate: Generate, source: Path | None, cache_salt: str | None = None) -> None:
        """Submit a request; it keeps the weights that its model has now.

        Args:
            key: identifies the request.
            generate: the request.
            source: folder of the checkpoint, if it names one.
            cache_salt: see `Engine.submit`.

        Raises:
            UserError: the request is invalid.
        """
        try:
            params = SamplingParams.from_dict(generate.params)
        except ValueError as error:
            raise UserError(str(error)) from error
        version = None
        if source is not None:
            version = self._versions.take(source)
        elif generate.model is not None:
            version = self._present(generate.model)
        try:
            request = self._engine.submit(generate.tokens, params, version, cache_salt=cache_salt)
        except BaseException as error:
            if source is not None:
                self._versions.release(source)
            if isinstance(error, ValueError) and not isinstance(error, Unsupported):
                raise UserError(str(error)) from error
            raise
        count = params.num_samples
        scored = params.prompt_logprobs is not None
        self._running[key] = _Stream(request, source, [0] * count, set(range(count)), scored)

    def collect(self) -> tuple[list[Entry], list[Sampled]]:
        """Return what was sampled since the last call, and the requests that failed."""
        entries: list[Entry] = []
        failed: list[Sampled] = []
        for key, stream in list(self._running.items()):
            try:
                parts = _parts(stream)
                end = _end(stream) if stream.request.done else None
            except Exception as error:
                self.cancel(key)
                failed.append(Sampled(key, None, public_error(error)))
                continue
            if end is not None:
                self._pop(key)
            if parts or end is not None:
                entries.append([key, parts, end])
        return entries, failed

    def cancel(self, key: int) -> None:
        """Cancel a request; no-op if it has ended."""
        if key in self._running:
            self._pop(key).request.cancel()

    def _pop(self, key: int) -> _Stream:
        stream = self._running.pop(key)
        if stream.source is not None:
            self._versions.release(stream.source)
        return stream


def _parts(stream: _Stream) -> list[list[Any]]:
    parts = []
    for sample in sorted(stream.running):
        piece = stream.request.progress(sample, stream.sent[sample])
        if piece.tokens or piece.stop_reason is not None:
            stream.sent[sample] += len(piece.tokens)
            parts.append([sample, piece.tokens, piece.logprobs, piece.topk, piece.stop_reason])
        if piece.stop_reason is not None:
            stream.running.discard(sample)
    return parts


def _end(stream: _Stream) -> dict[str, Any]:
    if not stream.scored:
        return {"cached_tokens": stream.request.progress(0, stream.sent[0]).cached_tokens}
    response = stream.request.result()
    return {
        "cached_tokens": response.cached_tokens,
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
    }
