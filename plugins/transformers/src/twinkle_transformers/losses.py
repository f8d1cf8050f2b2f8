"""The loss of a pass: its call and its result, its backward, and the numbers that metrics see."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, NonFiniteError, TrainingStateError
from twinkle.logging import get_logger
from twinkle.loss import Loss
from twinkle_registry import check_keywords, nearest
from twinkle_transformers.backbone import IGNORE, Needs, has_targets
from twinkle_transformers.batches import rows_together
from twinkle_transformers.group import OptimizerGroup, Pass, Status

_OF_THE_CALL = ("inputs", "adapter_name", "micro_batch_size", "temperature", "return_logits", "task")
"""Arguments of `forward_backward` beside those of the loss."""

REWARDS = "rewards"
"""An argument of `forward_backward` with a number for each row, which a service records with it."""

_TAKES_A_BATCH: WeakSet[type[Loss]] = WeakSet()
"""Losses that take only inputs and outputs; cached, because inspecting a signature costs as much as a small loss."""

_ASKED_BY = {
    "logps": "a language model computes them for task='causal_lm', unless {loss}.require_logps is False",
    "logits": "set {loss}.require_logits = True (on a function or a class)",
    "entropies": "set {loss}.require_entropy = True (on a function or a class)",
    "uniform_logps": "set {loss}.require_uniform_logps = True (on a function or a class)",
    "embeddings": "call forward_backward(task='embedding')",
}
"""How to request an output that the forward computes only on request."""


def check_loss_arguments(loss: Any, loss_kwargs: Mapping[str, Any], *, partial: bool = False) -> None:
    """Refuse an argument that the loss does not take, and a call without a required one.

    Args:
        loss: the loss.
        loss_kwargs: the arguments of the call.
        partial: do not check for missing arguments.

    Raises:
        ArgumentError: an argument is unknown (the message suggests the nearest) or missing.
    """
    if not loss_kwargs and type(loss) in _TAKES_A_BATCH:
        return
    try:
        check_keywords(loss, loss_kwargs, args=(None, None), what=f"the loss {loss_name(loss)}", partial=partial)
    except ArgumentError as error:
        for name in (name for name in loss_kwargs if repr(name) in str(error)):
            if close := nearest(name, _OF_THE_CALL, 1):
                raise ArgumentError(f"there is no argument {name!r}; did you mean {close[0]!r}? ({error})") from error
        raise
    if isinstance(loss, Loss) and not loss_kwargs and not partial:
        _TAKES_A_BATCH.add(type(loss))


def given_to(losses: Sequence[Any], arguments: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """Return the arguments of a call for its losses: `rewards` that none takes are for the records of a service.

    Args:
        losses: of the call.
        arguments: of the call.
        rows: number of its rows.

    Raises:
        ArgumentError: `rewards` is not one finite number for each row.
    """
    if REWARDS not in arguments or any(takes(loss, REWARDS) for loss in losses):
        return arguments
    try:
        rewards = [float(value) for value in arguments[REWARDS]]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{REWARDS} must be a list of numbers, one for each row: {error}") from error
    if len(rewards) != rows or not all(map(math.isfinite, rewards)):
        raise ArgumentError(f"{REWARDS} must be one finite number for each of {rows} rows, got {len(rewards)}")
    return {name: value for name, value in arguments.items() if name != REWARDS}


def takes(loss: Any, name: str) -> bool:
    """Return whether a loss has an argument."""
    try:
        check_keywords(loss, {name: None}, args=(None, None), what="", partial=True)
    except ArgumentError:
        return False
    return True


def check_rows_for(loss: Any, sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse micro-batches that the loss cannot use, before any of them is computed.

    Args:
        loss: the loss.
        sizes: rows and padded length of each micro-batch.

    Raises:
        ArgumentError: a micro-batch does not hold whole groups of rows that belong together.
        DataError: there are no rows, and the loss compares rows of all ranks, which would wait for this one.
    """
    if not sizes and not getattr(loss, "splittable", True):
        raise DataError(
            f"this rank has no rows, and {loss_name(loss)} compares the rows of all ranks; give every rank some "
            "(DataLoader drops a last batch that is smaller than the number of data ranks)"
        )
    together = rows_together(loss)
    for rows, _ in sizes:
        if rows % together:
            raise ArgumentError(
                f"{loss_name(loss)} needs {together} consecutive rows together, but "
                f"{'a micro-batch' if len(sizes) > 1 else 'the batch'} has {rows}; give whole groups of {together} "
                f"rows, and a micro_batch_size of at least {together}"
            )


