"""Contract checks of losses: sum and denominator are exact for any padding, masking and split of the rows."""

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from twinkle.data_format import LossOutput
from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import same, shown

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _WIDTH, _VOCABULARY = 4, 6, 11
_IGNORED = -100
_TOLERANCE = 1e-9  # for float64 sums of a few dozen terms in any order


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of a loss.

    Attributes:
        inputs: the collated batch; tensors begin with the dimension of the rows.
        outputs: outputs of the forward; those of a float dtype are differentiated.
        arguments: per-row arguments of the call.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def mapped(self, change: Any) -> "Batch":
        """Return the batch with each tensor replaced by `change(name, tensor)`."""
        parts = [
            {name: change(name, value) if _is_tensor(value) else value for name, value in part.items()}
            for part in (self.inputs, self.outputs, self.arguments)
        ]
        return Batch(*parts)

    def rows(self, chosen: Any) -> "Batch":
        """Return some of the rows, given as a slice or a list of indices."""
        return self.mapped(lambda name, tensor: tensor[chosen] if tensor.dim() else tensor)


@dataclass(kw_only=True)
class LossCase(Case):
    """A loss and its batch.

    Attributes:
        inputs: the collated batch, tensors with one entry per row; by default `labels` `[4, 6]` with -100 among them
            (more rows if `rows_together` of the loss requires them).
        outputs: outputs of the forward, one entry per row; by default `logps` and those that the class attributes
            request.
        row_inputs: per-row arguments of the call; those that it does not name are generated from the manifest's
            `inputs`. None leaves an argument out.
    """

    kind = "loss"

    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    row_inputs: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, seed: int = 0) -> Batch:
        """Return the batch in float64; another seed gives other outputs and arguments, for the same inputs."""
        import torch

        draw = torch.Generator().manual_seed(seed)
        loss = self.build()
        inputs = {"labels": _labels(_together(loss))} | dict(self.inputs)
        outputs = dict(self.outputs) or _outputs(loss, inputs["labels"], draw)
        declared = {name: text for name, text in self.declared.items() if name not in self.row_inputs}
        arguments = {name: _argument(name, text, inputs["labels"], draw) for name, text in declared.items()}
        given = {name: value for name, value in self.row_inputs.items() if value is not None}
        batch = Batch(inputs, outputs, arguments | given)
        missing = [name for name in getattr(loss, "row_inputs", ()) if name not in batch.arguments]
        if missing:
            raise Violation(
                f"row_inputs names {', '.join(missing)}, whose shape is not known; declare them in the manifest, as "
                f'inputs = {{ {missing[0]} = "float32[T]" }}, or give row_inputs= in the example'
            )
        batch = batch.mapped(lambda name, tensor: tensor.double() if tensor.is_floating_point() else tensor)
        return batch if seed == 0 else _shaken(batch, draw)

    def token_batch(self) -> Batch:
        """Return the batch if its labels belong to tokens."""
        batch = self.batch()
        if getattr(batch.inputs["labels"], "dim", int)() != 2 or batch.inputs["labels"].is_floating_point():
            raise NotApplicable("its labels belong to whole rows, not to tokens")
        return batch


def call(loss: Any, batch: Batch) -> LossOutput:
    """Return the output of the loss; the older form `{"loss": ..., "num_tokens": n}` is accepted too."""
    found = loss(dict(batch.inputs), dict(batch.outputs), **batch.arguments)
    if isinstance(found, LossOutput):
        return found
    if isinstance(found, Mapping) and found.get("num_tokens"):
        return LossOutput(found["loss"], found["num_tokens"])
    raise Violation(
        f"it returned {shown(found)}; return LossOutput(loss_sum, denominator), whose sum is not yet divided"
    )


class Numbers(NamedTuple):
    """Sum and denominator as plain numbers, with the precision of the loss: float64, or float32 if it casts."""

    loss_sum: float
    denominator: float
    precision: float


