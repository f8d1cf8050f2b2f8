"""Token accuracy."""

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import DataError
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch


class Accuracy(Metric):
    """Share of trained positions at which the most probable token is the target (teacher forcing).

    Trained are positions whose label is neither -100 nor `ignore_index`, and whose `loss_scale` and `completion_mask`,
    if the batch has them, are not 0. Keys: `accuracy` in [0, 1], `correct_tokens`, `total_tokens`. The predictions
    come from the loss head, which sees each chunk's logits anyway; whole logits are never kept for it. Passes that
    predict no tokens (embeddings, value heads), or have several targets a position, are not counted.
    """

    require_predictions = True

    def __init__(self, device_mesh: Any = None, process_group: Any = None, ignore_index: int = -100) -> None:
        super().__init__(device_mesh, process_group)
        self.ignore_index = ignore_index
        self.reset()

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Compare `outputs["predictions"]` with `inputs["labels"]`, both int64 `[B, T]`.

        Without predictions, those of `outputs["logits"]` `[B, T, V]` are used. A script may also pass flat labels
        `[N]` with logits `[N, V]`.

        Raises:
            DataError: their shapes differ, as those of packed rows would whose outputs alone were unpacked.
        """
        inputs, outputs = as_batch(inputs, outputs)
        predictions = outputs.get("predictions")
        logits = outputs.get("logits")  # of outputs that a script passes
        if predictions is None and logits is not None and logits.ndim == inputs["labels"].ndim + 1:
            predictions = logits.argmax(-1)
        if predictions is None or inputs["labels"].ndim == 3:
            return
        labels = inputs["labels"].to(predictions.device)
        if labels.shape != predictions.shape:
            raise DataError(
                f"Accuracy: labels {list(labels.shape)} and predictions {list(predictions.shape)} differ in shape; "
                "unpack both or neither"
            )
        mask = (labels != self.ignore_index) & (labels != -100)
        for weights in (inputs.get("loss_scale"), inputs.get("completion_mask")):
            if weights is not None:
                mask &= weights.to(mask.device) != 0
        self._correct += int(((predictions == labels) & mask).sum())
        self._total += int(mask.sum())

    def calculate(self) -> Mapping[str, float]:
        """Return the counts over all ranks and their ratio; nothing if no token was trained."""
        parts = self.gather_results([{"correct": self._correct, "total": self._total}])
        correct, total = (sum(part[key] for part in parts) for key in ("correct", "total"))
        self.reset()
        if not total:
            return {}
        return {"accuracy": correct / total, "correct_tokens": correct, "total_tokens": total}

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._correct = 0
        self._total = 0