def loss_name(loss: Any) -> str:
    """Return the name of a loss, which may be an object or a function."""
    return getattr(loss, "__name__", type(loss).__name__)


def start_loss(
    loss: Any, inputs: InputBatch, outputs: ModelOutput, kwargs: Mapping[str, Any]
) -> Callable[[], Any] | None:
    """Start a loss that another process computes; return None for a loss of this process."""
    return loss.start(inputs, outputs, **kwargs) if isinstance(loss, Loss) else None


def call_loss(
    loss: Any, inputs: InputBatch, outputs: ModelOutput, *, split: bool, several_ranks: bool = False,
    started: Callable[[], Any] | None = None, **kwargs: Any,
) -> LossOutput:  # fmt: skip
    """Compute a loss on one micro-batch.

    Args:
        loss: a `Loss` or a callable of its signature.
        inputs: the collated micro-batch, on the device of the outputs.
        outputs: the forward's outputs.
        split: whether the call has several micro-batches; means of micro-batches cannot be added.
        several_ranks: whether other ranks have rows of the same step; means of ranks cannot be added either.
        started: waits for the result of a loss that `start_loss` has begun.
        **kwargs: the loss's arguments, cut to these rows.

    Raises:
        ArgumentError: the loss compares rows with each other, and the call has several micro-batches.
        ComponentTypeError: the loss reads an output that it did not request, or its result cannot be summed and
            divided.
    """
    if split and not getattr(loss, "splittable", True):
        raise ArgumentError(
            f"the loss {loss_name(loss)} compares all rows of a batch with each other, but micro_batch_size cut the "
            "batch; leave micro_batch_size out"
        )
    try:
        raw = loss(inputs, outputs, **kwargs) if started is None else started()
    except KeyError as error:
        if (explained := _not_made(error, loss, outputs)) is None:
            raise
        raise explained from error
    done = isinstance(raw, LossOutput) and not raw.is_mean
    result = raw if done else _older(raw, loss_name(loss), inputs, split, several_ranks)
    total = result.loss_sum
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        description = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else f"a {type(total).__name__}"
        raise ComponentTypeError(
            f"loss {loss_name(loss)} returned loss_sum of {description}; it must be a scalar tensor"
        )
    if not float(result.denominator) >= 0:
        raise ComponentTypeError(
            f"loss {loss_name(loss)} returned denominator {result.denominator}; it must be a number of at least 0"
        )
    return result


def _not_made(error: KeyError, loss: Any, outputs: ModelOutput) -> ComponentTypeError | None:
    """Return the error for a loss that reads an output without requesting it; None for other errors."""
    wanted = str(error.args[0]) if error.args else ""
    if wanted in outputs or wanted not in _ASKED_BY:
        return None
    name, available = loss_name(loss), ", ".join(sorted(outputs)) or "nothing"
    return ComponentTypeError(
        f"loss {name} raised KeyError: {wanted!r}; the forward computed {available}. "
        f"For outputs[{wanted!r}]: {_ASKED_BY[wanted].format(loss=name)}"
    )


def _older(raw: Any, name: str, inputs: InputBatch, split: bool, several_ranks: bool) -> LossOutput:
    if not isinstance(raw, Mapping) or "loss" not in raw:
        raise ComponentTypeError(
            f"loss {name} returned a {type(raw).__name__}; return LossOutput(loss_sum, denominator), "
            "or the older {'loss': sum, 'num_tokens': count}"
        )
    if raw.get("num_tokens") is None:
        raise ComponentTypeError(
            f"loss {name} returned {{{', '.join(map(repr, raw))}}} without 'num_tokens', the denominator of its "
            "sum; return LossOutput(loss_sum, denominator), or {'loss': sum, 'num_tokens': count} (0 where "
            "'loss' is a mean already)"
        )
    count, metrics = float(raw["num_tokens"]), getattr(raw, "metrics", None)
    if count > 0:
        return LossOutput(raw["loss"], count, metrics)
    if has_targets(labels := inputs.get("labels")) and not bool((labels != IGNORE).any()):
        return LossOutput(
            raw["loss"], 0.0, metrics
        )  # no label is trained: the count is correct, and the loss is not a mean
    if split or several_ranks:
        parts, do = ("micro-batches", ", or call without micro_batch_size") if split else ("ranks", "")
        raise ComponentTypeError(
            f"loss {name} returned a mean (num_tokens = 0), and a mean of {parts} is not the mean of the batch; "
            f"return LossOutput(loss_sum, denominator){do}"
        )
    return LossOutput(raw["loss"], 1.0, metrics)


_PADDING = {"predictions": IGNORE, "routed_experts": -1}


