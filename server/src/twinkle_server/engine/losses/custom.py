"""Custom losses: graphs sent by clients, evaluated one row at a time, each row with its own gradient.

Each node of a graph is evaluated once, within limits that are checked before its evaluation.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import CapacityError
from twinkle.loss import Loss
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.building import Rows
from twinkle_server.engine.losses.catalog import CUSTOM
from twinkle_server.settings import Limits
from twinkle_server.wire.loss_graphs import FOLDING, POINTWISE, LossGraph, Node, digest_of, read_loss_id

MAX_CELLS: Final = 2**25
"""Maximum number of values that all nodes may create for a row."""
MAX_STEPS: Final = 2**19
"""Maximum number of nodes times rows of one operation."""
MAX_PARTS: Final = 64
"""Maximum length of a tuple or list that a node may return; a shape, or the result of `max`, is short."""
_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "neg": lambda a: -a,
}
_LARGEST: Final = 2.0**53


def _parts(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError("the argument must be a list of tensors")
    return list(value)


_TENSORS: Final[Mapping[str, Callable[..., Any]]] = {
    "and_": torch.logical_and,
    "or_": torch.logical_or,
    "xor": torch.logical_xor,
    "bool": lambda x: x.bool(),
    "cat": lambda x, dim=0: torch.cat(_parts(x), dim),
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
    "stack": lambda x, dim=0: torch.stack(_parts(x), dim),
    "truediv": torch.true_divide,
}


@dataclass(slots=True)
class Budget:
    """Limits of one operation, whatever the number of its micro-batches.

    Attributes:
        seconds: limit for evaluation and backward together.
        nodes: of the graph, for the message.
        rows: of the operation, for the message.
        clock: returns seconds.
        spent: seconds so far.
    """

    seconds: float
    nodes: int = 0
    rows: int = 0
    clock: Callable[[], float] = time.monotonic
    spent: float = 0.0
    _begun: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        """Start the clock for a row."""
        self._begun = self.clock()

    def end(self) -> None:
        """Stop the clock."""
        self.spent += self.clock() - self._begun

    def check(self) -> None:
        """Check the time limit.

        Raises:
            UserError: it is exceeded.
        """
        spent = self.spent + self.clock() - self._begun
        if spent > self.seconds:
            text = f"{self.nodes} nodes for {self.rows} rows took longer than {self.seconds:g} s"
            raise UserError(
                f"custom loss: {text}, which is the limit for one request; send fewer rows, or make the graph smaller"
            ) from CapacityError(text)  # the operation was faster before, so a replay may be retried

    def check_steps(self) -> None:
        """Check the number of steps, before any of them.

        Raises:
            UserError: there are too many.
        """
        if self.nodes * self.rows > MAX_STEPS:
            raise UserError(
                f"custom loss: a request must have at most {MAX_STEPS} steps, got {self.nodes * self.rows} "
                f"({self.nodes} nodes for {self.rows} rows); send fewer rows, or make the graph smaller"
            )


def run(graph: LossGraph, given: Mapping[str, Tensor], budget: Budget | None = None) -> tuple[Tensor, dict[str, float]]:
    """Evaluate a graph; return the row's loss (a scalar) and its metrics.

    Args:
        graph: the loss.
        given: the row's inputs by name.
        budget: of the operation, its clock running. It also applies to backward passes of the loss.

    Raises:
        UserError: a node fails, the nodes create too many values, or the time limit is exceeded.
    """
    known: dict[str, Any] = dict(given)
    left = MAX_CELLS
    for node in graph.nodes:
        if budget is not None:
            budget.check()
        try:
            args = [_decoded(value, known) for value in node.args]
            kwargs = {name: _decoded(value, known) for name, value in (node.kwargs or {}).items()}
            cells = _cells(node, [*args, *kwargs.values()])
            if cells > left:
                raise UserError(
                    f"custom loss: node {node.name!r} exceeds the limit of {MAX_CELLS} numbers per row: it creates "
                    f"{cells}, after {MAX_CELLS - left} of the nodes before it"
                )
            left -= cells
            known[node.name] = result = _plain(_call(node.operation, args, kwargs))
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            words = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise UserError(f"custom loss: node {node.name!r} ({node.operation}): {words}") from error
        if budget is not None:
            _watch(result, budget)
    loss = known[graph.loss]
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise UserError(
            "custom loss: the loss must be a floating-point scalar, for example a sum over the row's tokens"
        )
    return loss, {name: _number(known[node], name) for name, node in graph.metrics.items()}


def value_and_gradient(
    graph: LossGraph, given: Mapping[str, Tensor], name: str, budget: Budget
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Return a row's loss, its gradient with respect to one input, and its metrics; the graph is freed.

    Args:
        graph: the loss.
        given: the row's inputs by name.
        name: of the input.
        budget: of the operation, for evaluation and backward together.

    Raises:
        UserError: see `run`.
    """
    wanted = torch.is_grad_enabled() and given[name].requires_grad
    leaf = given[name].detach().requires_grad_(wanted)
    budget.begin()
    try:
        loss, metrics = run(graph, {**given, name: leaf}, budget)
        gradient = torch.autograd.grad(loss, leaf)[0] if _reaches(loss, leaf) else None
    finally:
        budget.end()
    return loss.detach(), gradient, metrics


def _reaches(loss: Tensor, leaf: Tensor) -> bool:
    return loss.requires_grad and leaf.requires_grad


def _watch(result: Any, budget: Budget) -> None:
    """Check the time limit in the backward pass, before the gradient of a node is computed."""
    for value in result if isinstance(result, list | tuple) else (result,):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: budget.check())  # type: ignore[no-untyped-call]