def numbers(output: LossOutput) -> Numbers:
    """Return the output of a loss as plain numbers."""
    exact = str(getattr(output.loss_sum, "dtype", "")) == "torch.float64"
    return Numbers(_number(output.loss_sum), _number(output.denominator), _TOLERANCE if exact else 1e-5)


def shape(case: LossCase) -> None:
    """It returns `LossOutput` with a scalar `loss_sum` that has a gradient."""
    found = call(case.build(), _with_gradient(case.batch()))
    shown = list(getattr(found.loss_sum, "shape", ["no tensor"]))
    require(shown == [], f"loss_sum must be a scalar tensor; its shape is {shown}")
    require(found.loss_sum.requires_grad, "loss_sum has no gradient; do not detach it, nor make a new tensor of it")


def denominator(case: LossCase) -> None:
    """Its `denominator` is a finite number of at least 0, without gradient."""
    count = call(case.build(), _with_gradient(case.batch())).denominator
    require(not getattr(count, "requires_grad", False), "denominator has a gradient; count outside the graph")
    size = getattr(count, "numel", lambda: 1)()
    require(size == 1, f"denominator must be one number; it has {size} elements")
    require(math.isfinite(_number(count)) and _number(count) >= 0, f"denominator is {_number(count)}")


def finite(case: LossCase) -> None:
    """The sum and its gradient are finite, in float32 too."""
    import torch

    batch = case.batch().mapped(lambda name, tensor: tensor.float() if tensor.is_floating_point() else tensor)
    found, gradients = _gradients(case.build(), batch)
    total = numbers(found).loss_sum
    require(math.isfinite(total), f"loss_sum is {total}")
    for name, gradient in gradients.items():
        require(bool(torch.isfinite(gradient).all()), f"the gradient by {name} is not finite")


def gradient(case: LossCase) -> None:
    """Its gradient is that of its value, by finite differences in float64 (float32 if it casts)."""
    import torch
    from torch.autograd.gradcheck import GradcheckError

    loss, batch = case.build(), case.batch()
    names = _differentiable(batch)

    def value(*tensors: "Tensor") -> "Tensor":
        made = Batch(batch.inputs, {**batch.outputs, **dict(zip(names, tensors, strict=True))}, batch.arguments)
        return call(loss, made).loss_sum

    leaves = tuple(batch.outputs[name].detach().clone().requires_grad_() for name in names)
    exact = value(*leaves).dtype == torch.float64
    # For a loss that casts to float32, use steps that are large compared with its rounding.
    eps, atol, rtol = (1e-6, 1e-5, 1e-3) if exact else (1e-2, 2e-2, 2e-2)
    try:
        torch.autograd.gradcheck(value, leaves, eps=eps, atol=atol, rtol=rtol)
    except GradcheckError as error:
        raise Violation(f"its gradient is not that of its value: {str(error).splitlines()[0]}") from error


def masked_positions(case: LossCase) -> None:
    """Values at labels of -100 do not affect sum and denominator, and have no gradient."""
    import torch

    batch = case.token_batch()
    masked = batch.inputs["labels"] == _IGNORED

    def disturbed(name: str, tensor: "Tensor") -> "Tensor":
        if name == "labels" or tensor.shape[:2] != masked.shape or not tensor.is_floating_point():
            return tensor
        changed = tensor.clone()
        changed[masked] = changed[masked] * 0.5 - 1.0
        return changed

    found, gradients = _gradients(case.build(), batch)
    _same(numbers(call(case.build(), batch.mapped(disturbed))), numbers(found), "after a change where labels are -100")
    for name, by in gradients.items():
        if by.shape[:2] == masked.shape:
            leaks = bool(torch.any(by[masked] != 0))
            require(not leaks, f"{name} has a gradient where labels are -100")


def padding(case: LossCase) -> None:
    """Rows padded to a greater width give the same sum and denominator."""
    batch = case.token_batch()
    width = batch.inputs["labels"].shape
    wider = batch.mapped(lambda name, tensor: _padded(name, tensor, width))
    _same(numbers(call(case.build(), wider)), numbers(call(case.build(), batch)), "with three columns of padding")


