"""Rows of uneven lengths, for tests of how a batch is cut, packed and divided."""

from collections.abc import Sequence
from typing import Any

import torch


def uneven_rows(lengths: Sequence[int], *, seed: int = 1) -> list[dict[str, Any]]:
    """Return a row of each length, of random tokens below 256; the first third of it is not trained."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(0, 256, (length,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 + 1 :] + [-100]})
    return made
