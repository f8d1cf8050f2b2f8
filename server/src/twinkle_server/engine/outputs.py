"""What becomes of the outputs of a pass: the result for its client, and rows for the recorder."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twinkle.engine import Operation, OperationError, OperationResult
from twinkle_server.engine.errors import UserError, public_error
from twinkle_server.engine.losses.building import REWARDS, Rows
from twinkle_server.engine.recording import NO_TARGET, TrainedRow
from twinkle_server.wire import codec
from twinkle_server.wire.codec import Array


def output_of(
    outcome: OperationResult | OperationError, rows: Rows, code: Mapping[str, str] | None = None
) -> bytes | Exception:
    """Return the serialized `ForwardBackwardOutput` of an operation, or its error.

    Args:
        outcome: of the operation.
        rows: its rows.
        code: which code computed its loss, where that is not part of the service; see `Losses.code_of`.
    """
    if isinstance(outcome, OperationError):
        return public_error(outcome.error)
    logprobs = _logprobs(outcome, rows)
    if logprobs is None:
        return UserError("this loss does not return token logprobs; use another loss")
    metrics = dict(_metric(name, float(value), len(logprobs)) for name, value in outcome.metrics.items())
    metrics["loss:sum"] = float(outcome.loss_sum or 0.0)
    return codec.forward_backward_output([{"logprobs": array} for array in logprobs], metrics, _type_of(code))


def _type_of(code: Mapping[str, str] | None) -> str:
    """Return the type of a result's outputs, the one text in it that clients see: they cut it at the last colon."""
    if code is None:
        return codec.OUTPUT_TYPE
    return ";".join([codec.OUTPUT_TYPE, *(f"{name}={value.replace(':', '_')}" for name, value in code.items())])


def vectors_of(outcome: OperationResult) -> bytes:
    """Return the vectors of an operation's rows, as float32 `[N, H]` in one piece."""
    return bytes(np.stack([_floats(output["embeddings"]) for output in outcome.outputs]).tobytes())


def sums_of(outcome: OperationResult) -> tuple[float, Mapping[str, float]]:
    """Return the loss and the metrics of an operation, as sums over its rows."""
    return float(outcome.loss_sum or 0.0), {name: float(value) for name, value in outcome.metrics.items()}


def trained_rows(rows: Rows, outcome: OperationResult) -> list[TrainedRow]:
    """Return the rows of an operation for the recorder; rows with several targets per position only count."""
    return [
        _trained_row(feature, noted, array)
        for feature, noted, array in zip(rows.features, rows.noted, _logprobs(outcome, rows) or (), strict=True)
    ]


def native_rows(operation: Operation, outcome: OperationResult) -> list[TrainedRow]:
    """Return the rows of a native call for the recorder, with the loss inputs `old_logps` and `advantages`."""
    trained = []
    for index, (feature, output) in enumerate(zip(operation.rows, outcome.outputs, strict=True)):
        labels, logps = feature.get("labels"), output.get("logps")
        if labels is None or logps is None:
            continue
        row = TrainedRow(
            np.asarray(feature["input_ids"]), np.asarray(labels), _floats(logps), feature.get("loss_scale")
        )
        row.reward = _number(_entry(operation.loss_inputs.get(REWARDS), index))
        if row.labels.ndim == 1:
            row.sampled = _aligned(_entry(operation.loss_inputs.get("old_logps"), index), row.labels)
            row.advantages = _aligned(_entry(operation.loss_inputs.get("advantages"), index), row.labels)
        trained.append(row)
    return trained


def _entry(values: Any, index: int) -> Any:
    sized = isinstance(values, list | tuple) or bool(getattr(values, "ndim", False))
    return values[index] if sized and index < len(values) else None


def _number(value: Any) -> float | None:
    """Return the reward of a row: a number, or the sum of one for each token."""
    return None if value is None else float(_floats(value).sum(dtype=np.float64))


def _aligned(values: Any, labels: Array) -> Array | None:
    """Return values of a row `[N]`: given for each position, for each target, or once for the row; None for others."""
    if values is None:
        return None
    array = _floats(values)
    targets = labels != NO_TARGET
    aligned = np.zeros(len(labels), np.float32)
    if array.ndim == 0 or array.shape == labels.shape:
        return np.where(targets, array, aligned).astype(np.float32)
    if array.shape == (int(targets.sum()),):
        aligned[targets] = array
        return aligned
    return None


def _logprobs(outcome: OperationResult, rows: Rows) -> list[Array] | None:
    """Return the log-probabilities of each row's targets; None if there are none."""
    if any("logps" not in output for output in outcome.outputs):
        return None
    return [_floats(output["logps"]).reshape(shape) for output, shape in zip(outcome.outputs, rows.shapes, strict=True)]


def _trained_row(feature: Mapping[str, Any], noted: Mapping[str, Array], logprobs: Array) -> TrainedRow:
    row = TrainedRow(feature["input_ids"], feature["labels"], logprobs, feature.get("loss_scale"))
    if noted:
        rewards = noted.get(REWARDS)
        row.reward = None if rewards is None else float(rewards.sum(dtype=np.float64))
        same = {name: array for name, array in noted.items() if array.shape == logprobs.shape and array.ndim == 1}
        row.sampled, row.advantages, row.mask = same.get("logprobs"), same.get("advantages"), same.get("mask")
    return row


def _floats(values: Any) -> Array:
    """Return float32 for numpy; a torch tensor may be on a device, or in bfloat16."""
    if hasattr(values, "cpu"):
        values = values.detach().float().cpu()
    return np.asarray(values, np.float32)


def _metric(name: str, total: float, rows: int) -> tuple[str, float]:
    """Return the name and value of a metric for clients, from its sum over the rows; custom losses keep their names."""
    if name.startswith("custom/"):
        return name, total / rows if name.endswith(":mean") else total
    return f"{name.replace(':', '_')}:sum", total  # clients split names at the colon