def token_zero(case: LossCase) -> None:
    """Token 0 is a label like any other: with the ids of two tokens exchanged, sum and denominator are the same."""
    batch = case.token_batch()
    labels = batch.inputs["labels"]
    other = max(int(labels.max()), 1)
    logits = batch.outputs.get("logits")
    if logits is not None and logits.shape[-1] <= other:
        raise NotApplicable("the labels of its example are not ids of its logits")

    def exchanged(name: str, tensor: "Tensor") -> "Tensor":
        if name in ("labels", "input_ids"):
            return tensor.clone().masked_fill_(tensor == 0, other).masked_fill_(tensor == other, 0)
        if name == "logits":
            columns = list(range(tensor.shape[-1]))
            columns[0], columns[other] = other, 0
            return tensor[..., columns]
        if tensor.dim() > 2:
            raise NotApplicable(f"the kit does not know how {name} depends on the ids of tokens")
        return tensor

    found = numbers(call(case.build(), batch.mapped(exchanged)))
    _same(found, numbers(call(case.build(), batch)), f"with tokens 0 and {other} exchanged (is only -100 left out?)")


def split(case: LossCase) -> None:
    """Sums, denominators and gradients over any split of the rows (between groups) add up to those of the whole."""
    import torch

    loss = case.build()
    if not getattr(loss, "splittable", True):
        raise NotApplicable("splittable is False: it compares rows with each other")
    batch = case.batch()
    whole, whole_gradients = _gradients(loss, batch)
    rows, together = len(batch.inputs["labels"]), _together(loss)
    if rows % together:
        raise Violation(f"its example has {rows} rows, but rows_together is {together}; give complete groups")
    each = [slice(row, row + together) for row in range(0, rows, together)]
    for parts in (each, [slice(0, together), slice(together, rows)] if rows > together else each):
        found = [_gradients(loss, batch.rows(part)) for part in parts]
        added = [sum(values) for values in zip(*(numbers(output)[:2] for output, _ in found), strict=True)]
        expected = numbers(whole)
        _same(expected._replace(loss_sum=added[0], denominator=added[1]), expected, f"added over {len(parts)} parts")
        for name, by in whole_gradients.items():
            joined = torch.cat([gradients[name] for _, gradients in found]) if by.dim() else by
            near = torch.allclose(joined, by, rtol=0, atol=expected.precision)
            require(near, f"the gradient by {name} over {len(parts)} parts is not that of the whole")


def nothing_to_train(case: LossCase) -> None:
    """Rows without labels give a sum of 0 and a finite gradient."""
    import torch

    batch = case.token_batch()
    empty = batch.mapped(lambda name, tensor: torch.full_like(tensor, _IGNORED) if name == "labels" else tensor)
    found, gradients = _gradients(case.build(), empty)
    total = numbers(found).loss_sum
    require(total == 0, f"loss_sum is {total} where every label is -100")
    for name, by in gradients.items():
        require(bool(torch.isfinite(by).all()), f"the gradient by {name} is not finite where every label is -100")


def weight_zero(case: LossCase) -> None:
    """With `skips_weight_zero`, positions with weight 0 do not have to be scored."""
    import torch

    loss = case.build()
    if not getattr(loss, "skips_weight_zero", False):
        raise NotApplicable("skips_weight_zero is not set")
    batch = case.token_batch()
    labels = batch.inputs["labels"]
    weights = torch.ones(labels.shape, dtype=torch.float64)
    weights[:, ::2] = 0.0
    weighted = Batch({**batch.inputs, "loss_scale": weights}, batch.outputs, batch.arguments)

    def unscored(name: str, tensor: "Tensor") -> "Tensor":
        scored = name in batch.outputs and tensor.shape[:2] == labels.shape
        return (
            torch.where(weights.reshape(*labels.shape, *[1] * (tensor.dim() - 2)) == 0, 0.0, tensor)
            if scored
            else tensor
        )

    _same(numbers(call(loss, weighted.mapped(unscored))), numbers(call(loss, weighted)), "without scores at weight 0")


