"""How near anchors are to their positives, to other positives, and to their own negatives."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import DataError
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch
from twinkle_metrics.loss import loss_and_count

if TYPE_CHECKING:
    from torch import Tensor


class EmbeddingMetric(Metric):
    """Cosines between embeddings of `[anchor, positive, negatives ...]` groups; a row's label is 1 where one begins.

    Keys: `pos_sim`, `pos_sim_min`, `pos_sim_max`: mean, smallest and largest cosine of an anchor and its positive;
    `neg_sim`: mean cosine of an anchor and the positive of another group, over all pairs of groups since the last look,
    of all ranks (absent with a single group); `hard_neg_sim`: mean cosine of an anchor and its own negatives (absent
    where there are none); `loss` and `grad_norm` of these passes, as `LossMetric` computes them. Passes of other tasks
    than "embedding" are not counted.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        super().__init__(device_mesh, process_group)
        self._least, self._most = float("inf"), float("-inf")
        self._anchor_sum: list[float] = []
        self._positive_sum: list[float] = []
        self._grad_norm: float | None = None
        self.reset()

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Add the values of `outputs["embeddings"]` `[B, H]` and `inputs["labels"]` `[B]`.

        Outputs that a script passes may have the vectors as `logits` `[B, H]`, and vectors of any length. A loss is
        added where the outputs have one.

        Raises:
            DataError: there is not one label for each vector.
        """
        inputs, outputs = as_batch(inputs, outputs)
        vectors = _vectors(outputs)
        if vectors is None:
            return
        import torch

        units = torch.nn.functional.normalize(vectors.detach().double(), dim=-1)
        starts = inputs["labels"].reshape(-1).to(units.device) == 1
        if len(starts) != len(units):
            raise DataError(
                f"EmbeddingMetric: there are {len(starts)} labels and {len(units)} embeddings; give one label a row"
            )
        rows = torch.arange(len(starts), device=units.device)
        anchors = (rows * starts).cummax(0).values
        cosines = (units * units[anchors]).sum(-1)
        places = (rows - anchors == 1).nonzero()[:, 0]
        positive, hard = cosines[places], cosines[rows - anchors > 1]
        self._add("positives", len(positive), positive.sum())
        self._add("negatives", len(hard), hard.sum())
        self._least = min([self._least, *positive.tolist()])
        self._most = max([self._most, *positive.tolist()])
        self._anchor_sum = _sum(self._anchor_sum, units[anchors[places]].sum(0).tolist())
        self._positive_sum = _sum(self._positive_sum, units[places].sum(0).tolist())
        if (loss := loss_and_count(inputs, outputs, kwargs)) is not None:
            self._add("losses", loss[1], loss[0])
        if (norm := kwargs.get("grad_norm")) is not None:
            self._grad_norm = float(norm)

    def calculate(self) -> Mapping[str, float]:
        """Return the numbers over all ranks; nothing if no group was seen."""
        own = {
            "sums": self._sums,
            "counts": self._counts,
            "least": self._least,
            "most": self._most,
            "anchor": self._anchor_sum,
            "positive": self._positive_sum,
        }
        norm, parts = self._grad_norm, self.gather_results([own])
        self.reset()
        counts, sums = (
            {name: sum(part[key].get(name, 0.0) for part in parts) for name in ("positives", "negatives", "losses")}
            for key in ("counts", "sums")
        )
        groups = counts["positives"]
        if not groups:
            return {}
        values = {
            "pos_sim": sums["positives"] / groups,
            "pos_sim_min": min(part["least"] for part in parts),
            "pos_sim_max": max(part["most"] for part in parts),
        }
        if groups > 1:  # all pairs of an anchor and a positive, without those of one group
            anchor, positive = list[float](), list[float]()
            for part in parts:
                anchor, positive = _sum(anchor, part["anchor"]), _sum(positive, part["positive"])
            every = sum(a * b for a, b in zip(anchor, positive, strict=True))
            values["neg_sim"] = (every - sums["positives"]) / (groups * (groups - 1))
        if counts["negatives"]:
            values["hard_neg_sim"] = sums["negatives"] / counts["negatives"]
        if counts["losses"]:
            values["loss"] = sums["losses"] / counts["losses"]
        return values if norm is None else {**values, "grad_norm": norm}

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._least, self._most = float("inf"), float("-inf")
        self._anchor_sum, self._positive_sum = [], []
        self._grad_norm = None

    def _add(self, name: str, count: float, total: Any) -> None:
        self._counts[name] = self._counts.get(name, 0) + count
        self._sums[name] = self._sums.get(name, 0.0) + float(total)


def _vectors(outputs: ModelOutput) -> "Tensor | None":
    """Return one vector for each row `[B, H]`; None if the outputs have none."""
    vectors: Any = outputs.get("embeddings")
    if vectors is None:
        vectors = outputs.get("logits")
    if vectors is not None and vectors.ndim == 3 and vectors.shape[1] == 1:
        vectors = vectors[:, 0]
    return vectors if vectors is not None and vectors.ndim == 2 else None


def _sum(one: list[float], other: list[float]) -> list[float]:
    """Return the sum of two vectors; an empty one is 0."""
    return [a + b for a, b in zip(one, other, strict=True)] if one and other else one or other
