"""What a sampling request asks of the sampler, checked; wrong values are said with their names and limits."""

import math
from typing import Any, Final

import numpy as np

from twinkle_server.engine.backend import UserError
from twinkle_server.operations import ModelInfo
from twinkle_server.payloads import Sample
from twinkle_server.wire.arrays import MAX_CELLS, Sparse
from twinkle_server.wire.codec import Array

_MOST_ALTERNATIVES: Final = 1024
"""Of one position: what is asked for beyond the token itself."""
_SEEDS: Final = 2**63


def read_sample(sample: Sample, info: ModelInfo) -> tuple[dict[str, Any], Array | Sparse | None]:
    """Return a request as the sampler's parameters, and the layout of its targets.

    Raises:
        UserError: a value makes no sense, or the context is too short.
    """
    room = _room(sample, info)
    _check_numbers(sample)
    targets = None if sample.targets is None else _targets(sample, info)
    scored = sample.prompt_logprobs or sample.topk_prompt_logprobs > 0
    if sample.prompt_logprobs_last_n is not None and not sample.prompt_logprobs:
        raise UserError("prompt_logprobs_last_n needs prompt_logprobs=True")
    seed = int(sample.seed) % _SEEDS
    params: dict[str, Any] = {
        "max_tokens": room,
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
        "prompt_temperature": 1.0,
        "prompt_targets": None if targets is None else _dense(targets).tolist(),
        "prompt_draws": sample.alternatives,
    }
    return params, targets


def _room(sample: Sample, info: ModelInfo) -> int:
    length = len(sample.tokens)
    if not length:
        raise UserError("the prompt is empty; give at least one token")
    for token in sample.tokens:
        if not 0 <= token < info.vocabulary:
            raise UserError(f"the prompt has the token {token}; the model's tokens are 0 to {info.vocabulary - 1}")
    left = info.context - length
    if left < 1:
        raise UserError(f"the prompt has {length} tokens, and the model's context is {info.context}; shorten it")
    if sample.max_tokens is None:
        return left
    if sample.max_tokens < 1:
        raise UserError(f"max_tokens is {sample.max_tokens}; it must be at least 1")
    if sample.max_tokens > left:
        raise UserError(
            f"the prompt's {length} tokens and max_tokens={sample.max_tokens} are more than the model's context of "
            f"{info.context}; ask for at most {left}"
        )
    return sample.max_tokens


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
    for name, (value, good, allowed) in checks.items():
        if not good:
            raise UserError(f"{name} is {value}; it must be {allowed}")


def _stop(stop: list[Any] | None, info: ModelInfo) -> list[Any] | None:
    if stop is None:
        return None
    for item in stop:
        if isinstance(item, str) and item:
            if not info.tokenizer:
                raise UserError(
                    f"cannot stop at the text {item[:80]!r}: the folder of the served model has no tokenizer; "
                    "give token ids in stop"
                )
            continue
        if isinstance(item, bool) or not isinstance(item, int):
            raise UserError(f"stop holds {item!r:.80}; give strings that are not empty, or token ids")
        if not 0 <= item < info.vocabulary:
            raise UserError(f"stop holds the token {item}; the model's tokens are 0 to {info.vocabulary - 1}")
    return stop


def _targets(sample: Sample, info: ModelInfo) -> Array | Sparse:
    """Return the tokens to score, dense or sparse as they came; -1 asks for nothing."""
    given = sample.targets or {}
    try:
        found = _read_targets(given)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"target_prompt_logprobs cannot be read: {error}") from error
    rows, least = found.shape[0], 0 if isinstance(found, Sparse) else -1
    values = found.values if isinstance(found, Sparse) else found
    if rows > len(sample.tokens):
        raise UserError(f"target_prompt_logprobs has {rows} rows, and the prompt {len(sample.tokens)} tokens")
    if values.size and not ((values >= min(least, -1)) & (values < info.vocabulary)).all():
        wrong = values[(values < -1) | (values >= info.vocabulary)].reshape(-1)[0]
        raise UserError(
            f"target_prompt_logprobs has the token {wrong}; give 0 to {info.vocabulary - 1}, or -1 for none"
        )
    return found


def _read_targets(given: dict[str, Any]) -> Array | Sparse:
    shape = tuple(int(size) for size in given["shape"])
    values = np.asarray(given["data"], dtype=np.int64).reshape(-1)
    if given.get("sparse_crow_indices") is not None:
        if len(shape) != 2:
            raise ValueError(f"a sparse array has two dimensions, and the shape says {list(shape)}")
        rows = np.asarray(given["sparse_crow_indices"], dtype=np.int64)
        columns = np.asarray(given["sparse_col_indices"], dtype=np.int64)
        return Sparse(values, rows, columns, (shape[0], shape[1]))
    if len(shape) not in (1, 2) or math.prod(shape) != len(values):
        raise ValueError(f"it has {len(values)} values and says the shape {list(shape)}; give one or two dimensions")
    return values.reshape(shape)


def _dense(targets: Array | Sparse) -> Array:
    """Return the targets as rows of equal length, -1 where nothing is asked; a sparse row keeps its order."""
    if not isinstance(targets, Sparse):
        return targets.reshape(len(targets), -1)
    counts = np.diff(targets.rows)
    width = int(counts.max(initial=0))
    if len(counts) * max(width, 1) > MAX_CELLS:
        raise UserError(f"target_prompt_logprobs asks for more than {MAX_CELLS} cells")
    out = np.full((len(counts), width), -1, np.int64)
    out[np.arange(width) < counts[:, None]] = targets.values
    return out


def like_targets(scores: Array, targets: Array | Sparse) -> Array | Sparse:
    """Return scores `[N, K]` of `_dense(targets)` in the layout of the question."""
    if not isinstance(targets, Sparse):
        return scores.reshape(targets.shape)
    counts = np.diff(targets.rows)
    mine = np.arange(scores.shape[1]) < counts[:, None]
    return Sparse(scores[mine].astype(np.float32), targets.rows, targets.columns, targets.shape)
