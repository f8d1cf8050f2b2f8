"""Sampling of tokens from logits: pure tensor functions with one row per sequence, and stateless noise."""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle_torch.head import wide


def uniform(seed: int, row: int, sample: int, position: int) -> float:
    """Return a number in [0, 1) with 48 random bits that is a function of the four arguments (BLAKE2b).

    With 48 bits the product with a float64 sum near 1 also stays below 1.
    """
    key = struct.pack("<Qqqq", seed & 0xFFFF_FFFF_FFFF_FFFF, row, sample, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "little") / 2**48


def noise_of(seed: int | Sequence[int], row: int, sample: int, position: int) -> float:
    """Return `uniform` of one seed; with a list of seeds, that of a separate request with the sample's seed."""
    return uniform(seed, row, sample, position) if isinstance(seed, int) else uniform(seed[sample], row, 0, position)


def penalize(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Make tokens that occurred less likely: positive logits are divided by `penalty`, negative ones multiplied.

    Args:
        logits_BV: `[B, V]`, raw.
        seen_BV: bool `[B, V]`, true where the token is in the prompt or the completion so far.
        penalty: above 0; 1 changes nothing (arXiv:1909.05858, section 4.1).
    """
    penalized = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized, logits_BV)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Return `log_softmax(logits / temperature)` over the last dimension, in float32 or wider; 0 counts as 1."""
    scaled = logits.to(wide(logits.dtype))
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    return scaled.log_softmax(-1)


def sorted_distribution(
    logits_BV: Tensor, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the filtered distribution, most probable token first.

    Top-k is applied first; top-p then keeps the smallest set of most probable tokens whose probability, renormalized
    over those k, reaches p (arXiv:1904.09751, section 3.1); min-p removes tokens with less than that share of the
    probability of the first (arXiv:2407.01082). At least one token is kept.

    Args:
        logits_BV: `[B, V]`.
        temperature: above 0.
        top_k: number of tokens to keep; -1 means all.
        top_p: in (0, 1].
        min_p: in [0, 1]; 0 keeps all.

    Returns:
        probabilities `[B, K]`, 0 where filtered and not renormalized after top-p, and their token ids int64 `[B, K]`.
    """
    size = logits_BV.shape[-1] if top_k == -1 else min(top_k, logits_BV.shape[-1])
    logits_BK, ids_BK = logits_BV.to(wide(logits_BV.dtype)).topk(size, dim=-1)
    probs_BK = _exact(_scaled(logits_BK, temperature).softmax(-1))
    before_BK = probs_BK.cumsum(-1) - probs_BK
    kept_BK = before_BK < top_p
    if min_p:
        kept_BK &= probs_BK >= min_p * probs_BK[:, :1]
    kept_BK[:, 0] = True
    return probs_BK * kept_BK, ids_BK


def draw(
    logits_BV: Tensor,
    noise_B: Tensor | None,
    *,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Sample one token per row by inversion of the cumulative distribution.

    Args:
        logits_BV: `[B, V]`, with any penalty applied.
        noise_B: float64 `[B]` in [0, 1): quantile of each row; None for greedy sampling.
        temperature: 0 is greedy, and the noise is not used.
        top_k: see `sorted_distribution`.
        top_p: see `sorted_distribution`.
        min_p: see `sorted_distribution`.

    Returns:
        token ids int64 `[B]`.
    """
    if temperature == 0 or noise_B is None:
        return logits_BV.argmax(-1)
    if top_k == -1 and top_p >= 1:
        # Inversion works with any order of tokens; sorting the whole vocabulary would cost more than the rest.
        probs_BV = _exact(_scaled(logits_BV.to(wide(logits_BV.dtype)), temperature).softmax(-1))
        if min_p:
            probs_BV = probs_BV * (probs_BV >= min_p * probs_BV.amax(-1, keepdim=True))
        return _invert(probs_BV, noise_B)
    probs_BK, ids_BK = sorted_distribution(logits_BV, temperature, top_k, top_p, min_p)
    return ids_BK.gather(-1, _invert(probs_BK, noise_B)[:, None]).squeeze(-1)


def draw_several(logits_BV: Tensor, noise_BN: Tensor, *, temperature: float) -> Tensor:
    """Sample several tokens per row, with replacement, from the whole vocabulary.

    Args:
        logits_BV: `[B, V]`.
        noise_BN: float64 `[B, N]` in [0, 1).
        temperature: 0 is greedy.

    Returns:
        token ids int64 `[B, N]`.
    """
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True).expand(noise_BN.shape)
    probs_BV = _exact(_scaled(logits_BV.to(wide(logits_BV.dtype)), temperature).softmax(-1))
    return _invert(probs_BV, noise_BN)


def drawn_log_probs(
    logits_BV: Tensor,
    tokens_B: Tensor,
    *,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Return each token's log-probability in the distribution that `draw` samples from; 0 at temperature 0.

    Args:
        logits_BV: `[B, V]`, with any penalty applied.
        tokens_B: int64 `[B]`, sampled with the same arguments.
        temperature: see `draw`.
        top_k: see `sorted_distribution`.
        top_p: see `sorted_distribution`.
        min_p: see `sorted_distribution`.
    """
    if temperature == 0:
        return [0.0] * len(tokens_B)
    if top_k == -1 and top_p >= 1 and not min_p:
        full: list[float] = log_probs(logits_BV, temperature).gather(-1, tokens_B[:, None]).squeeze(-1).tolist()
        return full
    probs_BK, ids_BK = sorted_distribution(logits_BV, temperature, top_k, top_p, min_p)
    token_probs_B = (probs_BK * (ids_BK == tokens_B[:, None])).sum(-1)
    logs: list[float] = (token_probs_B / probs_BK.sum(-1)).log().tolist()
    return logs


def with_logprobs(log_probs_BV: Tensor, tokens_B: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return for each row `count` pairs (token id, log-probability): the given token, then the most probable others."""
    own = log_probs_BV.gather(-1, tokens_B[:, None]).squeeze(-1).tolist()
    tokens = tokens_B.tolist()
    rows = [[pair] for pair in zip(tokens, own, strict=True)]
    if count > 1:
        for row, best in zip(rows, most_probable(log_probs_BV, count), strict=True):
            row.extend([pair for pair in best if pair[0] != row[0][0]][: count - 1])
    return rows


def most_probable(log_probs_BV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return for each row the `count` most probable tokens as (token id, log-probability), in descending order."""
    values, ids = log_probs_BV.topk(min(count, log_probs_BV.shape[-1]), dim=-1)
    return [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    # Subtract the largest logit first, so that a temperature near 0 can overflow to -inf only, never to inf.
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _exact(probs: Tensor) -> Tensor:
    """Widen before a cumulative sum over a large vocabulary; Metal devices have no float64."""
    return probs if probs.device.type == "mps" else probs.double()


def _invert(probs_BK: Tensor, noise: Tensor) -> Tensor:
    """Return the first index whose cumulative probability exceeds noise times the total; in the shape of noise."""
    cumulative = probs_BK.cumsum(-1)
    # Scale the noise by the actual total: after top-p, and by rounding, it is not exactly 1.
    goal = noise.to(cumulative).view(len(probs_BK), -1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, goal, right=True)
    return index.clamp(max=probs_BK.shape[-1] - 1).view(noise.shape)
