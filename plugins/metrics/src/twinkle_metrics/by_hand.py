"""Arguments of `Metric.accumulate` as scripts pass them by hand: rows, lists of tensors, and plain lists."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_INPUTS = {"labels": -100, "loss_scale": 0.0, "attention_mask": 0, "completion_mask": 0}
"""The keys of a batch that metrics read, and their padding."""
_OUTPUTS = {"logps": 0.0, "entropies": 0.0, "predictions": -100, "embeddings": 0.0, "logits": 0.0}


def as_batch(inputs: Any, outputs: Any) -> tuple[InputBatch, ModelOutput]:
    """Return the arguments of `accumulate` as a model passes them: collated inputs, and outputs as tensors.

    Args:
        inputs: a collated batch (tensors, arrays or lists), one encoded row, or a list of rows. Rows are padded on the
            right.
        outputs: outputs of a forward, None for none; an output may also be a list with one tensor `[T]`, `[1, T]` or
            list for each row, and of a single row without the dimension of rows. Outputs that are wider than the rows,
            because other rows were longer, are cut.

    Raises:
        DataError: inputs are neither rows nor a batch, or an output has not one entry for each row.
    """
    import torch

    outputs = {} if outputs is None else outputs
    if isinstance(inputs, Mapping) and all(
        isinstance(value, torch.Tensor)
        for value in (inputs.get("labels"), *(outputs[name] for name in _OUTPUTS if outputs.get(name) is not None))
    ):
        return _with_rows(inputs, outputs)
    rows = _rows(inputs)
    given = [name for name in _INPUTS if any(row.get(name) is not None for row in rows)]
    batch: dict[str, Any] = {name: _stack(name, [row.get(name) for row in rows], _INPUTS[name]) for name in given}
    width = batch["labels"].shape[1] if "labels" in batch and batch["labels"].ndim == 2 else None
    found = dict(outputs)
    for name, fill in _OUTPUTS.items():
        if outputs.get(name) is not None:
            found[name] = _output(name, outputs[name], len(rows), width if name != "embeddings" else None, fill)
    return cast(InputBatch, batch), cast(ModelOutput, found)


def _with_rows(inputs: Any, outputs: Any) -> tuple[InputBatch, ModelOutput]:
    """Return a batch with its dimension of rows: `[T]` labels with `[T]` log-probabilities are one row."""
    logps = outputs.get("logps")
    if inputs["labels"].ndim != 1 or logps is None or logps.ndim != 1:
        return cast(InputBatch, inputs), outputs
    found: Any = {name: value[None] if getattr(value, "ndim", 0) == 1 else value for name, value in inputs.items()}
    rows: Any = {name: outputs[name][None] for name in _OUTPUTS if outputs.get(name) is not None}
    return found, outputs | rows


def _rows(inputs: Any) -> list[Mapping[str, Any]]:
    """Return inputs as a list of rows with one value for each token, or with one label."""
    if isinstance(inputs, Mapping):
        ids = inputs.get("input_ids", inputs.get("labels"))
        if ids is None:
            raise DataError(f"a metric needs 'labels', and the inputs have {', '.join(map(str, inputs)) or 'nothing'}")
        if getattr(ids, "ndim", 1) == 1 and not (len(ids) and isinstance(ids[0], Sequence)):
            return [inputs]
        return [
            {name: inputs[name][row] for name in _INPUTS if inputs.get(name) is not None} for row in range(len(ids))
        ]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not all(isinstance(r, Mapping) for r in inputs):
        raise DataError(f"a metric takes a batch or a list of encoded rows, got a {type(inputs).__name__}")
    return list(inputs)


def _stack(name: str, values: Sequence[Any], fill: float) -> "Tensor":
    """Return one tensor `[B, longest]`, padded on the right; `[B]` of single numbers."""
    import torch

    if missing := [row for row, value in enumerate(values) if value is None]:
        raise DataError(f"row {missing[0]} has no {name!r}, but other rows of the batch have")
    tensors = [torch.as_tensor(value).detach().cpu() for value in values]
    if name == "labels":
        tensors = [tensor.reshape(()) if tensor.shape == (1,) else tensor for tensor in tensors]
    if all(tensor.ndim == 0 for tensor in tensors):
        return torch.stack(tensors)
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)


def _output(name: str, value: Any, rows: int, width: int | None, fill: float) -> "Tensor":
    """Return an output as `[B, T, ...]`, as wide as the rows."""
    import torch

    if not isinstance(value, torch.Tensor) and rows == 1 and not hasattr(value[0], "__len__"):
        value = torch.as_tensor(value)
    if not isinstance(value, torch.Tensor):
        value = [torch.as_tensor(entry).detach() for entry in value]
        value = [entry[0] if entry.ndim > 1 and entry.shape[0] == 1 else entry for entry in value]
        value = torch.nn.utils.rnn.pad_sequence(value, batch_first=True, padding_value=fill)
    if rows == 1 and value.ndim == (2 if name == "logits" else 1):
        value = value[None]
    if len(value) != rows:
        raise DataError(f"outputs[{name!r}] has {len(value)} entries, and the inputs have {rows} rows; give one each")
    tensor: Tensor = value
    if width is None:
        return tensor
    if tensor.shape[1] < width:
        raise DataError(
            f"outputs[{name!r}] has {tensor.shape[1]} values a row, and the longest row has {width} tokens; give the "
            "outputs of the forward of these rows"
        )
    return tensor[:, :width]