def needs_of(group: OptimizerGroup, status: Status, return_logits: bool, task: str = "causal_lm") -> Needs:
    """Return what a forward must compute for the group's loss and metrics."""
    return needs_for(group.loss_instance, status.metrics, status is group.train_status, return_logits, task)


def needs_for(
    loss: Any, metrics: Iterable[Any], training: bool, return_logits: bool, task: str, *, fuses: bool = True
) -> Needs:
    """Return what a forward must compute for a loss (or None) and metrics; `fuses` allows a fused loss."""
    return Needs(
        logits=return_logits or (bool(getattr(loss, "require_logits", False)) and task != "embedding"),
        logps=bool(getattr(loss, "require_logps", True)),
        entropies=bool(getattr(loss, "require_entropy", False)),
        uniform_logps=bool(getattr(loss, "require_uniform_logps", False)),
        predictions=any(getattr(metric, "require_predictions", False) for metric in metrics),
        embeddings=task == "embedding",
        # Without training, the caller may need the log-probability of every label.
        skip_weight_zero=training and bool(getattr(loss, "skips_weight_zero", False)),
        chunk_tokens=getattr(loss, "chunk_tokens", None),
        softcap=getattr(loss, "softcap", None),
        fuse=getattr(loss, "fuse", None) if training and fuses else None,
    )


def score(loss: Any, item: Pass, *, split: bool, several_ranks: bool, loss_kwargs: dict[str, Any]) -> None:
    """Calculate the loss of one pass and store it; `split` and `several_ranks` are those of `call_loss`."""
    calculate(loss, item, split=split, several_ranks=several_ranks, loss_kwargs=loss_kwargs)
    if item.loss is not None:
        write_numbers(item, float(item.loss.loss_sum.detach()))


