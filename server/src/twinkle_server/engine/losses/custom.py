"""Losses that clients traced, as losses of the pool: one row at a time, each with its own gradient."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.catalog import CUSTOM
from twinkle_server.engine.losses.graphs import Budget, value_and_gradient
from twinkle_server.engine.rows import Rows
from twinkle_server.settings import Limits
from twinkle_server.wire.loss_graphs import LossGraph, read_loss_id

SHAPES: Final = "row_shape"
"""Argument with the shape of each row's targets."""
_OWN: Final = {"target_tokens": "labels", "weights": "loss_scale"}
SECONDS: Final = Limits().graph_seconds


class CustomLoss(Loss):
    """A loss of one row at a time, as its client traced it; a batch's loss is their sum.

    The gradient of a row is computed with its loss, so that memory holds the steps of one row at a time and the time
    limit covers the backward pass, too.

    Args:
        graph: the loss.
        budget: of the operation; None has the default time and counts no rows.
    """

    def __init__(self, graph: LossGraph, budget: Budget | None = None) -> None:
        self.graph = graph
        self.budget = budget or Budget(SECONDS, len(graph.nodes))
        self.row_inputs = (SHAPES, *(name for name, _ in graph.inputs[1:] if name not in _OWN))

    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch; see `Loss`."""
        logps: Tensor = outputs["logps"]
        total = logps[:0].sum()
        metrics: dict[str, float] = {}
        for row, shape in enumerate(kwargs[SHAPES]):
            scores = _cut(logps[row], shape)
            given = {"logprobs": scores}
            for name, rank in self.graph.inputs[1:]:
                given[name] = self._input(inputs, kwargs, name, row, shape, rank).to(logps.device)
            loss, gradient, said = value_and_gradient(self.graph, given, "logprobs", self.budget)
            if gradient is not None:
                loss = _Known.apply(scores, loss, gradient)  # type: ignore[no-untyped-call]
            total = total + loss
            for name, value in said.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return LossOutput(total, 1.0, metrics)

    def _input(
        self, inputs: Any, kwargs: Mapping[str, Any], name: str, row: int, shape: Sequence[int], rank: int
    ) -> Tensor:
        if name in _OWN:
            values = inputs.get(_OWN[name])
            return torch.ones(*map(int, shape)) if values is None else _cut(values[row], shape)
        array = torch.as_tensor(kwargs[name][row])
        return array.reshape(()) if rank == 0 else array


class _Known(torch.autograd.Function):
    """A scalar whose gradient with respect to a tensor was computed before."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outside: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return outside[0] * gradient, None, None


def build(config: Mapping[str, float | str], rows: Rows, seconds: float = SECONDS) -> CustomLoss:
    """Return the loss that a pass names by its id, and give the rows what it needs.

    Args:
        config: of the request, with the loss's id.
        rows: of the request.
        seconds: that the loss of all rows may take, backward included.

    Raises:
        UserError: there is no such id, the rows lack an input or have one of another rank, or there are too many steps.
    """
    try:
        graph = read_loss_id(str(config.get("loss_id", "")))
    except ValueError as error:
        raise UserError(f"loss_fn {CUSTOM!r}: {error}") from error
    for name, rank in graph.inputs:
        if name in ("logprobs", "target_tokens"):
            found = [len(shape) for shape in rows.shapes]
        elif name == "weights":
            found = [rank if "loss_scale" in feature else -1 for feature in rows.features]
        else:
            found = [array.ndim for array in rows.inputs.get(name, ())] or [-1]
            found = [0 if one == 1 and rank == 0 else one for one in found]
        if any(one != rank for one in found):
            odd = next(number for number, one in enumerate(found) if one != rank)
            what = "is missing" if found[odd] < 0 else f"has {found[odd]} dimensions"
            raise UserError(f"datum {odd}: the loss_fn_input {name!r} {what}; the loss takes it with {rank}")
    budget = Budget(seconds, len(graph.nodes), len(rows.shapes))
    budget.check_steps()
    used = {name for name, _ in graph.inputs}
    rows.inputs = {name: arrays for name, arrays in rows.inputs.items() if name in used}
    rows.inputs[SHAPES] = [torch.tensor(shape).numpy() for shape in rows.shapes]
    return CustomLoss(graph, budget)


def _cut(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a row without what fills it up: `[n]` or `[n, K]` of `[T]` or `[T, K']`."""
    sizes = [int(size) for size in shape]
    cut = values[: sizes[0]]
    if cut.dim() == 2:
        cut = cut[:, : sizes[1]] if len(sizes) == 2 else cut[:, 0]
    return cut
