"""The contract of a loss."""

from abc import ABC, abstractmethod
from typing import Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput


class Loss(ABC):
    """Turns a model's outputs into a sum and its denominator.

    A loss never shifts labels (`labels[i]` is already the target of position `i`), never divides, and never looks
    across rows that a caller may split: for any split of the rows the parts' `loss_sum` and `denominator` must add up
    to the whole's. Anything callable with this signature may stand in for a subclass.

    Class attributes say what the forward must prepare in `outputs`: `logps` (cheap, the default), `entropies` or whole
    `logits` (`[B, T, V]`, dear).
    """

    require_logps: bool = True
    require_entropy: bool = False
    require_logits: bool = False

    @abstractmethod
    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: collated batch; `labels` is int64 `[B, T]`, -100 where nothing is trained.
            outputs: `logps` float32 `[B, T]` and whatever the class attributes ask for.
            **kwargs: per-row arguments of the call (`advantages`, `old_logps`, ...), cut to these rows.
        """
