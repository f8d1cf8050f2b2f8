"""How a student agrees with a teacher that is known by its most probable tokens."""

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch

_TEACHER = ("teacher_topk_logprobs", "teacher_topk_indices")


class GKDMetric(Metric):
    """Means over the trained tokens of a distillation step, and over all ranks.

    Keys: `teacher_agreement`: share of tokens in [0, 1] at which student and teacher find the same token most
    probable; `teacher_mass`: the probability that the teacher's k tokens have together, by the teacher: what is missing
    to 1 is what the loss sees as one event, or not at all. How far the two are apart is what the loss says itself (`kl`
    and `reverse_kl`, which `LossMetric` reports).

    It reads `teacher_topk_logprobs` and `teacher_topk_indices`. Passes whose teacher came as whole logits, which no
    metric sees, are not counted, nor are those that predict no tokens.

    Args:
        device_mesh: the mesh of the model.
        process_group: the ranks to gather over.
        ignore_index: a label that is not trained, in addition to -100.
    """

    require_predictions = True

    def __init__(self, device_mesh: Any = None, process_group: Any = None, ignore_index: int = -100) -> None:
        super().__init__(device_mesh, process_group)
        self.ignore_index = ignore_index
        self.reset()

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Compare `outputs["predictions"]` int64 `[B, T]` with the teacher's tokens.

        Args:
            inputs: `labels` int64 `[B, T]`.
            outputs: `predictions`.
            **kwargs: of the loss: `teacher_topk_logprobs` and `teacher_topk_indices` `[B, T, k]`, in the forms that it
                takes.

        Raises:
            ArgumentError: they do not fit the batch.
        """
        inputs, outputs = as_batch(inputs, outputs)
        predictions = outputs.get("predictions")
        if predictions is None or inputs["labels"].ndim != 2 or any(kwargs.get(name) is None for name in _TEACHER):
            return
        from twinkle_torch.tables import trained_lines
        from twinkle_torch.trained import Trained

        where = Trained.of(inputs, predictions, self.ignore_index, self)
        if not (count := sum(where.counts)):
            return
        logprobs, tokens = (trained_lines(name, kwargs[name], where)[0](slice(0, count)) for name in _TEACHER)
        best = tokens.gather(-1, logprobs.argmax(-1, keepdim=True))[:, 0]
        self._agreed += int((best.to(predictions.device) == predictions[where.mask]).sum())
        self._mass += float(logprobs.double().exp().sum())
        self._count += count

    def calculate(self) -> Mapping[str, float]:
        """Return the means over all ranks; nothing if no token was seen."""
        parts = self.gather_results([{"agreed": self._agreed, "mass": self._mass, "count": self._count}])
        self.reset()
        if not (count := sum(part["count"] for part in parts)):
            return {}
        agreed, mass = (sum(part[name] for part in parts) for name in ("agreed", "mass"))
        return {"teacher_agreement": agreed / count, "teacher_mass": mass / count}

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._agreed, self._mass, self._count = 0, 0.0, 0
