"""Runs losses that clients traced: each step is one of a list, and its result is counted before it is made."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_server.engine.backend import UserError
from twinkle_server.engine.pool.data import Rows
from twinkle_server.wire.loss_graphs import FOLDING, POINTWISE, LossGraph, Node, read_loss_id

NAME: Final = "custom"
SHAPES: Final = "row_shape"
"""Argument with the shape of each row's targets."""
MOST_CELLS: Final = 2**25
"""Numbers of all steps of a row together."""
_OWN: Final = {"target_tokens": "labels", "weights": "loss_scale"}
_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "neg": lambda a: -a,
}
_LARGEST: Final = 2.0**53
_TENSORS: Final[Mapping[str, Callable[..., Any]]] = {
    "and_": torch.logical_and,
    "or_": torch.logical_or,
    "xor": torch.logical_xor,
    "bool": lambda x: x.bool(),
    "cat": lambda x, dim=0: torch.cat(list(x), dim),
    "double": lambda x: x.float(),
    "float": lambda x: x.float(),
    "huber_loss": lambda input, target, reduction="mean", delta=1.0: functional.huber_loss(
        input, target, reduction=reduction, delta=delta
    ),
    "l1_loss": lambda input, target, reduction="mean": functional.l1_loss(input, target, reduction=reduction),
    "log_sigmoid": functional.logsigmoid,
    "mse_loss": lambda input, target, reduction="mean": functional.mse_loss(input, target, reduction=reduction),
    "smooth_l1_loss": lambda input, target, reduction="mean", beta=1.0: functional.smooth_l1_loss(
        input, target, reduction=reduction, beta=beta
    ),
    "softplus": functional.softplus,
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "stack": lambda x, dim=0: torch.stack(list(x), dim),
    "truediv": torch.true_divide,
}


class CustomLoss(Loss):
    """A loss of one row at a time, as its client traced it; a batch's loss is their sum.

    Args:
        graph: the loss.
    """

    def __init__(self, graph: LossGraph) -> None:
        self.graph = graph
        self.row_inputs = (SHAPES, *(name for name, _ in graph.inputs[1:] if name not in _OWN))

    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch; see `Loss`."""
        logps: Tensor = outputs["logps"]
        total = logps[:0].sum()
        metrics: dict[str, float] = {}
        for row, shape in enumerate(kwargs[SHAPES]):
            given = {"logprobs": _cut(logps[row], shape)}
            for name, rank in self.graph.inputs[1:]:
                given[name] = self._input(inputs, kwargs, name, row, shape, rank).to(logps.device)
            loss, said = run(self.graph, given)
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


def build(config: Mapping[str, float | str], rows: Rows) -> CustomLoss:
    """Return the loss that a pass names by its id, and give the rows what it needs.

    Raises:
        UserError: there is no such id, or the rows lack an input or have one of another rank.
    """
    try:
        graph = read_loss_id(str(config.get("loss_id", "")))
    except ValueError as error:
        raise UserError(f"loss_fn {NAME!r}: {error}") from error
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
    used = {name for name, _ in graph.inputs}
    rows.inputs = {name: arrays for name, arrays in rows.inputs.items() if name in used}
    rows.inputs[SHAPES] = [torch.tensor(shape).numpy() for shape in rows.shapes]
    return CustomLoss(graph)


def run(graph: LossGraph, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Return a row's loss, a scalar, and its metrics.

    Raises:
        UserError: a step cannot be done, or all of them together make too many numbers.
    """
    known: dict[str, Any] = dict(given)
    left = MOST_CELLS
    for node in graph.nodes:
        args = [_decoded(value, known) for value in node.args]
        kwargs = {name: _decoded(value, known) for name, value in (node.kwargs or {}).items()}
        left -= _cells(node, [*args, *kwargs.values()])
        if left < 0:
            raise UserError(f"custom loss: node {node.name!r} goes beyond {MOST_CELLS} numbers for one row")
        try:
            known[node.name] = _call(node.operation, args, kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
            words = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise UserError(f"custom loss: node {node.name!r} ({node.operation}): {words}") from error
    loss = known[graph.loss]
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise UserError("custom loss: it gives no scalar of floating point; a sum over the row's tokens is meant")
    return loss, {name: _number(known[node], name) for name, node in graph.metrics.items()}


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    raise UserError(f"custom loss: the metric {name!r} is no scalar tensor")


def _call(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if operation == "getattr":
        if len(args) < 2 or args[1] not in ("shape", "ndim") or not isinstance(args[0], Tensor):
            raise TypeError("of a tensor, a loss may ask for shape and ndim")
        return tuple(args[0].shape) if args[1] == "shape" else args[0].dim()
    if operation == "getitem":
        return _item(args[0], args[1])
    if operation in ("size", "dim", "numel"):
        if not args or not isinstance(args[0], Tensor):
            raise TypeError("of a tensor, a loss may ask for its size")
        found = getattr(args[0], operation)(*args[1:], **kwargs)
        return tuple(found) if isinstance(found, torch.Size) else found
    if not any(isinstance(value, Tensor) for value in _flat([*args, *kwargs.values()])):
        return _arithmetic(operation, args)
    call = _TENSORS.get(operation) or getattr(torch, operation, None) or getattr(Tensor, operation)
    if operation in ("minimum", "maximum", "where", "dot"):
        return call(*args, **kwargs)
    first = args[0] if args else None
    if operation in _REFLECTED and not isinstance(first, Tensor):
        args = [torch.as_tensor(first), *args[1:]]
    return call(*args, **kwargs)


_REFLECTED: Final = frozenset({"add", "sub", "mul", "truediv", "pow", "eq", "ne", "lt", "le", "gt", "ge"})


def _arithmetic(operation: str, args: Sequence[Any]) -> Any:
    """Compute with plain numbers, which come from shapes."""
    numbers = all(isinstance(value, int | float) and abs(value) <= _LARGEST for value in args)
    if operation not in _NUMBERS or not numbers:
        raise TypeError("at least one argument is a tensor")
    return _NUMBERS[operation](*args)


def _item(value: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, Tensor) and part.dtype != torch.bool:
            raise TypeError("a tensor is indexed by numbers, slices and masks")
    return value[index]


def _cells(node: Node, values: Sequence[Any]) -> int:
    """Return about how many numbers a step makes, before it makes them."""
    tensors = [value for value in _flat(values) if isinstance(value, Tensor)]
    if node.operation in POINTWISE | FOLDING:
        try:
            return prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return 0  # the step itself says what does not fit
    return sum(tensor.numel() for tensor in tensors)


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found.extend(_flat(value) if isinstance(value, list | tuple) else [value])
    return found


def _decoded(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "ref":
        return known[inner]
    if kind == "tuple":
        return tuple(_decoded(item, known) for item in inner)
    if kind == "slice":
        return slice(*(_decoded(item, known) for item in inner))
    return Ellipsis if kind == "ellipsis" else float(inner) if kind == "float" else None


def _cut(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a row without what fills it up: `[n]` or `[n, K]` of `[T]` or `[T, K']`."""
    sizes = [int(size) for size in shape]
    cut = values[: sizes[0]]
    if cut.dim() == 2:
        cut = cut[:, : sizes[1]] if len(sizes) == 2 else cut[:, 0]
    return cut
