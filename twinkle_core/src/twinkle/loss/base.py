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
    """The inputs of the output projection, for a loss that computes the projection itself.

    Attributes:
        hidden: `[N, H]` last hidden states of the positions to train, in the dtype of the product, with graph.
        targets: int64 `[N]`, each in `[0, V)`.
        weight: `[V, H]`, weight of the output projection.
        bias: `[V]` or None.
        softcap: c, if the model computes its logits as `c * tanh(z / c)`; None for no soft cap.
        loss_scale: float32 `[N]` on the CPU, weights of the positions, all > 0; None means 1 everywhere.
        predictions: whether to return the most probable tokens.
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
    """The result of a loss for a `HeadProduct`.

    Attributes:
        loss_sum: scalar with gradient: the loss summed over the positions.
        predictions: int64 `[N]`, the most probable tokens, if requested.
    """

    loss_sum: "Tensor"
    predictions: "Tensor | None" = None


class Loss(ABC):
    """Turns a model's outputs into a sum and its denominator.

    A loss does not shift labels (`labels[i]` is already the target of position `i`) and does not divide. For any split
    of the rows, `loss_sum` and `denominator` of the parts must add up to those of the whole. A loss of pairs sets
    `rows_together = 2`; then no split separates a pair. Any callable with this signature can be used as a loss.

    Class attributes state what the forward must compute for `outputs`: `logps` (cheap, the default), `entropies`,
    `uniform_logps`, or whole `logits` (`[B, T, V]`, expensive).
    """

    require_logps: bool = True
    require_entropy: bool = False
    require_uniform_logps: bool = False
    """Requires `uniform_logps`: the mean over the vocabulary of the log-probabilities, for smoothed targets."""
    require_logits: bool = False
    chunk_tokens: int | None = None
    """Number of positions whose logits are in memory at one time; None leaves it to the head."""
    skips_weight_zero: bool = False
    """Each term is a multiple of `loss_scale`: in training, positions of weight 0 need not be scored."""
    splittable: bool = True
    """False if the loss compares rows with each other, so that a batch must not be split."""
    row_inputs: tuple[str, ...] = ()
    """Further arguments with one entry per row, beside the usual ones (`advantages`, `old_logps`, ...)."""
    rows_together: int = 1
    """Consecutive rows that must stay in one micro-batch, from the first row on; 2 for pairs."""
    group_inputs: tuple[str, ...] = ()
    """Further arguments with one entry for each group of `rows_together` rows."""

    @abstractmethod
    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            inputs: collated batch; `labels` is int64 `[B, T]`, -100 where nothing is trained.
            outputs: `logps` float32 `[B, T]` and the outputs that the class attributes request.
            **kwargs: per-row arguments of the call (`advantages`, `old_logps`, ...), cut to these rows.
        """

    def fuse(self, product: HeadProduct) -> FusedLoss | None:
        """Compute the loss from hidden states and output projection, such as with a fused kernel; None declines.

        A training forward calls this if the head is a plain matrix product and no outputs other than predictions are
        requested. `__call__` then gets the sum as `outputs["fused_loss_sum"]`, without `logps`.
        """
        return None

    def start(
        self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any
    ) -> Callable[[], LossOutput | Mapping[str, Any]] | None:
        """Start to compute the loss in another process; None computes it in `__call__`.

        If the rows of several losses share a pass, all losses are started before the first result is awaited. The
        arguments are those of `__call__`.

        Returns:
            A function that waits for the result of `__call__` and returns it, or raises its error.
        """
        return None
