"""The contract of a metric."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.data_format import InputBatch, ModelOutput


class Metric(ABC):
    """Accumulates values over calls, then returns numbers and resets.

    Values are plain Python numbers, not formatted. `accumulate` is called once for each backward (training) or
    `calculate_loss` (evaluation), with the inputs and outputs of that call. `outputs` never contains whole logits; a
    class attribute requests what a metric needs from them.

    Args:
        device_mesh: the mesh of the model; None on one device.
        process_group: the data-parallel group for `gather_results`; None on one device.
    """

    require_predictions: bool = False
    """Whether the forward must prepare `outputs["predictions"]`."""

    def __init__(self, device_mesh: Any = None, process_group: Any = None) -> None:
        self.device_mesh = device_mesh
        self.process_group = process_group

    @abstractmethod
    def accumulate(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> None:
        """Add the values of one call.

        Args:
            inputs: the collated batch, `labels` int64 `[B, T]`; our metrics also accept a list of encoded rows.
            outputs: outputs of the forward and of the loss (`loss`, `loss_sum`, `num_tokens`, `logps`, ...); our
                metrics also accept lists with one entry for each row.
            **kwargs: `lr`, `step`, `gradient_accumulation_steps`, `grad_norm` and the per-row loss arguments.
        """

    @abstractmethod
    def calculate(self) -> Mapping[str, float]:
        """Return the numbers over all ranks since the last reset, then reset."""

    @abstractmethod
    def reset(self) -> None:
        """Clear the accumulated values."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has been accumulated, as a copy of plain values: numbers, texts, lists and mappings.

        The default is all attributes but the mesh and the process group.
        """
        hidden = ("device_mesh", "process_group")
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in hidden}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the values that `state_dict` of a metric with the same options returned."""
        vars(self).update(copy.deepcopy(dict(state)))

    def gather_results(self, local_results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the results of every rank of `process_group`, in rank order."""
        if self.process_group is None:
            return local_results
        import torch.distributed as dist

        gathered: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather_object(gathered, local_results, group=self.process_group)
        return [result for rank in gathered for result in rank]
