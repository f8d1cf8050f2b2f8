"""Conversion between encoded rows and the datums of the Tinker SDK; published as `twinkle.server.common`."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

from twinkle.errors import DataError

_IGNORE = -100
_OF_LOSS = {"logprobs": "old_logps", "advantages": "advantages"}
_REFERENCE = "ref_logps"


def input_feature_to_datum(input_feature: Mapping[str, Any]) -> Any:
    """Return an encoded row as a datum for `forward_backward` of the Tinker SDK.

    Args:
        input_feature: `input_ids` `[T]` and `labels` `[T]` (the target of each position, -100 where nothing is
            trained; a row without labels trains nothing), as templates encode rows. Optional, in the shape of the
            labels: `loss_scale`, `old_logps` (sent as `logprobs`), `advantages` and `ref_logps`.

    Returns:
        a `tinker.Datum`: `target_tokens` are the labels with 0 where nothing is trained, `weights` are 0 there and
        `loss_scale` or 1 elsewhere. Without the package `tinker`, a dict in the JSON form of a datum.

    Raises:
        DataError: the row has no tokens, or a value has another length.
    """
    ids = [int(token) for token in _plain(input_feature.get("input_ids"))]
    if not ids:
        raise DataError("input_feature_to_datum: the row has no 'input_ids'; encode it with a template first")
    labels = _plain(input_feature.get("labels"))
    if not labels:
        labels = [_IGNORE] * len(ids)
    _check_length("labels", labels, len(ids))
    scale = _plain(input_feature.get("loss_scale")) or _like(labels, 1.0)
    _check_length("loss_scale", scale, len(ids))
    inputs = {
        "target_tokens": _tensor(_each(labels, lambda label: 0 if label == _IGNORE else int(label)), "int64"),
        "weights": _tensor(_weights(labels, scale), "float32"),
    }
    for wire, name in (*_OF_LOSS.items(), (_REFERENCE, _REFERENCE)):
        if input_feature.get(name) is not None:
            values = _plain(input_feature[name])
            _check_length(name, values, len(ids))
            inputs[wire] = _tensor(values, "float32")
    return _datum(ids, inputs)


def datum_to_input_feature(datum: Any, template: Any = None) -> Any:
    """Return a datum as an encoded row, or a list of datums as a list of rows.

    Args:
        datum: a `tinker.Datum`, its JSON form, or a list of them.
        template: published, and not needed: a datum has tokens already.

    Returns:
        `input_ids`, `attention_mask`, `position_ids`, `length`, and `labels`: `target_tokens` as they are (they are
        shifted already), -100 where `weights` are 0; `loss_scale` has the weights if they are not all 0 or 1.

    Raises:
        DataError: the datum has parts without tokens (images), or tensors of another length.
    """
    if isinstance(datum, Sequence):
        return [datum_to_input_feature(one) for one in datum]
    ids = _tokens(_get(datum, "model_input"))
    inputs = _get(datum, "loss_fn_inputs")
    row: dict[str, Any] = {
        "input_ids": ids, "attention_mask": [1] * len(ids), "position_ids": list(range(len(ids))), "length": len(ids),
    }  # fmt: skip
    if "target_tokens" not in inputs:
        return row
    labels = _values(inputs["target_tokens"])
    _check_length("target_tokens", labels, len(ids))
    row["labels"] = labels
    if "weights" in inputs:
        weights = _values(inputs["weights"])
        _check_length("weights", weights, len(ids))
        row["labels"] = _pair(labels, weights, lambda label, weight: int(label) if weight else _IGNORE)
        if set(_flat(weights)) - {0, 1}:
            row["loss_scale"] = weights
    return row


def extract_rl_features_for_loss(datum: Any) -> dict[str, Any]:
    """Return the inputs of losses that datums carry, as keyword arguments of `forward_backward`.

    Args:
        datum: a datum, or a list of them.

    Returns:
        `old_logps` (of `logprobs`) and `advantages`: a list with the numbers of each datum; `ref_outputs`: a dict with
        such a list as `logps`. Only what the datums have.

    Raises:
        DataError: some datums have an input, and others not.
    """
    datums = list(datum) if isinstance(datum, Sequence) else [datum]
    found: dict[str, Any] = {}
    for wire, name in (*_OF_LOSS.items(), (_REFERENCE, _REFERENCE)):
        having = [wire in _get(one, "loss_fn_inputs") for one in datums]
        if any(having) and not all(having):
            raise DataError(
                f"datum {having.index(False)} has no {wire!r} in its loss_fn_inputs, but others have; give all or none"
            )
        if any(having):
            found[name] = [_values(_get(one, "loss_fn_inputs")[wire]) for one in datums]
    if _REFERENCE in found:
        found["ref_outputs"] = {"logps": found.pop(_REFERENCE)}
    return found


def _datum(ids: list[int], inputs: Mapping[str, dict[str, Any]]) -> Any:
    if find_spec("tinker") is None:
        chunks = [{"type": "encoded_text", "tokens": ids}]
        return {"model_input": {"chunks": chunks}, "loss_fn_inputs": dict(inputs)}
    from tinker import types

    tensors = {name: types.TensorData(**tensor) for name, tensor in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=tensors)


def _tensor(values: list[Any], dtype: str) -> dict[str, Any]:
    """Return values `[T]` or `[T, K]` as the fields of a tensor on the wire."""
    shape = [len(values)] + ([len(values[0])] if values and isinstance(values[0], list) else [])
    number = int if dtype == "int64" else float
    return {"data": [number(value) for value in _flat(values)], "dtype": dtype, "shape": shape}


def _tokens(model_input: Any) -> list[int]:
    chunks = _get(model_input, "chunks")
    tokens = [_get(chunk, "tokens", None) for chunk in chunks]
    if None in tokens:
        raise DataError(f"part {tokens.index(None)} of the datum has no tokens; only text can become a row")
    return [int(token) for part in tokens for token in _plain(part)]


def _values(tensor: Any) -> list[Any]:
    """Return a tensor of the wire, of NumPy or of torch, or a list, as nested lists."""
    if isinstance(tensor, Mapping) or (
        hasattr(tensor, "data") and hasattr(tensor, "shape") and not hasattr(tensor, "ndim")
    ):
        data, shape = _plain(_get(tensor, "data")), _get(tensor, "shape", None)
        if shape is None or len(shape) < 2:
            return data
        return [data[start : start + shape[1]] for start in range(0, len(data), shape[1])]
    return _plain(tensor)


def _plain(values: Any) -> list[Any]:
    if values is None:
        return []
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _get(value: Any, name: str, *default: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(name, *default) if default else value[name]
    return getattr(value, name, *default)


def _check_length(name: str, values: Sequence[Any], tokens: int) -> None:
    if len(values) != tokens:
        raise DataError(f"{name!r} has {len(values)} values for {tokens} tokens; give one for each token")


def _each(values: list[Any], function: Any) -> list[Any]:
    return [_each(value, function) if isinstance(value, list) else function(value) for value in values]


def _pair(one: list[Any], other: list[Any], function: Any) -> list[Any]:
    pairs = zip(one, other, strict=True)
    return [_pair(a, b, function) if isinstance(a, list) else function(a, b) for a, b in pairs]


def _weights(labels: list[Any], scale: list[Any]) -> list[Any]:
    return _pair(labels, scale, lambda label, weight: 0.0 if label == _IGNORE else float(weight))


def _like(values: list[Any], fill: float) -> list[Any]:
    return _each(values, lambda _: fill)


def _flat(values: list[Any]) -> list[Any]:
    return list(chain.from_iterable(values)) if values and isinstance(values[0], list) else values
