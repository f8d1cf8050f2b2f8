"""The loss of a pass: its call and its result, its backward, and the numbers that metrics see."""

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
from twinkle_transformers.group import OptimizerGroup, Pass, Status
from twinkle_transformers.rows import rows_together
from twinkle_transformers.token_scores import IGNORE, Needs, has_targets

_OF_THE_CALL = ("inputs", "adapter_name", "micro_batch_size", "temperature", "return_logits", "task")
"""Arguments of `forward_backward` beside those of the loss."""

_TAKES_A_BATCH: WeakSet[type[Loss]] = WeakSet()
"""Losses that need no more than inputs and outputs: reading a signature takes as long as the loss of a short row."""

_ASKED_BY = {
    "logps": "a language model makes it for task='causal_lm', unless {loss}.require_logps is False",
    "logits": "say {loss}.require_logits = True (a function takes such an attribute as a class does)",
    "entropies": "say {loss}.require_entropy = True (a function takes such an attribute as a class does)",
    "uniform_logps": "say {loss}.require_uniform_logps = True (a function takes such an attribute as a class does)",
    "embeddings": "call forward_backward(task='embedding')",
}
"""How an output that the forward makes on request only is asked for."""


def check_loss_arguments(loss: Any, loss_kwargs: Mapping[str, Any], *, partial: bool = False) -> None:
    """Refuse an argument that the loss does not take, and a call without one that it needs.

    Args:
        loss: whose.
        loss_kwargs: the arguments of the call.
        partial: these are some of them, so that none is missed.

    Raises:
        ArgumentError: names the argument, and for an unknown one the nearest that exists.
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


def check_rows_for(loss: Any, sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse micro-batches that the loss cannot use, before any of them was computed.

    Args:
        loss: whose.
        sizes: rows and padded length of each.

    Raises:
        ArgumentError: a micro-batch does not hold whole groups of rows that belong together.
        DataError: there are no rows, and the loss compares rows of all ranks: the others would wait for it.
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
    """Return the name of a loss, be it an object or a function."""
    return getattr(loss, "__name__", type(loss).__name__)


def start_loss(
    loss: Any, inputs: InputBatch, outputs: ModelOutput, kwargs: Mapping[str, Any]
) -> Callable[[], Any] | None:
    """Begin a loss that is computed in another process; None for one that `call_loss` computes here."""
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
        split: whether the call that this micro-batch belongs to has several; a mean cannot be added up then.
        several_ranks: whether other ranks have rows of the same step.
        started: waits for the result of a loss that `start_loss` has begun.
        **kwargs: the loss's arguments, cut to these rows.

    Raises:
        ArgumentError: the loss compares rows with each other, and the call has several micro-batches.
        ComponentTypeError: the loss reads an output that it did not ask for, or returned something that cannot be
            summed and divided.
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
    result = raw if isinstance(raw, LossOutput) else _older(raw, loss_name(loss), inputs, split, several_ranks)
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
    """Return the error for a loss that reads an output which the forward makes on request only."""
    wanted = str(error.args[0]) if error.args else ""
    if wanted in outputs or wanted not in _ASKED_BY:
        return None
    name, available = loss_name(loss), ", ".join(sorted(outputs)) or "nothing"
    return ComponentTypeError(
        f"loss {name} raised KeyError: {wanted!r}; the forward made {available}. "
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
            f"loss {name} returned {{{', '.join(map(repr, raw))}}} without 'num_tokens', so nobody knows what its sum "
            "is divided by; return LossOutput(loss_sum, denominator), or {'loss': sum, 'num_tokens': count} (0 where "
            "'loss' is a mean already)"
        )
    count = float(raw["num_tokens"])
    if count > 0:
        return LossOutput(raw["loss"], count)
    if has_targets(labels := inputs.get("labels")) and not bool((labels != IGNORE).any()):
        return LossOutput(raw["loss"], 0.0)  # these rows train nothing: it counted right, and is no mean
    if split or several_ranks:
        parts, do = ("micro-batches", ", or call without micro_batch_size") if split else ("ranks", "")
        raise ComponentTypeError(
            f"loss {name} returned a mean (num_tokens = 0), and a mean of {parts} is not the mean of the batch; "
            f"return LossOutput(loss_sum, denominator){do}"
        )
    return LossOutput(raw["loss"], 1.0)


_PADDING = {"predictions": IGNORE}


def needs_of(group: OptimizerGroup, status: Status, return_logits: bool, task: str = "causal_lm") -> Needs:
    """Return what a forward must prepare for the group's loss and metrics."""
    return needs_for(group.loss_instance, status.metrics, status is group.train_status, return_logits, task)


