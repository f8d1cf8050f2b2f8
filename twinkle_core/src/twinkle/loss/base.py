"""The contract of a loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadProduct:
    """The product that a forward has not made yet, for a loss that makes it itself.

    Attributes:
        hidden: `[N, H]` last hidden states of the positions to train, in the dtype of the product, with graph.
        targets: int64 `[N]`, each in `[0, V)`.
        weight: `[V, H]` of the head.
        bias: `[V]` or None.
        softcap: c in `c * tanh(z / c)`, what the model does to its logits; None is nothing.
        loss_scale: float32 `[N]` on the CPU, weights of the positions, none of them 0; None is 1 everywhere.
        predictions: whether the most probable tokens are wanted.
    """

    hidden: "Tensor"
    targets: "Tensor"
    weight: "Tensor"
    bias: "Tensor | None" = None
    softcap: float | None = None
    loss_scale: "Tensor | None" = None
    predictions: bool = False


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """What a loss made of a `HeadProduct`.

    Attributes:
        loss_sum: scalar with gradient: the loss summed over the positions.
        predictions: int64 `[N]`, the most probable tokens, if they were wanted.
    """

    loss_sum: "Tensor"
    predictions: "Tensor | None" = None


class Loss(ABC):
    """Turns a model's outputs into a sum and its denominator.

    A loss never shifts labels (`labels[i]` is already the target of position `i`), never divides, and never looks
    across rows that a caller may split: for any split of the rows the parts' `loss_sum` and `denominator` must add up
    to the whole's (a loss of pairs says `rows_together = 2`, and no split cuts a pair). Anything callable with this
    signature may stand in for a subclass.

    Class attributes say what the forward must prepare in `outputs`: `logps` (cheap, the default), `entropies`,
    `uniform_logps`, or whole `logits` (`[B, T, V]`, dear).
    """

    require_logps: bool = True
    require_entropy: bool = False
    require_uniform_logps: bool = False
    """Wants `uniform_logps`: the mean over the vocabulary of the log-probabilities, for smoothed targets."""
    require_logits: bool = False
    chunk_tokens: int | None = None
    """Positions whose logits exist at one time in the head; None leaves it to the head."""
    skips_weight_zero: bool = False
    """Each term is a multiple of `loss_scale`: in training, positions of weight 0 need not be scored."""
    splittable: bool = True
    """False when the loss compares rows with each other, so that a batch must come in one piece."""
    row_inputs: tuple[str, ...] = ()
    """Its own arguments that have one entry a row, beside the usual ones (`advantages`, `old_logps`, ...)."""
    rows_together: int = 1
    """Consecutive rows that must stay in one micro-batch, from the first row on; 2 for pairs."""
    group_inputs: tuple[str, ...] = ()
    """Its own arguments that have one entry for each `rows_together` rows."""

    @abstractmethod
    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: collated batch; `labels` is int64 `[B, T]`, -100 where nothing is trained.
            outputs: `logps` float32 `[B, T]` and whatever the class attributes ask for.
            **kwargs: per-row arguments of the call (`advantages`, `old_logps`, ...), cut to these rows.
        """

    def fuse(self, product: HeadProduct) -> FusedLoss | None:
        """Compute the loss from hidden states and head with a kernel of its own; None leaves it to the head.

        The forward of a training pass asks this where the head is a plain product and nothing but predictions is
        wanted beside the loss. The sum then comes to `__call__` as `outputs["fused_loss_sum"]`, without `logps`.
        """
        return None

    def start(
        self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any
    ) -> Callable[[], LossOutput | Mapping[str, Any]] | None:
        """Begin to compute the loss in another process; None computes it in `__call__`.

        Where the rows of several losses share a pass, every loss is started before the result of one is awaited. The
        arguments are those of `__call__`.

        Returns:
            a function that waits for the result and returns what `__call__` would, or raises its error.
        """
        return None
