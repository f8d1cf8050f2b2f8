"""Return values of a model's forward and of a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch


class ModelOutput(TypedDict, total=False):
    """The return value of `forward`; its keys depend on the call and on the class attributes of the loss.

    With several micro-batches the rows are joined again in the caller's order, padded on the right.
    """

    logps: "torch.Tensor"
    """float32, in the shape of `labels`: their log-probability at each trained position, 0 elsewhere. In a
    training pass with a loss that multiplies by `loss_scale`, positions of weight 0 are not trained."""
    logits: "torch.Tensor"
    """`[B, T, V]`: only with `return_logits=True` or if the loss requires it; `[B, K]` from a model whose head scores
    whole rows (`AutoModelForSequenceClassification`)."""
    entropies: "torch.Tensor"
    """float32 `[B, T]`: entropy of the next-token distribution at trained positions, 0 elsewhere."""
    uniform_logps: "torch.Tensor"
    """float32 `[B, T]`: mean over the vocabulary of the log-probabilities at trained positions, 0 elsewhere."""
    predictions: "torch.Tensor"
    """int64 `[B, T]`: most probable next token at trained positions, -100 elsewhere."""
    topk_logprobs: "torch.Tensor"
    """float32 `[B, T, k]`: log-probabilities of the k most probable next tokens at trained positions, descending, 0
    elsewhere; `forward_only(topk_logprobs=k)` only."""
    topk_indices: "torch.Tensor"
    """int64 `[B, T, k]`: these tokens, 0 elsewhere."""
    embeddings: "torch.Tensor"
    """`[B, H]`: pooled and L2-normalized; `task="embedding"` only."""
    fused_loss_sum: "torch.Tensor"
    """Scalar: the sum that a loss computed from hidden states and head (`Loss.fuse`), instead of `logps`."""
    loss: Any
    """float: the loss of this call, divided by its own denominator."""
    loss_sum: float
    """The loss of this call before that division."""
    num_tokens: float
    """The denominator of this call."""
    loss_metrics: Mapping[str, float]
    """`LossOutput.metrics` of a micro-batch, for metrics."""
    aux_loss: "torch.Tensor"
    routed_experts: Any


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The return value of a loss: a sum and its denominator, both additive over any split of the rows.

    Attributes:
        loss_sum: scalar tensor with gradient: the loss summed over the units that the loss counts.
        denominator: how much was counted (tokens, rows, or a constant), a number without gradient. The training loop
            divides the sum of `loss_sum` by the sum of `denominator` over ranks, micro-batches and accumulation
            steps, once, at the step.
        metrics: numbers worth logging, as sums with the same denominator; `LossMetric` divides and reports them.
    """

    loss_sum: "torch.Tensor"
    denominator: "float | torch.Tensor"
    metrics: Mapping[str, float] = field(default_factory=dict)