def deterministic(case: LossCase) -> None:
    """The same call gives the same numbers, independent of the random generators."""
    import torch

    batch, found = case.batch(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(numbers(call(case.build(), batch)))
    require(found[0] == found[1], f"two calls gave {found[0]} and {found[1]}")


def inputs_left_alone(case: LossCase) -> None:
    """It does not change the batch and the outputs."""
    batch = case.batch()
    before = batch.mapped(lambda name, tensor: tensor.clone())
    call(case.build(), batch)
    for old, new in (
        (before.inputs, batch.inputs),
        (before.outputs, batch.outputs),
        (before.arguments, batch.arguments),
    ):
        for name, value in old.items():
            require(same(value, new[name]), f"it changed {name} in place")


def pickle(case: LossCase) -> None:
    """It can be pickled, and gives the same numbers in another process."""
    loss, batch = case.build(), case.batch()
    _same(numbers(call(pickled(loss), batch)), numbers(call(loss, batch)), "after pickling")


def tenants(case: LossCase) -> None:
    """It keeps no state between calls: calls of another tenant in between do not change its results."""
    first, second = case.batch(), case.batch(seed=7)
    alone = [numbers(call(case.build(), first)), numbers(call(case.build(), second))]
    loss, other = case.build(), case.build()
    found = [call(loss, first), call(loss, second), call(other, second), call(loss, first), call(other, first)]
    expected = [alone[0], alone[1], alone[1], alone[0], alone[0]]
    for place, (output, wanted) in enumerate(zip(found, expected, strict=True), 1):
        _same(numbers(output), wanted, f"in call {place} of five, of two tenants in turn")


def declared_inputs(case: LossCase) -> None:
    """Each declared per-row argument is used: it is optional, or its absence is an error that names it."""
    loss, batch = case.build(), case.batch()
    if not batch.arguments:
        raise NotApplicable("it declares no per-row arguments")
    for name in batch.arguments:
        rest = {key: value for key, value in batch.arguments.items() if key != name}
        try:
            call(loss, Batch(batch.inputs, batch.outputs, rest))
        except Exception as error:  # any error type is allowed, but its message must name the argument
            require(
                name in str(error), f"without {name} it says: {type(error).__name__}: {error}; the name must be in it"
            )
        else:
            require(
                _is_optional(loss, name), f"{name} is declared, but its absence is not an error; make it a parameter"
            )


CASE = LossCase
CHECKS = (
    shape,
    denominator,
    finite,
    gradient,
    masked_positions,
    padding,
    token_zero,
    split,
    nothing_to_train,
    weight_zero,
    deterministic,
    inputs_left_alone,
    pickle,
    tenants,
    declared_inputs,
)


def _together(loss: Any) -> int:
    return int(getattr(loss, "rows_together", 1))


def _labels(together: int) -> "Tensor":
    import torch

    rows = max(_ROWS, 2 * together)
    rows -= rows % together
    labels = torch.randint(0, _VOCABULARY, (rows, _WIDTH), generator=torch.Generator().manual_seed(1))
    labels[:, -1] = _IGNORED
    labels[0, 0] = labels[2, 1] = labels[2, 2] = _IGNORED
    return labels


def _outputs(loss: Any, labels: "Tensor", draw: "Any") -> dict[str, Any]:
    """Return the outputs that the class attributes request, consistent with each other."""
    import torch

    if labels.dim() != 2:
        raise Violation("its example gives labels of whole rows; give the outputs= that belong to them as well")
    logits = torch.randn((*labels.shape, _VOCABULARY), generator=draw, dtype=torch.float64)
    every = logits.log_softmax(-1)
    trained = labels != _IGNORED
    wanted: dict[str, Any] = {}
    if getattr(loss, "require_logps", True):
        wanted["logps"] = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * trained
    if getattr(loss, "require_entropy", False):
        wanted["entropies"] = -(every.exp() * every).sum(-1) * trained
    if getattr(loss, "require_uniform_logps", False):
        wanted["uniform_logps"] = every.mean(-1) * trained
    if getattr(loss, "require_logits", False):
        wanted["logits"] = logits
    if not wanted:
        raise Violation("it requests no outputs (require_logps, require_logits, ...); give outputs= in its example")
    return wanted


_TYPE = re.compile(r"(?P<dtype>float\d*|bfloat16|int\d*|bool)(\[(?P<dims>[^\]]*)\])?")


def _argument(name: str, text: str, labels: "Tensor", draw: "Any") -> "Tensor":
    """Return a per-row argument of the declared type: `float32` is `[B]`, `float32[T]` is `[B, T]`."""
    import torch

    match = _TYPE.fullmatch(text.replace(" ", ""))
    dims = (match["dims"] or "").strip() if match else "?"
    if match is None or dims not in ("", "T"):
        raise Violation(
            f"its manifest declares {name} = {text!r}, which the kit cannot make; give row_inputs= in its example"
        )
    size = tuple(labels.shape[: 2 if dims == "T" else 1])
    if match["dtype"].startswith(("float", "bfloat")):
        return torch.randn(size, generator=draw, dtype=torch.float64) * 0.3 - (0.5 if "log" in name else 0.0)
    return torch.randint(0, 2, size, generator=draw).to(getattr(torch, match["dtype"], torch.int64))


def _shaken(batch: Batch, draw: "Any") -> Batch:
    """Return a batch with other outputs, like that of another tenant."""
    import torch

    def other(name: str, tensor: "Tensor") -> "Tensor":
        return tensor * (1 + 0.1 * torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype))

    outputs = {
        name: other(name, value) if _is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.outputs.items()
    }
    return Batch(batch.inputs, outputs, batch.arguments)