def _plain(value: Any) -> Any:
    """Return the result of a node if later nodes can use it at bounded cost.

    Raises:
        TypeError: it is a nested or a long list. References can be shared, so that a graph of a few kilobytes could
            represent a list of 2**1000 entries.
    """
    if not isinstance(value, list | tuple):
        return value
    if len(value) > MAX_PARTS or any(isinstance(part, list | tuple) for part in value):
        raise TypeError(f"a step must return a tensor, a number, or a flat list of at most {MAX_PARTS} of them")
    return tuple(value)


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    raise UserError(f"custom loss: the metric {name!r} must be a scalar tensor")


def _call(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if operation == "getattr":
        if len(args) < 2 or args[1] not in ("shape", "ndim") or not isinstance(args[0], Tensor):
            raise TypeError("a loss may only read the attributes shape and ndim of a tensor")
        return tuple(args[0].shape) if args[1] == "shape" else args[0].dim()
    if operation == "getitem":
        return _item(args[0], args[1])
    if operation in ("size", "dim", "numel"):
        if not args or not isinstance(args[0], Tensor):
            raise TypeError("size, dim and numel require a tensor")
        result = getattr(args[0], operation)(*args[1:], **kwargs)
        return tuple(result) if isinstance(result, torch.Size) else result
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
    """Compute with plain numbers, which are parts of shapes."""
    numbers = all(isinstance(value, int | float) and abs(value) <= _LARGEST for value in args)
    if operation not in _NUMBERS or not numbers:
        raise TypeError("at least one argument must be a tensor")
    return _NUMBERS[operation](*args)


def _item(value: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        mask = isinstance(part, Tensor) and part.dtype == torch.bool
        if not (mask or part is None or part is Ellipsis or isinstance(part, int | slice)):
            raise TypeError("an index must consist of numbers, slices and masks")
    return value[index]


def _cells(node: Node, values: Sequence[Any]) -> int:
    """Estimate how many values a node creates, before its evaluation."""
    tensors = [value for value in _flat(values) if isinstance(value, Tensor)]
    if node.operation in POINTWISE | FOLDING:
        try:
            return prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return 0  # the evaluation raises the error
    return sum(tensor.numel() for tensor in tensors)


def _flat(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, list | tuple) else [value])
    return flat


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


SHAPES: Final = "row_shape"
"""Argument with the shape of each row's targets."""
_OWN: Final = {"target_tokens": "labels", "weights": "loss_scale"}
SECONDS: Final = Limits().graph_seconds


class CustomLoss(Loss):
    """A loss of one row at a time, traced by the client; the loss of a batch is the sum over its rows.

    The gradient of a row is computed together with its loss, so that memory holds the nodes of only one row and the
    time limit includes the backward pass.

    Args:
        graph: the loss.
        budget: of the operation; None has the default time limit and does not limit steps.

    Attributes:
        code: which loss this is, for results: its name and digest.
    """

    def __init__(self, graph: LossGraph, budget: Budget | None = None) -> None:
        self.graph = graph
        self.budget = budget or Budget(SECONDS, len(graph.nodes))
        self.code = {"loss": CUSTOM, "sha256": digest_of(graph)}
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
            loss, gradient, row_metrics = value_and_gradient(self.graph, given, "logprobs", self.budget)
            if gradient is not None:
                loss = _Known.apply(scores, loss, gradient)  # type: ignore[no-untyped-call]
            total = total + loss
            for name, value in row_metrics.items():
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
    """A scalar with a known gradient with respect to a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_outputs[0] * gradient, None, None


def build(config: Mapping[str, float | str], rows: Rows, seconds: float = SECONDS) -> CustomLoss:
    """Build the custom loss of a request, and add the inputs that it needs to the rows.

    Args:
        config: options of the request, with the id of the loss.
        rows: of the request.
        seconds: time limit for all rows, backward included.

    Raises:
        UserError: the id is invalid, an input is missing or has another rank, or there are too many steps.
    """
    try:
        graph = read_loss_id(str(config.get("loss_id", "")))
    except ValueError as error:
        raise UserError(f"loss_fn {CUSTOM!r}: {error}") from error
    for name, rank in graph.inputs:
        if name in ("logprobs", "target_tokens"):
            ranks = [len(shape) for shape in rows.shapes]
        elif name == "weights":
            ranks = [rank if "loss_scale" in feature else -1 for feature in rows.features]
        else:
            ranks = [array.ndim for array in rows.inputs.get(name, ())] or [-1]
            ranks = [0 if found == 1 and rank == 0 else found for found in ranks]
        if any(found != rank for found in ranks):
            datum = next(number for number, found in enumerate(ranks) if found != rank)
            problem = "is missing" if ranks[datum] < 0 else f"has {ranks[datum]} dimensions"
            raise UserError(f"datum {datum}: the loss_fn_input {name!r} {problem}; the loss takes it with {rank}")
    budget = Budget(seconds, len(graph.nodes), len(rows.shapes))
    budget.check_steps()
    used = {name for name, _ in graph.inputs}
    rows.inputs = {name: arrays for name, arrays in rows.inputs.items() if name in used}
    rows.inputs[SHAPES] = [torch.tensor(shape).numpy() for shape in rows.shapes]
    return CustomLoss(graph, budget)


def _cut(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a row without its padding: `[n]` or `[n, K]` of `[T]` or `[T, K']`."""
    sizes = [int(size) for size in shape]
    cut = values[: sizes[0]]
    if cut.dim() == 2:
        cut = cut[:, : sizes[1]] if len(sizes) == 2 else cut[:, 0]
    return cut
