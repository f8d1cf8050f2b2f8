"""From the outputs of parts, padded as losses see them, to one output for each row of an operation."""

from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import ModelOutput
from twinkle_transformers.pool.work import Work


def by_row(work: Work) -> list[ModelOutput]:
    """Return the outputs of an operation that is done, row by row, without padding."""
    found: list[ModelOutput] = []
    for part in work.parts:
        if part.item is None:
            continue
        shape = part.batch["input_ids"].shape[:2]
        packed = len(part.rows) < shape[0]
        sizes = map(len, part.sequences if packed else [row["input_ids"] for row in part.rows])
        for at, size in enumerate(sizes):
            start = shape[1] - size if part.left else 0
            output: dict[str, Any] = {}
            for key, value in part.item.outputs.items():
                if isinstance(value, Tensor) and value.ndim and len(value) == shape[0]:
                    wide = value.ndim > 1 and value.shape[1] == shape[1] and key != "embeddings"
                    output[key] = value[at, start : start + size] if wide else value[at]
            if part.batch.get("labels") is not None and part.batch["labels"].ndim == 3 and "logps" in output:
                output["logps"] = _own_targets(output["logps"], None if packed else part.rows[at]["labels"])
            found.append(output)  # type: ignore[arg-type]
    return found


def _own_targets(logps: Tensor, labels: Any) -> Tensor:
    """Return a row's log-probabilities `[T, K]` without what it was filled up with; `[T]` where it has one a token."""
    if labels is None:
        return logps
    count = torch.as_tensor(labels).shape[1:]
    return logps[:, : count[0]] if count else logps[:, 0]
