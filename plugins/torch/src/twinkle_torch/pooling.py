"""One vector for each row: the last hidden state of its last token, at length 1 where it is an embedding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def last_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the indices into `[B * T]` of the last tokens of rows, or of the sub-sequences of packed rows, in order.

    Args:
        batch: `input_ids` `[B, T]`, optional `attention_mask` `[B, T]` (0 is padding, on either side) and
            `position_ids` `[B, T]`, whose step back to a lower position begins a sub-sequence; all on the CPU.

    Returns:
        int64 `[n]`, on the CPU.
    """
    shape = batch["input_ids"].shape[:2]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    valid = torch.ones(shape, dtype=torch.bool) if mask is None or mask.ndim != 2 else mask != 0
    follows = torch.cat([valid[:, 1:], valid.new_zeros(shape[0], 1)], 1)  # whether a token follows
    after = follows.flip(1).cummax(1).values.flip(1)
    ends = valid & ~after
    if positions is not None and positions.ndim == 2:
        ends[:, :-1] |= valid[:, :-1] & valid[:, 1:] & (positions[:, 1:] <= positions[:, :-1])
    return ends.reshape(-1).nonzero().squeeze(-1)


def pool(hidden: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return the hidden states `[n, H]` of the last tokens of `hidden` `[B, T, H]`; n is B where no row is packed."""
    return hidden.reshape(-1, hidden.shape[-1])[last_tokens(batch).to(hidden.device)]


def embed(hidden: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return `pool(hidden, batch)` at length 1 (L2), at least float32, with graph."""
    pooled = pool(hidden, batch)
    return nn.functional.normalize(pooled.to(torch.promote_types(pooled.dtype, torch.float32)), dim=-1)
