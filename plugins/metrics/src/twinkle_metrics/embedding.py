"""How near anchors are to their positives and negatives."""

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch


class EmbeddingMetric(Metric):
    """Cosines between embeddings of `[anchor, positive, negatives ...]` groups; a row's label is 1 where one begins.

    Keys: `pos_sim`, `pos_sim_min`, `pos_sim_max`: mean, smallest and largest cosine of an anchor and its positive;
    `neg_sim`: mean cosine of an anchor and its own negatives, over all such pairs (absent where there are none).
    Passes of other tasks than "embedding" are not counted.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        super().__init__(device_mesh, process_group)
        self._sum, self._count = 0.0, 0
        self._least, self._most = float("inf"), float("-inf")
        self._negative_sum, self._negatives = 0.0, 0

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Add the values of `outputs["embeddings"]` `[B, H]` of length 1 and `inputs["labels"]` `[B]`."""
        inputs, outputs = as_batch(inputs, outputs)
        embeddings = outputs.get("embeddings")
        if embeddings is None:
            return
        import torch

        embeddings = embeddings.detach()
        starts = inputs["labels"].reshape(-1).to(embeddings.device) == 1
        rows = torch.arange(len(starts), device=embeddings.device)
        anchors = (rows * starts).cummax(0).values
        cosines = (embeddings * embeddings[anchors]).sum(-1).double()
        positive, negative = cosines[rows - anchors == 1], cosines[rows - anchors > 1]
        self._count += len(positive)
        self._sum += float(positive.sum())
        self._least = min([self._least, *positive.tolist()])
        self._most = max([self._most, *positive.tolist()])
        self._negatives += len(negative)
        self._negative_sum += float(negative.sum())

    def calculate(self) -> Mapping[str, float]:
        """Return the numbers over all ranks; nothing if no group was seen."""
        own = {
            "sum": self._sum,
            "count": self._count,
            "least": self._least,
            "most": self._most,
            "negative_sum": self._negative_sum,
            "negatives": self._negatives,
        }
        parts = self.gather_results([own])
        self.reset()
        count, negatives = (sum(part[key] for part in parts) for key in ("count", "negatives"))
        if not count:
            return {}
        values = {
            "pos_sim": sum(part["sum"] for part in parts) / count,
            "pos_sim_min": min(part["least"] for part in parts),
            "pos_sim_max": max(part["most"] for part in parts),
        }
        if negatives:
            values["neg_sim"] = sum(part["negative_sum"] for part in parts) / negatives
        return values

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._sum, self._count = 0.0, 0
        self._least, self._most = float("inf"), float("-inf")
        self._negative_sum, self._negatives = 0.0, 0
