"""Calling a loss and reading what it returns, older forms included."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, ComponentTypeError, DataError
from twinkle.loss import Loss
from twinkle_registry import check_keywords, nearest
from twinkle_transformers.rows import rows_together
from twinkle_transformers.scores import IGNORE, has_targets

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
    loss: Any, inputs: InputBatch, outputs: ModelOutput, *, split: bool, spread: bool = False,
    started: Callable[[], Any] | None = None, **kwargs: Any,
) -> LossOutput:  # fmt: skip
    """Compute a loss on one micro-batch.

    Args:
        loss: a `Loss` or a callable of its signature.
        inputs: the collated micro-batch, on the device of the outputs.
        outputs: the forward's outputs.
        split: whether the call that this micro-batch belongs to has several; a mean cannot be added up then.
        spread: whether other ranks have rows of the same step; likewise.
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
    result = raw if isinstance(raw, LossOutput) else _older(raw, loss_name(loss), inputs, split, spread)
    total = result.loss_sum
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        found = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else f"a {type(total).__name__}"
        raise ComponentTypeError(f"loss {loss_name(loss)} returned loss_sum of {found}; it must be a scalar tensor")
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
    name, made = loss_name(loss), ", ".join(sorted(outputs)) or "nothing"
    return ComponentTypeError(
        f"loss {name} raised KeyError: {wanted!r}; the forward made {made}. "
        f"For outputs[{wanted!r}]: {_ASKED_BY[wanted].format(loss=name)}"
    )


def _older(raw: Any, name: str, inputs: InputBatch, split: bool, spread: bool) -> LossOutput:
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
    if split or spread:
        parts, do = ("micro-batches", ", or call without micro_batch_size") if split else ("ranks", "")
        raise ComponentTypeError(
            f"loss {name} returned a mean (num_tokens = 0), and a mean of {parts} is not the mean of the batch; "
            f"return LossOutput(loss_sum, denominator){do}"
        )
    return LossOutput(raw["loss"], 1.0)
