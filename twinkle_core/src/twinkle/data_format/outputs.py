"""Return values of a model's forward and of a loss."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from twinkle.errors import ArgumentError

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


class LossOutput(Mapping[str, Any]):
    """The return value of a loss: a sum and its denominator, both additive over any split of the rows.

    Create it as `LossOutput(loss_sum, denominator)`, or in the published form `LossOutput(loss=..., num_tokens=...)`.
    Read it by its attributes, or as the published mapping with the keys `loss` (the sum) and `num_tokens` (the
    denominator, as a tensor).

    Attributes:
        loss_sum: scalar tensor with gradient: the loss summed over the units that the loss counts.
        denominator: how much was counted (tokens, rows, or a constant), a number without gradient. The training loop
            divides the sum of `loss_sum` by the sum of `denominator` over ranks, micro-batches and accumulation
            steps, once, at the step.
        metrics: numbers worth logging, as sums with the same denominator; `LossMetric` divides and reports them.
        is_mean: whether `loss_sum` is already a mean, which the published `num_tokens=0` states. A mean is accepted
            only for a batch in one piece, because means of parts cannot be added.
    """

    __slots__ = ("denominator", "is_mean", "loss_sum", "metrics")

    def __init__(
        self,
        loss_sum: "torch.Tensor | None" = None,
        denominator: "float | torch.Tensor | None" = None,
        metrics: Mapping[str, float] | None = None,
        *,
        loss: "torch.Tensor | None" = None,
        num_tokens: "float | torch.Tensor | None" = None,
    ) -> None:
        """Create it from a sum and its denominator, under our names or the published ones.

        Args:
            loss_sum: see the class.
            denominator: see the class.
            metrics: see the class; None is none.
            loss: published name of `loss_sum`.
            num_tokens: published name of `denominator`; 0 states that `loss` is already a mean.

        Raises:
            ArgumentError: a number is missing, or given under both names.
        """
        given = {"loss_sum": loss_sum, "denominator": denominator, "loss": loss, "num_tokens": num_tokens}
        names = {name for name, value in given.items() if value is not None}
        if names not in ({"loss_sum", "denominator"}, {"loss", "num_tokens"}):
            raise ArgumentError(
                f"LossOutput got {', '.join(sorted(names)) or 'nothing'}; give LossOutput(loss_sum, denominator), or "
                "LossOutput(loss=..., num_tokens=...) with num_tokens=0 if the loss is already a mean"
            )
        self.loss_sum: torch.Tensor = loss if loss_sum is None else loss_sum  # type: ignore[assignment]
        self.denominator: float | torch.Tensor = num_tokens if denominator is None else denominator  # type: ignore[assignment]
        self.metrics: Mapping[str, float] = {} if metrics is None else metrics
        self.is_mean = num_tokens is not None and float(num_tokens) == 0

    def __getitem__(self, key: str) -> Any:
        """Return the sum (`loss`) or its denominator (`num_tokens`)."""
        if key not in _PUBLISHED:
            raise KeyError(key)
        value = getattr(self, _PUBLISHED[key])
        if key == "loss" or self.is_mean or hasattr(value, "item") or not hasattr(self.loss_sum, "backward"):
            return value
        import torch

        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the published keys."""
        return iter(_PUBLISHED)

    def __len__(self) -> int:
        """Return the number of published keys."""
        return len(_PUBLISHED)

    def __repr__(self) -> str:
        return f"LossOutput(loss_sum={self.loss_sum!r}, denominator={self.denominator!r}, metrics={self.metrics!r})"


_PUBLISHED = {"loss": "loss_sum", "num_tokens": "denominator"}
