"""Contract checks of metrics: plain numbers over all ranks, independent of the split of the rows; reset."""

import copy
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, Violation, require
from twinkle_testing.contracts.values import is_plain_number, left_alone, same, shown

_IGNORED = -100
Rows = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclass(kw_only=True)
class MetricCase(Case):
    """A metric and its inputs.

    Attributes:
        inputs: the collated batch, tensors with one entry per row; by default `labels` `[6, 5]`.
        outputs: outputs of the forward for these rows; by default `logps` and `predictions`. `loss_sum`, `num_tokens`
            and `loss` are added.
        rows_a_group: number of rows that belong together, so that a batch is split between groups only.
        row_arguments: further keyword arguments of `accumulate` with one entry per row, such as `old_logps`; or a
            mapping of these.
        varying: keys whose values vary between runs, such as times; they are not compared.
    """

    kind = "metric"

    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    rows_a_group: int = 1
    row_arguments: Mapping[str, Any] = field(default_factory=dict)
    varying: Collection[str] = ()

    def batch(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return inputs and outputs of all rows."""
        import torch

        draw = torch.Generator().manual_seed(3)
        labels = torch.randint(0, 9, (6, 5), generator=draw)
        labels[:, -1] = labels[0, 0] = labels[3, 1] = _IGNORED
        inputs = {"labels": labels} | dict(self.inputs)
        outputs = dict(self.outputs)
        if not outputs:
            guessed = torch.where(torch.rand(labels.shape, generator=draw) < 0.5, labels, (labels + 1) % 9)
            masked = labels == _IGNORED
            outputs["logps"] = -torch.rand(labels.shape, generator=draw).masked_fill(masked, 0.0)
            outputs["predictions"] = guessed.masked_fill(masked, _IGNORED)
        return inputs, outputs

    def parts(self, count: int) -> list[Rows]:
        """Return the rows in `count` pieces, each as one call gets them."""
        inputs, outputs = self.batch()
        groups = len(inputs["labels"]) // self.rows_a_group
        bounds = [round(groups * part / count) * self.rows_a_group for part in range(count + 1)]
        return [self.part(inputs, outputs, *ends) for ends in itertools.pairwise(bounds) if ends[1] > ends[0]]

    def part(self, inputs: dict[str, Any], outputs: dict[str, Any], start: int, end: int) -> Rows:
        """Return rows `start` to `end` as one call gets them."""
        own = _rows(inputs, start, end)
        return own, _counted(own, _rows(outputs, start, end)), _cut(self.row_arguments, start, end)


def accumulate(metric: Any, parts: list[Rows]) -> None:
    """Feed the pieces of one step to the metric, as a training loop does."""
    for inputs, outputs, arguments in parts:
        known = {"lr": 1e-3, "step": 2, "gradient_accumulation_steps": 1, "grad_norm": 0.5}
        metric.accumulate(inputs, outputs, **known, **arguments)


def compared(case: MetricCase, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that vary."""
    return {name: value for name, value in values.items() if name not in case.varying}


def plain_numbers(case: MetricCase) -> None:
    """`calculate` returns a mapping of names to plain Python numbers, not tensors or texts."""
    metric = case.build()
    accumulate(metric, case.parts(2))
    values = metric.calculate()
    require(isinstance(values, Mapping), f"calculate() returned {shown(values)}; return a mapping")
    require(values, "calculate() gave nothing after two calls; if it needs other outputs, give them in its example")
    for name, value in values.items():
        require(isinstance(name, str), f"the key {name!r} is no text")
        require(
            is_plain_number(value) and math.isfinite(value), f"{name} is {shown(value)}; it must be a finite number"
        )


def pieces(case: MetricCase) -> None:
    """Rows accumulated in pieces, also of unequal size, give the same numbers as all rows at once."""
    results = []
    for count in (1, 2, 4):
        metric = case.build()
        accumulate(metric, case.parts(count))
        results.append(compared(case, metric.calculate()))
    for found in results[1:]:
        require(same(found, results[0], tolerance=1e-6), f"in pieces it gives {found}, at once {results[0]}")


def ranks(case: MetricCase) -> None:
    """Over two ranks it gives the numbers of all rows on each rank."""
    whole = case.build()
    accumulate(whole, case.parts(1))
    expected = compared(case, whole.calculate())
    first, second = case.parts(2)
    found = compared(case, _on_two_ranks(case.build, [first], [second]))
    require(same(found, expected, tolerance=1e-6), f"over two ranks it gives {found}, on one {expected}")


def starts_afresh(case: MetricCase) -> None:
    """`calculate` and `reset` clear the accumulated values."""
    first, second = case.parts(2)
    fresh, used, reset = case.build(), case.build(), case.build()
    for metric, forget in ((used, used.calculate), (reset, reset.reset)):
        accumulate(metric, [first])
        forget()
    expected = _after(case, fresh, second)
    for metric, what in ((used, "calculate()"), (reset, "reset()")):
        found = _after(case, metric, second)
        require(same(found, expected, tolerance=1e-9), f"after {what} the next numbers are {found}, not {expected}")


def nothing_seen(case: MetricCase) -> None:
    """Without a call of `accumulate`, `calculate` does not raise and returns finite numbers or nothing."""
    for name, value in case.build().calculate().items():
        require(is_plain_number(value) and math.isfinite(value), f"{name} is {shown(value)} before anything was seen")


def no_labels(case: MetricCase) -> None:
    """Rows without labels do not cause a division by zero."""
    import torch

    inputs, outputs = case.batch()
    if getattr(inputs["labels"], "dim", int)() == 2 and not inputs["labels"].is_floating_point():
        inputs["labels"] = torch.full_like(inputs["labels"], _IGNORED)
        metric = case.build()
        accumulate(metric, [case.part(inputs, outputs, 0, len(inputs["labels"]))])
        for name, value in metric.calculate().items():
            require(math.isfinite(value), f"{name} is {shown(value)} where every label is -100")


def batch_left_alone(case: MetricCase) -> None:
    """It does not change inputs and outputs."""
    metric = case.build()
    left_alone(lambda parts: accumulate(metric, parts), case.parts(1), "inputs or outputs")


def keeps_no_tensors(case: MetricCase) -> None:
    """It keeps no tensor with a graph between calls, because that would keep the forward pass in memory."""
    import torch

    metric = case.build()
    inputs, outputs, arguments = case.parts(1)[0]
    live = {
        name: value.clone().requires_grad_() * 1 if _is_float_tensor(value) else value
        for name, value in outputs.items()
    }
    with torch.enable_grad():
        accumulate(metric, [(inputs, live, arguments)])
    for name, value in vars(metric).items():
        held = [leaf for leaf in _tensors(value) if leaf.requires_grad]
        require(not held, f"its attribute {name} holds a tensor with a gradient; detach it, or keep numbers")


CASE = MetricCase
CHECKS = (
    plain_numbers,
    pieces,
    ranks,
    starts_afresh,
    nothing_seen,
    no_labels,
    batch_left_alone,
    keeps_no_tensors,
)


def _after(case: MetricCase, metric: Any, part: Rows) -> dict[str, Any]:
    accumulate(metric, [part])
    return compared(case, metric.calculate())


def _on_two_ranks(build: Callable[[], Any], first: list[Rows], second: list[Rows]) -> Mapping[str, Any]:
    """Return what rank 0 of two gives, with `gather_results` as the two would answer it."""
    other = build()
    accumulate(other, second)
    sent: list[Any] = []

    def send(results: list[Any]) -> list[Any]:
        sent.extend(copy.deepcopy(results))
        return results

    other.gather_results = send
    other.calculate()
    if not sent:
        raise Violation("calculate() never calls gather_results, so on several ranks each gives its own numbers")
    metric = build()
    accumulate(metric, first)
    metric.gather_results = lambda results: [*results, *sent]
    values: Mapping[str, Any] = metric.calculate()
    return values


def _counted(inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """Return outputs with the loss of these rows."""
    labels = inputs["labels"]
    if "logps" in outputs:
        count, total = float((labels != _IGNORED).sum()), -float(outputs["logps"].sum())
    else:
        count, total = float(len(labels)), float(len(labels)) * 0.5
    loss = total / count if count else 0.0
    return {**outputs, "loss_sum": total, "num_tokens": count, "loss": loss, "loss_metrics": {"extra": 2.0 * count}}


def _rows(part: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    return {name: value[start:end] if hasattr(value, "shape") else value for name, value in part.items()}


def _cut(arguments: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return rows of arguments; a mapping holds further ones."""
    return {
        name: _cut(value, start, end) if isinstance(value, Mapping) else value[start:end]
        for name, value in arguments.items()
    }


def _is_float_tensor(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _tensors(value: Any) -> list[Any]:
    from twinkle_testing.contracts.values import leaves

    return [leaf for leaf in leaves(value) if hasattr(leaf, "requires_grad")]
