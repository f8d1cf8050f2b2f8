"""How a policy ranks pairs of a chosen and a rejected row, against a reference if there is one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import ArgumentError
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle_torch.trained import Trained


class DPOMetric(Metric):
    """Means over pairs of rows `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, and over all ranks.

    With l a row's sum of log-probabilities over its trained tokens (times `loss_scale`, where the batch has it), and
    l_ref the reference's, the keys are

    - `logps/chosen`, `logps/rejected`: l
    - `logps/ref_chosen`, `logps/ref_rejected`: l_ref
    - `rewards/chosen`, `rewards/rejected`: beta (l - l_ref), the implicit reward (DPO, arXiv:2305.18290, section 4)
    - `rewards/margins`: their difference; `rewards/accuracies`: share of pairs in [0, 1] in which it is above 0

    Without a reference the keys that need one are missing. A pair in which a row trains nothing is not counted, nor are
    passes without log-probabilities of one target a token.

    Args:
        device_mesh: the mesh of the model.
        process_group: the ranks to gather over.
        ignore_index: a label that is not trained, in addition to -100.
        beta: scale of the rewards, above 0; give the loss's.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self, device_mesh: Any = None, process_group: Any = None, ignore_index: int = -100, beta: float = 0.1
    ) -> None:
        super().__init__(device_mesh, process_group)
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < float("inf"):
            raise ArgumentError(f"DPOMetric: beta={beta!r}; it is a finite number above 0")
        self.ignore_index, self.beta = ignore_index, beta
        self.reset()

    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Add the values of `outputs["logps"]` `[B, T]` and of the reference of the loss.

        Args:
            inputs: `labels` int64 `[B, T]`, B even; optional `loss_scale`.
            outputs: `logps`.
            **kwargs: of the loss: `ref_logps`, `ref_outputs` with `logps`, or `ref_chosen_logps` and
                `ref_rejected_logps`, in the forms that the losses take.

        Raises:
            ArgumentError: B is odd, or the reference does not fit.
        """
        inputs, outputs = as_batch(inputs, outputs)
        logps = outputs.get("logps")
        if logps is None or inputs["labels"].ndim != 2:
            return
        import torch

        from twinkle_torch.trained import Trained

        where = Trained.of(inputs, logps, self.ignore_index, self)
        counts = torch.tensor(where.counts, device=logps.device)
        if len(counts) % 2:
            raise ArgumentError(f"DPOMetric: the batch has {len(counts)} rows, which are not pairs [chosen, rejected]")
        pairs = (counts[0::2] > 0) & (counts[1::2] > 0)
        sums = {"logps/{}": _weighed(where, logps.detach(), inputs)}
        reference = self._reference(where, logps.detach(), inputs, kwargs)
        if reference is not None:
            sums |= {"logps/ref_{}": reference, "rewards/{}": self.beta * (sums["logps/{}"] - reference)}
        numbers = {name.format(part): rows[at::2] for name, rows in sums.items() for at, part in _PARTS}
        if reference is not None:
            numbers["rewards/margins"] = numbers["rewards/chosen"] - numbers["rewards/rejected"]
            numbers["rewards/accuracies"] = (numbers["rewards/margins"] > 0).to(logps.dtype)
        totals = torch.stack([values[pairs].double().sum() for values in numbers.values()]).tolist()
        for name, total in zip(numbers, totals, strict=True):
            so_far = self._sums.get(name, (0.0, 0))
            self._sums[name] = (so_far[0] + total, so_far[1] + int(pairs.sum()))

    def _reference(self, where: "Trained", logps: "Tensor", inputs: InputBatch, given: Mapping[str, Any]) -> Any:
        """Return the reference's sums `[B]`; None without one."""
        import torch

        halves = [given.get(name) for name in ("ref_chosen_logps", "ref_rejected_logps")]
        if all(half is not None for half in halves):
            columns = [torch.as_tensor(half, dtype=logps.dtype, device=logps.device).reshape(-1) for half in halves]
            if (sizes := [len(column) for column in columns]) != [len(logps) // 2] * 2:
                raise ArgumentError(
                    f"DPOMetric: ref_chosen_logps and ref_rejected_logps have {sizes} numbers, the batch has "
                    f"{len(logps) // 2} pairs; give one number a pair each"
                )
            return torch.stack(columns, dim=1).flatten()
        tokens = given.get("ref_logps")
        if tokens is None:
            tokens = (given.get("ref_outputs") or {}).get("logps")
        if tokens is None:
            return None
        return _weighed(where, where.align("ref_logps", tokens, logps, broadcast=False), inputs)

    def calculate(self) -> Mapping[str, float]:
        """Return the means over all ranks; nothing if no pair was seen."""
        parts = self.gather_results([self._sums])
        self.reset()
        values = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            found = [part[name] for part in parts if name in part]
            if count := sum(pairs for _, pairs in found):
                values[name] = sum(total for total, _ in found) / count
        return values

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._sums: dict[str, Any] = {}


_PARTS = ((0, "chosen"), (1, "rejected"))


def _weighed(where: "Trained", logps: "Tensor", inputs: InputBatch) -> "Tensor":
    """Return the sums `[B]` over trained tokens, as the losses weigh them."""
    filled = where.fill(logps)
    return where.sums(filled if (scale := inputs.get("loss_scale")) is None else filled * scale.to(filled))
