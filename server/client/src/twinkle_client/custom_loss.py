"""A loss of the client's own: any function of torch on the log-probabilities of the labels, computed here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.errors import ArgumentError

LossFunction = Callable[[Sequence[Mapping[str, Any]], Sequence[Any]], Any]
"""Takes rows and their log-probabilities; returns the loss, or the loss and a mapping of metrics."""


def encoded_rows(inputs: Any) -> list[dict[str, Any]]:
    """Return rows for a custom loss.

    Raises:
        ArgumentError: there is none, or one has no labels.
    """
    rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not rows:
        raise ArgumentError("forward_backward_custom: inputs has no rows")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or "input_ids" not in row or "labels" not in row:
            raise ArgumentError(
                f"forward_backward_custom: row {number} must be encoded, with input_ids and labels; encode "
                "conversations with a Template first"
            )
    return [dict(row) for row in rows]


def differentiate(
    function: LossFunction, rows: Sequence[Mapping[str, Any]], logps: Sequence[Any]
) -> tuple[float, dict[str, float], list[Any]]:
    """Return the value of a loss, its metrics, and its gradient with respect to each row's log-probabilities.

    Args:
        function: the loss.
        rows: of the call.
        logps: arrays `[T]` or `[T, K]` in the shapes of the rows' labels; 0 where a label is -100.

    Raises:
        ArgumentError: torch is not installed; the function does not return a scalar that depends on the
            log-probabilities; or the loss or its gradient is not finite.
    """
    try:
        import torch
    except ImportError as error:
        raise ArgumentError(
            "forward_backward_custom computes the loss on this machine and needs torch; install it, or use a loss of "
            "the service by name"
        ) from error
    leaves = [torch.tensor(array, dtype=torch.float32, requires_grad=True) for array in logps]
    result = function(rows, leaves)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ArgumentError(
            "forward_backward_custom: the loss must be a scalar tensor that depends on the log-probabilities, got "
            f"{what}{'' if not isinstance(loss, torch.Tensor) or loss.requires_grad else ' without gradient'}"
        )
    found = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]
    if not torch.isfinite(loss).all() or not all(bool(torch.isfinite(one).all()) for one in gradients):
        raise ArgumentError(
            f"forward_backward_custom: the loss ({float(loss.detach())}) and its gradient must be finite; "
            "log-probabilities are 0 where a label is -100"
        )
    return float(loss.detach()), {name: float(value) for name, value in metrics.items()}, gradients