def _differentiable(batch: Batch) -> list[str]:
    return [name for name, value in batch.outputs.items() if _is_tensor(value) and value.is_floating_point()]


def _with_gradient(batch: Batch) -> Batch:
    leaves = {name: batch.outputs[name].detach().clone().requires_grad_() for name in _differentiable(batch)}
    return Batch(batch.inputs, {**batch.outputs, **leaves}, batch.arguments)


def _gradients(loss: Any, batch: Batch) -> tuple[LossOutput, dict[str, "Tensor"]]:
    """Return the output and the gradient by each output of the forward, 0 where it is not used."""
    import torch

    ready = _with_gradient(batch)
    names = _differentiable(batch)
    found = call(loss, ready)
    leaves = [ready.outputs[name] for name in names]
    if not found.loss_sum.requires_grad:
        return found, {name: torch.zeros_like(leaf) for name, leaf in zip(names, leaves, strict=True)}
    parts = torch.autograd.grad(found.loss_sum, leaves, allow_unused=True)
    made = [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, parts, strict=True)]
    return found, dict(zip(names, made, strict=True))


def _padded(name: str, tensor: "Tensor", size: Any) -> "Tensor":
    import torch

    if tensor.shape[:2] != size:
        return tensor
    value = _IGNORED if name == "labels" else 0
    more = torch.full((size[0], 3, *tensor.shape[2:]), value, dtype=tensor.dtype)
    return torch.cat([tensor, more], dim=1)


def _same(found: Numbers, wanted: Numbers, when: str) -> None:
    for name in ("loss_sum", "denominator"):
        one, two = getattr(found, name), getattr(wanted, name)
        near = math.isclose(one, two, rel_tol=wanted.precision, abs_tol=wanted.precision)
        require(near, f"{when}, {name} is {one:.12g} instead of {two:.12g}")


def _is_optional(loss: Any, name: str) -> bool:
    parameters = inspect.signature(loss).parameters
    return name in parameters and parameters[name].default is not inspect.Parameter.empty


def _number(value: Any) -> float:
    return float(value.detach() if _is_tensor(value) else value)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "is_floating_point")
