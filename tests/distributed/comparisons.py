"""What a contrastive loss and the metrics make of all rows together, on one of two ranks with unequal shares."""

from typing import Any

import torch
import torch.distributed as dist

from twinkle.loss import InfonceLoss
from twinkle.metric import Accuracy, EmbeddingMetric, LossMetric

LABELS = [1, 0, 0, 1, 0, 1, 0, 0, 0]
SHARES = (slice(0, 3), slice(3, 9))
OPTIONS: Any = {"include_qq": True, "include_dd": True, "mask_fake_negative": True, "fake_neg_margin": 0.2}


def vectors() -> torch.Tensor:
    """Return the embeddings of all ranks' rows before they are brought to length 1."""
    return torch.randn(len(LABELS), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def contrast(part: slice) -> dict[str, Any]:
    """Return loss, anchors and gradient of some rows, in the comparison with all."""
    raw = vectors()[part].requires_grad_()
    outputs: Any = {"embeddings": torch.nn.functional.normalize(raw, dim=-1)}
    result = InfonceLoss(**OPTIONS)({"labels": torch.tensor(LABELS[part])}, outputs)
    result.loss_sum.backward()
    assert raw.grad is not None
    return {"loss": result.loss_sum.item(), "anchors": result.denominator, "grad": raw.grad.tolist()}


def measure(parts: list[slice], group: Any = None) -> dict[str, float]:
    """Return the numbers of all metrics that saw some rows."""
    numbers: dict[str, float] = {}
    predictions = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    labels = torch.tensor([[1, 0, 3, -100, 5, 6, 0, -100, 9]])
    metrics = [kind(process_group=group) for kind in (LossMetric, Accuracy, EmbeddingMetric)]
    for part in parts:
        embeddings = torch.nn.functional.normalize(vectors()[part], dim=-1)
        rows: Any = {"labels": torch.tensor(LABELS[part])}
        tokens: Any = {"labels": labels[:, part]}
        metrics[0].accumulate(tokens, {"loss_sum": float(part.stop), "num_tokens": float(part.stop - part.start)})
        metrics[1].accumulate(tokens, {"predictions": predictions[:, part]})
        metrics[2].accumulate(rows, {"embeddings": embeddings})
    for metric in metrics:
        numbers |= metric.calculate()
    return numbers


def compare() -> dict[str, Any]:
    """Return what this one of two ranks sees."""
    rank = dist.get_rank()
    # In the second look only one rank has seen anything: the other must neither wait nor be left out.
    return {
        "contrast": contrast(SHARES[rank]),
        "metrics": measure([SHARES[rank]], dist.group.WORLD),
        "one rank saw rows": measure([SHARES[rank]] if rank else [], dist.group.WORLD),
    }
