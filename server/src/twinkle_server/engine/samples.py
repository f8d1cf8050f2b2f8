"""Sampling requests: validation, submission to the engine, and serialization of their results."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.engine import AdapterSpec, AdapterVersion, Engine, SampleRequest
from twinkle.errors import CheckpointError, TwinkleError, Unsupported
from twinkle_server.engine.errors import UserError, damaged_checkpoint, public_error
from twinkle_server.operations import ModelInfo, Sample
from twinkle_server.wire import codec
from twinkle_server.wire.codec import MAX_CELLS, Array, SampledPrompt, SampledText, Sparse, TopK

KEPT_BYTES = 512 * 2**20
"""Maximum size of unused weights that stay in memory, in bytes."""
_MOST_ALTERNATIVES: Final = 1024
"""Maximum number of alternatives per position."""
_SEEDS: Final = 2**63


@dataclass(slots=True)
class Sampled:
    """A sampling request that has ended.

    Attributes:
        key: the key of the request.
        result: a serialized `SampleResponse`; None after a failure.
        error: why the request failed.
        tokens: number of sampled tokens.
    """

    key: int
    result: bytes | None
    error: Exception | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Running:
    """A request that has not ended."""

    sample: Sample
    request: SampleRequest
    targets: Array | Sparse | None
    source: Path | None


class Samples:
    """Samples from the base model and from checkpoints.

    Args:
        engine: samples.
        info: context, vocabulary and tokenizer of its model.
        versions: weights of checkpoints.
    """

    def __init__(self, engine: Engine, info: ModelInfo, versions: "Versions") -> None:
        self._engine, self._info = engine, info
        self._versions = versions
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    def submit(self, key: int, sample: Sample, source: Path | None, cache_salt: str | None = None) -> None:
        """Submit a request.

        Args:
            key: identifies the request in `decode` and `cancel`.
            sample: the request.
            source: folder of the adapter's checkpoint; None for the base model.
            cache_salt: see `Engine.submit`.

        Raises:
            UserError: the request is invalid.
        """
        params, targets = read_sample(sample, self._info)
        version = None if source is None else self._versions.take(source)
        try:
            request = self._engine.submit(sample.tokens, params, version, cache_salt=cache_salt)
        except BaseException as error:
            if source is not None:
                self._versions.release(source)
            if isinstance(error, ValueError) and not isinstance(error, TwinkleError):
                raise UserError(str(error)) from error
            raise
        self._running[key] = _Running(sample, request, targets, source)

    def collect(self) -> list[Sampled]:
        """Return the requests that have ended."""
        return [self._ended(key) for key, running in list(self._running.items()) if running.request.done]

    def cancel(self, key: int) -> None:
        """Cancel a request; no-op if it has ended."""
        if key in self._running:
            self._pop(key).request.cancel()

    def _pop(self, key: int) -> _Running:
        running = self._running.pop(key)
        if running.source is not None:
            self._versions.release(running.source)
        return running

    def _ended(self, key: int) -> Sampled:
        running = self._pop(key)
        try:
            response = running.request.result()
            return Sampled(key, _response(response, running), tokens=sum(len(s.tokens) for s in response.sequences))
        except Exception as error:
            running.request.cancel()
            return Sampled(key, None, public_error(error))


@dataclass(slots=True)
class _Version:
    """Weights, and the number of requests that use them."""

    version: AdapterVersion
    users: int = 0


class Versions:
    """Weights of checkpoints, read once and kept while a request uses them.

    Every checkpoint has its own folder, whose files never change. The weights of a checkpoint for training are read
    through a temporary adapter.

    Args:
        engine: reads them.
        kept: maximum size of unused weights that stay in memory, in bytes.
    """

    def __init__(self, engine: Engine, kept: int = KEPT_BYTES) -> None:
        self._engine, self._kept = engine, kept
        self._versions: OrderedDict[Path, _Version] = OrderedDict()
        self._restorations = 0

    def take(self, folder: Path) -> AdapterVersion:
        """Return the weights in a folder, and add one user.

        Raises:
            UserError: the checkpoint was deleted, is damaged, or belongs to another model.
        """
        if folder not in self._versions:
            self._versions[folder] = self._read(folder)
        self._versions.move_to_end(folder)
        entry = self._versions[folder]
        entry.users += 1
        return entry.version

    def release(self, folder: Path) -> None:
        """Remove one user."""
        self._versions[folder].users -= 1
        unused = [(path, entry) for path, entry in self._versions.items() if not entry.users]
        size = sum(entry.version.nbytes for _, entry in unused)
        for path, entry in unused:
            if size <= self._kept:
                return
            size -= entry.version.nbytes
            del self._versions[path]

    def __len__(self) -> int:
        return len(self._versions)

    def _read(self, folder: Path) -> _Version:
        if not folder.is_dir():
            raise UserError("the checkpoint to sample from does not exist; it was deleted or it expired")
        try:
            spec = self._engine.read_spec(folder)
            return _Version(self._engine.read_version(folder) if spec is None else self._restored(spec, folder))
        except CheckpointError as error:
            raise damaged_checkpoint(error) from error
        except Unsupported as error:
            raise UserError("cannot sample from this checkpoint: it contains more than low-rank matrices") from error

    def _restored(self, spec: AdapterSpec, folder: Path) -> AdapterVersion:
        self._restorations += 1
        ref = self._engine.add(f"checkpoint-{self._restorations}", spec)
        try:
            self._engine.restore(ref, folder)
            return self._engine.version(ref)
        finally:
            self._engine.remove(ref)


def read_sample(sample: Sample, info: ModelInfo) -> tuple[dict[str, Any], Array | Sparse | None]:
    """Return the parameters of a request for the engine, and the layout of its targets.

    Raises:
        UserError: a value is invalid, or the context is too short.
    """
    _check_lengths(sample, info)
    _check_numbers(sample)
    targets = None if sample.targets is None else _targets(sample, info)
    scored = sample.prompt_logprobs or sample.topk_prompt_logprobs > 0
    if sample.prompt_logprobs_last_n is not None and not sample.prompt_logprobs:
        raise UserError("prompt_logprobs_last_n requires prompt_logprobs=True")
    seed = int(sample.seed) % _SEEDS
    params: dict[str, Any] = {
        "max_tokens": sample.max_tokens,
        "seed": [(seed + number) % _SEEDS for number in range(sample.count)],
        "stop": _stop(sample.stop, info),
        "temperature": float(sample.temperature),
        "top_k": min(sample.top_k, info.vocabulary),
        "top_p": float(sample.top_p),
        "logprobs": 1,
        "num_samples": sample.count,
        "topk_logprobs": sample.topk_sample_logprobs,
        "prompt_logprobs": max(1, sample.topk_prompt_logprobs) if scored else None,
        "prompt_logprobs_last": sample.prompt_logprobs_last_n,
        "prompt_temperature": 1.0 if scored or targets is not None or sample.alternatives else None,
        "prompt_targets": None if targets is None else _dense(targets).tolist(),
        "prompt_draws": sample.alternatives,
        **(sample.more or {}),
    }
    try:
        SamplingParams.from_dict(params)
    except ValueError as error:
        raise UserError(str(error)) from error
    return params, targets


def _check_lengths(sample: Sample, info: ModelInfo) -> None:
    length = len(sample.tokens)
    if not length:
        raise UserError("the prompt is empty; give at least one token")
    for token in sample.tokens:
        if not 0 <= token < info.vocabulary:
            raise UserError(f"prompt tokens must be between 0 and {info.vocabulary - 1}, got {token}")
    remaining = info.context - length
    if remaining < 1:
        raise UserError(f"the prompt must have at most {info.context} tokens (the model's context), got {length}")
    if sample.max_tokens is not None and sample.max_tokens < 1:
        raise UserError(f"max_tokens must be at least 1, got {sample.max_tokens}")
    if sample.max_tokens is not None and sample.max_tokens > remaining:
        raise UserError(
            f"max_tokens must be at most {remaining} for a prompt of {length} tokens (the model's context is "
            f"{info.context}), got {sample.max_tokens}"
        )


def _check_numbers(sample: Sample) -> None:
    alternatives = f"from 0 to {_MOST_ALTERNATIVES}"
    checks: dict[str, tuple[float | None, bool, str]] = {
        "num_samples": (sample.count, sample.count >= 1, "at least 1"),
        "temperature": (
            sample.temperature, math.isfinite(sample.temperature) and sample.temperature >= 0, "finite and at least 0",
        ),
        "top_k": (sample.top_k, sample.top_k == -1 or sample.top_k >= 1, "-1 (all) or at least 1"),
        "top_p": (sample.top_p, 0 < sample.top_p <= 1, "above 0 and at most 1"),
        "prompt_logprobs_last_n": (
            sample.prompt_logprobs_last_n, (sample.prompt_logprobs_last_n or 0) >= 0, "at least 0",
        ),
    }  # fmt: skip
    for name, count in (
        ("topk_prompt_logprobs", sample.topk_prompt_logprobs),
        ("topk_sample_logprobs", sample.topk_sample_logprobs),
        ("prompt_alt_tokens_k", sample.alternatives),
    ):
        checks[name] = (count, 0 <= count <= _MOST_ALTERNATIVES, alternatives)
    for name, (value, valid, allowed) in checks.items():
        if not valid:
            raise UserError(f"{name} must be {allowed}, got {value}")


def _stop(stop: list[Any] | None, info: ModelInfo) -> list[Any] | None:
    if stop is None:
        return None
    for item in stop:
        if isinstance(item, str) and item:
            if not info.tokenizer:
                raise UserError(
                    f"cannot use the stop string {item[:80]!r}: the folder of the served model has no tokenizer; "
                    "use token ids in stop"
                )
            continue
        if isinstance(item, bool) or not isinstance(item, int):
            raise UserError(f"stop must contain non-empty strings or token ids, got {item!r:.80}")
        if not 0 <= item < info.vocabulary:
            raise UserError(f"token ids in stop must be between 0 and {info.vocabulary - 1}, got {item}")
    return stop


def _targets(sample: Sample, info: ModelInfo) -> Array | Sparse:
    """Return the tokens to score, dense or sparse as requested; -1 marks an empty cell."""
    request = sample.targets or {}
    try:
        targets = _read_targets(request)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"cannot read target_prompt_logprobs: {error}") from error
    rows, least = targets.shape[0], 0 if isinstance(targets, Sparse) else -1
    values = targets.values if isinstance(targets, Sparse) else targets
    if rows > len(sample.tokens):
        raise UserError(f"target_prompt_logprobs must have one row per prompt token ({len(sample.tokens)}), got {rows}")
    if values.size and not ((values >= min(least, -1)) & (values < info.vocabulary)).all():
        wrong = values[(values < -1) | (values >= info.vocabulary)].reshape(-1)[0]
        raise UserError(
            f"tokens in target_prompt_logprobs must be between 0 and {info.vocabulary - 1}, or -1 for none, got {wrong}"
        )
    return targets


def _read_targets(request: dict[str, Any]) -> Array | Sparse:
    shape = tuple(int(size) for size in request["shape"])
    values = np.asarray(request["data"], dtype=np.int64).reshape(-1)
    if request.get("sparse_crow_indices") is not None:
        if len(shape) != 2:
            raise ValueError(f"a sparse array must have two dimensions, got the shape {list(shape)}")
        rows = np.asarray(request["sparse_crow_indices"], dtype=np.int64)
        columns = np.asarray(request["sparse_col_indices"], dtype=np.int64)
        return Sparse(values, rows, columns, (shape[0], shape[1]))
    if len(shape) not in (1, 2) or math.prod(shape) != len(values):
        raise ValueError(f"the shape must have one or two dimensions and {len(values)} values, got {list(shape)}")
    return values.reshape(shape)


def _dense(targets: Array | Sparse) -> Array:
    """Return the targets as rows of equal length, padded with -1; a sparse row keeps its order."""
    if not isinstance(targets, Sparse):
        return targets.reshape(len(targets), -1)
    counts = np.diff(targets.rows)
    width = int(counts.max(initial=0))
    if len(counts) * max(width, 1) > MAX_CELLS:
        raise UserError(f"target_prompt_logprobs must have at most {MAX_CELLS} cells")
    out = np.full((len(counts), width), -1, np.int64)
    out[np.arange(width) < counts[:, None]] = targets.values
    return out


def like_targets(scores: Array, targets: Array | Sparse) -> Array | Sparse:
    """Return scores `[N, K]` of `_dense(targets)` in the layout of `targets`."""
    if not isinstance(targets, Sparse):
        return scores.reshape(targets.shape)
    counts = np.diff(targets.rows)
    filled = np.arange(scores.shape[1]) < counts[:, None]
    return Sparse(scores[filled].astype(np.float32), targets.rows, targets.columns, targets.shape)


def _response(response: SampleResponse, running: _Running) -> bytes:
    sample, length = running.sample, len(running.sample.tokens)
    targets = running.targets
    prompt = SampledPrompt(
        logprobs=_floats(response.prompt_logprobs or [None] * length) if _scores_prompt(sample) else None,
        topk=_topk(response.topk_prompt_logprobs or [None] * length, sample.topk_prompt_logprobs),
        hits=response.cached_tokens,
        targets=None if targets is None else like_targets(_scores(response.prompt_target_logprobs, targets), targets),
        alternatives=_drawn(response.prompt_draws, sample.alternatives, length),
    )
    return codec.sample_response([_text(sequence, sample) for sequence in response.sequences], prompt)


def _scores_prompt(sample: Sample) -> bool:
    """Return whether a request needs the log-probabilities of its prompt; the most likely tokens need them, too."""
    return sample.prompt_logprobs or sample.topk_prompt_logprobs > 0


def _text(sequence: SampledSequence, sample: Sample) -> SampledText:
    if sequence.stop_reason not in ("stop", "length") or not sequence.tokens or sequence.logprobs is None:
        raise RuntimeError(f"a sequence ended with {sequence.stop_reason!r} after {len(sequence.tokens)} tokens")
    return SampledText(
        np.asarray(sequence.tokens, np.int32),
        np.asarray([pairs[0][1] for pairs in sequence.logprobs], np.float32),
        "stop" if sequence.stop_reason == "stop" else "length",
        _topk(sequence.topk_logprobs or [], sample.topk_sample_logprobs),
        None if sequence.sampled_logprobs is None else np.asarray(sequence.sampled_logprobs, np.float32),
        None if sequence.raw_logprobs is None else np.asarray(sequence.raw_logprobs, np.float32),
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


def _scores(values: Sequence[Sequence[float | None]] | None, targets: Array | Sparse) -> Array:
    rows = targets.shape[0]
    if values is None or len(values) != rows:
        raise RuntimeError(f"expected {rows} rows of target log-probabilities, got {len(values or [])}")
    return np.asarray([[np.nan if v is None else v for v in row] for row in values], np.float32).reshape(rows, -1)


def _drawn(rows: Sequence[Sequence[tuple[int, float]]] | None, count: int, length: int) -> tuple[Array, Array] | None:
    if not count:
        return None
    if rows is None or len(rows) != length - 1:
        raise RuntimeError(f"expected {length - 1} rows of alternatives, got {len(rows or [])}")
    tokens = np.asarray([[pair[0] for pair in row] for row in rows], np.int64).reshape(length - 1, count)
    logprobs = np.asarray([[pair[1] for pair in row] for row in rows], np.float32).reshape(length - 1, count)
    return tokens, logprobs