def start(loss: Any, item: Pass, loss_kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Start the loss of one pass if another process computes it; `calculate` waits for it."""
    return None if item.inputs.get("labels") is None else start_loss(loss, item.inputs, item.outputs, loss_kwargs)


def calculate(
    loss: Any, item: Pass, *, split: bool, several_ranks: bool, loss_kwargs: dict[str, Any],
    started: Callable[[], Any] | None = None,
) -> None:  # fmt: skip
    """Calculate the loss of one pass without synchronizing the device; `started` is the result of `start`."""
    if item.inputs.get("labels") is None:
        raise TrainingStateError(
            "calculate_loss: the rows have no `labels`; encode them with a template, or give features with labels"
        )
    item.loss_kwargs = loss_kwargs
    how = {"split": split, "several_ranks": several_ranks}
    item.loss = call_loss(loss, item.inputs, item.outputs, **how, started=started, **loss_kwargs)


def write_numbers(item: Pass, value: float) -> None:
    """Add the values of a calculated loss, whose sum is `value`, to the outputs of its pass."""
    if item.loss is None:
        return
    count = float(item.loss.denominator)
    item.outputs["loss_sum"], item.outputs["num_tokens"] = value, count
    item.outputs["loss"] = value / count if count else 0.0
    item.outputs["loss_metrics"] = {name: float(number) for name, number in item.loss.metrics.items()}


def check_finite(group: OptimizerGroup, item: Pass, policy: str, agree: Callable[[bool], bool]) -> None:
    """Raise an error, or leave a pass out, if its loss is not finite.

    Args:
        group: training state of the adapter.
        item: the scored pass.
        policy: "raise" or "skip".
        agree: takes whether the pass is usable on this rank, and returns whether it is counted; ranks in lockstep
            decide together.

    Raises:
        NonFiniteError: has the rows of the pass; the pending gradients of the step are discarded.
    """
    value = item.outputs["loss_sum"]
    finite = value - value == 0.0
    item.usable = agree(finite)
    if item.usable:
        return
    if finite:
        leave_to_others(group, policy)
        return
    what = f"{loss_name(group.loss_instance)} of adapter {group.adapter_name!r} is {value} at step {group.updates + 1}"
    if policy == "raise":
        group.drop_passes()
        raise NonFiniteError(
            f"{what}; the weights are unchanged and the batch is in this error's `inputs` "
            "(on_nonfinite='skip' leaves such micro-batches out)",
            item.rows,
        )
    group.train_status.skipped += 1
    group.skipped += 1
    get_logger().warning("%s; this micro-batch of %d rows is left out", what, len(item.rows))


def leave_to_others(group: OptimizerGroup, policy: str) -> None:
    """Raise an error, if `policy` is "raise", because the loss of another rank is not finite.

    Raises:
        NonFiniteError: has no rows; the pending gradients of the step are discarded.
    """
    if policy == "raise":
        group.drop_passes()
        raise NonFiniteError(
            f"{loss_name(group.loss_instance)} of adapter {group.adapter_name!r} is not finite on another rank at step "
            f"{group.updates + 1}; the error on that rank has the rows; the weights are unchanged"
        )


def backward(group: OptimizerGroup, item: Pass) -> None:
    """Add the gradient of one scored pass, and free its graph."""
    loss = item.loss
    if loss is None:
        raise TrainingStateError(
            "backward: no loss was calculated; call calculate_loss() (or forward_backward()) first"
        )
    if not loss.loss_sum.requires_grad:
        raise TrainingStateError(
            f"backward: the result of {loss_name(group.loss_instance)} has no gradient; was it detached, or is nothing "
            "trainable?"
        )
    total = loss.loss_sum if group.loss_scale is None else group.loss_scale.scale(loss.loss_sum)
    total.backward()
    group.denominator += float(loss.denominator)
    item.loss = None


def detach(item: Pass, *, logits: bool = True) -> None:
    """Free the graph of a pass and keep its outputs, but whole logits only if `logits`, or without log-probabilities.

    Logits are dropped to bound memory: those of all micro-batches of a call together may not fit.
    """
    drop = () if logits or "logps" not in item.outputs else ("logits",)
    item.outputs = {k: _detached(v) for k, v in item.outputs.items() if k not in drop}  # type: ignore[assignment]


def settle(item: Pass) -> Pass:
    """Return a copy of a pass for metrics: outputs without graph, and neither whole logits nor rows."""
    outputs: Any = {k: _detached(v) for k, v in item.outputs.items() if k != "logits"}
    arguments = {k: v for k, v in item.loss_kwargs.items() if k != "teacher_logits"}
    return Pass(item.inputs, outputs, [], None, arguments, item.step)


def feed_metrics(group: OptimizerGroup, status: Status) -> None:
    """Add new passes to every metric, with the learning rate and gradient norm of their step."""
    if not status.unseen:
        return
    training = status is group.train_status
    known: dict[str, Any] = {"gradient_accumulation_steps": group.gradient_accumulation_steps}
    if training and group.optimizer is not None:
        known |= {"lr": group.learning_rates(), "iterations": group.updates}
        known["grad_norm"] = group.last_grad_norm if group.measured else None  # not that of an earlier step
    for item in status.unseen:
        for metric in status.metrics:
            metric.accumulate(item.inputs, item.outputs, **known, step=item.step, **item.loss_kwargs)
    status.unseen.clear()


def join(outputs: Sequence[ModelOutput], *, left: bool = False) -> ModelOutput:
    """Join micro-batches along the rows: tensors are padded to one width and concatenated, sums are added.

    Args:
        outputs: one output a micro-batch.
        left: whether the rows are padded on the left, so that the outputs must be too.
    """
    joined: dict[str, Any] = {}
    for key in outputs[0]:
        values: list[Any] = [output[key] for output in outputs]  # type: ignore[literal-required]
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            joined[key] = _concatenate([value.detach() for value in values], _PADDING.get(key, 0), left)
    if "loss_sum" in outputs[0]:
        joined |= {"loss": loss_of(outputs), "num_tokens": sum(output["num_tokens"] for output in outputs)}
    return joined  # type: ignore[return-value]


def loss_of(outputs: Sequence[ModelOutput]) -> float:
    """Return the sum of the losses over the sum of their denominators; 0 if nothing was counted."""
    count = sum(output["num_tokens"] for output in outputs)
    return sum(output["loss_sum"] for output in outputs) / count if count else 0.0


def _concatenate(tensors: Sequence[torch.Tensor], fill: int, left: bool) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    if tensors[0].ndim > 1:
        width = max(t.shape[1] for t in tensors)
        tensors = [_widen(t, width, fill, left) for t in tensors]
    if any(t.ndim == 3 for t in tensors):  # micro-batches may have different numbers of targets a position
        tensors = [t[..., None] if t.ndim == 2 else t for t in tensors]
        most = max(t.shape[2] for t in tensors)
        tensors = [nn.functional.pad(t, (0, most - t.shape[2]), value=fill) for t in tensors]
    return torch.cat(list(tensors))


def _widen(tensor: torch.Tensor, width: int, fill: int, left: bool) -> torch.Tensor:
    missing = width - tensor.shape[1]
    sides = [missing, 0] if left else [0, missing]
    return tensor if not missing else nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 2) + sides, value=fill)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def settled(items: Iterable[Pass]) -> list[Pass]:
    """Return the settled form of each pass."""
    return [settle(item) for item in items]
