"""What the metrics of an adapter hold, and the passes that they have not seen yet, as tensors and JSON data."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import CheckpointError
from twinkle_transformers.group import OptimizerGroup, Pass, Status
from twinkle_transformers.memory import host_copy
from twinkle_transformers.training_state import decode_state, encode_state

PREFIX: Final = "passes/"
"""Prefix of the names of tensors."""
_TENSOR, _LIST, _MAPPING = "tensor", "list", "mapping"


def take_metrics(group: OptimizerGroup, *, unseen: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an adapter's metrics.

    Args:
        group: training state of the adapter.
        unseen: include passes that metrics will see with the next step.

    Raises:
        CheckpointError: a metric holds something that JSON cannot represent.
    """
    tensors: dict[str, Tensor] = {}
    state = {}
    for name, status in _statuses(group):
        passes = status.unseen if unseen else []
        state[name] = {
            "skipped": status.skipped if unseen else 0,
            "metrics": [
                {"class": type(m).__name__, "state": encode_state(m.state_dict(), type(m).__name__)}
                for m in status.metrics
            ],
            "unseen": [_take(item, f"{PREFIX}{name}/{index}", tensors) for index, item in enumerate(passes)],
        }
    return tensors, state


def check_metrics(group: OptimizerGroup, state: Mapping[str, Any], where: str) -> None:
    """Check that an adapter has the metrics whose state is to be restored.

    Raises:
        CheckpointError: it has others.
    """
    for name, status in _statuses(group):
        own, saved = [type(m).__name__ for m in status.metrics], [m["class"] for m in state[name]["metrics"]]
        if own != saved:
            raise CheckpointError(f"{where} has the {name} metrics {saved}, the adapter has {own}; set the same first")


def put_metrics(group: OptimizerGroup, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Continue from the state that `take_metrics` returned, after `check_metrics`."""
    for name, status in _statuses(group):
        saved = state[name]
        for metric, entry in zip(status.metrics, saved["metrics"], strict=True):
            metric.load_state_dict(decode_state(entry["state"]))
        status.skipped = saved["skipped"]
        status.unseen = [_put(entry, tensors) for entry in saved["unseen"]]


def _statuses(group: OptimizerGroup) -> tuple[tuple[str, Status], tuple[str, Status]]:
    return ("train", group.train_status), ("eval", group.eval_status)


def _take(item: Pass, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    parts = {"inputs": dict(item.inputs), "outputs": dict(item.outputs), "loss_kwargs": item.loss_kwargs}
    return {"step": item.step} | {name: _flat(part, f"{prefix}/{name}", tensors) for name, part in parts.items()}


def _put(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Pass:
    inputs, outputs, arguments = (_built(entry[name], tensors) for name in ("inputs", "outputs", "loss_kwargs"))
    return Pass(inputs, outputs, [], None, arguments, entry["step"])


def _flat(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON data, and add its tensors under names that begin with `name`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(np.asarray(value))
    if isinstance(value, Tensor):
        tensors[name] = host_copy(value.detach().contiguous())
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {_MAPPING: {key: _flat(item, f"{name}/{key}", tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {_LIST: [_flat(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]}
    raise CheckpointError(f"cannot save {name}: it is a {type(value).__name__}")


def _built(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, Mapping):
        return value
    (kind, content) = next(iter(value.items()))
    if kind == _TENSOR:
        return tensors[content]
    if kind == _LIST:
        return [_built(item, tensors) for item in content]
    return {key: _built(item, tensors) for key, item in content.items()}
