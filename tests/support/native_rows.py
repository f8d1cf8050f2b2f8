"""Rows and adapters of the tests of the native protocol."""

from typing import Any

import numpy as np

CONFIG = {"r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": "all-linear"}


def rows(seed: int, *lengths: int) -> list[dict[str, Any]]:
    """Return rows of random tokens, each the label of the one before; the first two of a row are not trained."""
    draw = np.random.default_rng(seed)
    made = []
    for length in lengths:
        tokens = draw.integers(5, 200, length + 1)
        labels = np.concatenate([[-100, -100], tokens[3:-1], [-100]])
        made.append({"input_ids": tokens[:-1].tolist(), "labels": labels.tolist()})
    return made