def needs_for(
    loss: Any, metrics: Iterable[Any], training: bool, return_logits: bool, task: str, *, fuses: bool = True
) -> Needs:
    """Return what a forward must prepare for a loss (None: for none) and metrics; `fuses` lets the loss fuse itself."""
    return Needs(
        logits=return_logits or (bool(getattr(loss, "require_logits", False)) and task != "embedding"),
        logps=bool(getattr(loss, "require_logps", True)),
        entropies=bool(getattr(loss, "require_entropy", False)),
        uniform_logps=bool(getattr(loss, "require_uniform_logps", False)),
        predictions=any(getattr(metric, "require_predictions", False) for metric in metrics),
        embeddings=task == "embedding",
        # Whoever asks for a forward without training may want the log-probability of every label.
        skip_weight_zero=training and bool(getattr(loss, "skips_weight_zero", False)),
        chunk_tokens=getattr(loss, "chunk_tokens", None),
        softcap=getattr(loss, "softcap", None),
        fuse=getattr(loss, "fuse", None) if training and fuses else None,
    )


def score(loss: Any, item: Pass, *, split: bool, several_ranks: bool, loss_kwargs: dict[str, Any]) -> None:
    """Calculate the loss of one pass and keep it there; `split` and `several_ranks` are those of `call_loss`."""
    calculate(loss, item, split=split, several_ranks=several_ranks, loss_kwargs=loss_kwargs)
    if item.loss is not None:
        write_numbers(item, float(item.loss.loss_sum.detach()))


def start(loss: Any, item: Pass, loss_kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Begin the loss of one pass if it is computed in another process; `calculate` waits for it."""
    return None if item.inputs.get("labels") is None else start_loss(loss, item.inputs, item.outputs, loss_kwargs)


def calculate(
    loss: Any, item: Pass, *, split: bool, several_ranks: bool, loss_kwargs: dict[str, Any],
    started: Callable[[], Any] | None = None,
) -> None:  # fmt: skip
    """Calculate the loss of one pass without waiting for the device; `started` is what `start` returned."""
    if item.inputs.get("labels") is None:
        raise TrainingStateError(
            "calculate_loss: the rows have no `labels`; encode them with a template, or give features with labels"
        )
    item.loss_kwargs = loss_kwargs
    how = {"split": split, "several_ranks": several_ranks}
    item.loss = call_loss(loss, item.inputs, item.outputs, **how, started=started, **loss_kwargs)


def write_numbers(item: Pass, value: float) -> None:
    """Put the numbers of a calculated loss, whose sum is `value`, into the outputs of its pass."""
    if item.loss is None:
        return
    count = float(item.loss.denominator)
    item.outputs["loss_sum"], item.outputs["num_tokens"] = value, count
    item.outputs["loss"] = value / count if count else 0.0
    item.outputs["loss_metrics"] = {name: float(number) for name, number in item.loss.metrics.items()}


def check_finite(group: OptimizerGroup, item: Pass, policy: str, agree: Callable[[bool], bool]) -> None:
    """Leave a pass out, or stop, as `policy` says, when its loss is not finite.

    Args:
        group: whose pass.
        item: the pass, scored.
        policy: "raise" or "skip".
        agree: says whether this rank can count its pass, and returns whether it is counted; ranks in lockstep do it
            together.

    Raises:
        NonFiniteError: with the rows of the pass; the pending gradients of the step are gone.
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
            f"{what}; the weights are untouched and the batch is in this error's `inputs` "
            "(on_nonfinite='skip' leaves such micro-batches out)",
            item.rows,
        )
    group.train_status.skipped += 1
    group.skipped += 1
    get_logger().warning("%s; this micro-batch of %d rows is left out", what, len(item.rows))


def leave_to_others(group: OptimizerGroup, policy: str) -> None:
    """Stop, if `policy` says so, with the rank whose loss is not finite, which says which one it is.

    Raises:
        NonFiniteError: without rows; the pending gradients of the step are gone.
    """
    if policy == "raise":
        group.drop_passes()
        raise NonFiniteError(
            f"{loss_name(group.loss_instance)} of adapter {group.adapter_name!r} is not finite on another rank at step "
            f"{group.updates + 1}, whose error has the rows; the weights are untouched"
        )


def backward(group: OptimizerGroup, item: Pass) -> None:
    """Add the gradient of one scored pass; its graph is freed."""
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
    """Let go of the graph of a pass; its outputs stay, but whole logits only if `logits`, or if they are all there is.

    A loss that requires logits has seen them: those of all micro-batches together would not be bounded.
    """
    drop = () if logits or "logps" not in item.outputs else ("logits",)
    item.outputs = {k: _detached(v) for k, v in item.outputs.items() if k not in drop}  # type: ignore[assignment]


def settle(item: Pass) -> Pass:
    """Return what metrics may keep of a pass: outputs without graph, no whole logits (a teacher's neither), no rows."""
    outputs: Any = {k: _detached(v) for k, v in item.outputs.items() if k != "logits"}
    arguments = {k: v for k, v in item.loss_kwargs.items() if k != "teacher_logits"}
    return Pass(item.inputs, outputs, [], None, arguments, item.step)


def feed_metrics(group: OptimizerGroup, status: Status) -> None:
    """Give every metric the passes that it has not seen, with the numbers of the step that they belong to."""
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
    if any(t.ndim == 3 for t in tensors):  # of several targets a position, perhaps not as many in each
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
