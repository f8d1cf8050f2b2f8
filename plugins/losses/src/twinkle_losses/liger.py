"""Cross entropy by Liger's fused kernel if it is available, else by the head of `twinkle_torch`."""

import inspect
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.logging import get_logger
from twinkle.loss import FusedLoss, HeadProduct
from twinkle_losses.cross_entropy import CrossEntropyLoss
from twinkle_losses.options import number

if TYPE_CHECKING:
    from torch import Tensor


class LigerFusedLinearCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss` in one Triton kernel over hidden states and head (Liger-Kernel, arXiv:2410.10989).

    The kernel runs in training passes on a CUDA device with `liger-kernel` (0.8 or newer) installed, with
    `task="fused_lm_ce"` or without; the forward then returns no `logps`. Everywhere else (CPU, evaluation, an adapter
    on the head, weights `loss_scale` other than 0 and 1, a temperature together with a soft cap) the loss head computes
    the same numbers.

    Args:
        ignore_index: see `CrossEntropyLoss`.
        reduction: "mean" or "sum", which mean the same: see `CrossEntropyLoss`.
        label_smoothing: see `CrossEntropyLoss`.
        softcap: c in `c * tanh(z / c)`, to require that the model caps its logits with it; the model's own
            is used in any case, and another one is refused.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "sum",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing=label_smoothing)
        self.softcap = None if softcap is None else number(self, "softcap", softcap, above=0)

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch; see `CrossEntropyLoss`."""
        total = outputs.get("fused_loss_sum")
        if total is None:
            return super().__call__(inputs, outputs)
        return LossOutput(total, int(self._mask(inputs["labels"]).sum()))

    def fuse(self, product: HeadProduct) -> FusedLoss | None:
        """Compute the sum by Liger's kernel, if it can run here and supports all requested outputs."""
        kernel = _kernel() if _runs_on(product.hidden) else None
        weights = product.loss_scale
        if kernel is None or (weights is not None and bool((weights != 1).any())):
            return None
        run = kernel(
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
            softcap=product.softcap,
            return_predicted_tokens=product.predictions,
        )
        made = run(product.weight, product.hidden, product.targets, product.bias)
        if not product.predictions:
            return FusedLoss(made)
        return FusedLoss(made.loss, made.predicted_tokens)


def _runs_on(hidden: "Tensor") -> bool:
    return hidden.is_cuda


@cache
def _kernel() -> Any:
    """Return Liger's module class, or None where it is not installed or too old."""
    try:
        kernel = import_module("liger_kernel.transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        get_logger().info("liger-kernel cannot be imported (%s); the loss head computes the same numbers", error)
        return None
    if "return_predicted_tokens" not in inspect.signature(kernel).parameters:
        get_logger().info("liger-kernel is older than 0.8; the loss head computes the same numbers")
        return None
    return kernel
