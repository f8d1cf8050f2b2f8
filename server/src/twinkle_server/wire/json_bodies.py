"""The JSON forms of messages that clients before 0.25 send and read."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import (
    Array,
    SampledPrompt,
    SampledText,
    Sparse,
    TopK,
    read_forward_backward_output,
    read_output_type,
    read_sample_response,
    write_tensor,
)

_DTYPES: Final[dict[str, type[np.generic]]] = {"float32": np.float32, "int64": np.int64}


def pass_message(fields: Mapping[str, Any], work: Any, *, forward_only: bool) -> pb.ForwardBackwardRequest:
    """Convert the JSON form of a pass to the message of newer clients.

    Args:
        fields: the body, with `model_id` and `seq_id`.
        work: its `forward_backward_input` or `forward_input`.
        forward_only: whether to compute no gradients.

    Raises:
        ValueError: a value is missing or has another type; the message says where.
    """
    work = _object(work, "the input of the pass")
    message = pb.ForwardBackwardRequest(model_id=fields["model_id"], forward_only=forward_only)
    message.seq_id = fields.get("seq_id") or 0
    message.loss_fn = _string(work.get("loss_fn"), "loss_fn")
    for name, value in _object(work.get("loss_fn_config") or {}, "loss_fn_config").items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        elif isinstance(value, int | float):
            message.loss_fn_config_v2[name].number = float(value)
        else:
            raise ValueError(f"loss_fn_config.{name} must be a number or a string, got {_kind(value)}")
    for index, row in enumerate(_list(work.get("data"), "data")):
        try:
            _datum(_object(row, "the datum"), message.data.add())
        except ValueError as error:
            raise ValueError(f"data[{index}]: {error}") from None
    return message


def write_chunks(model_input: Any, message: pb.Datum) -> None:
    """Write a `model_input` or a `prompt` into a message.

    Raises:
        ValueError: it is invalid; the message says where.
    """
    chunks = _list(_object(model_input, "the model input").get("chunks"), "chunks")
    for index, chunk in enumerate(chunks):
        try:
            _chunk(_object(chunk, "the chunk"), message.model_input.add())
        except ValueError as error:
            raise ValueError(f"chunks[{index}]: {error}") from None


def tensor_message(fields: Any, what: str) -> pb.Tensor:
    """Convert a `TensorData` to a message.

    Raises:
        ValueError: numbers, type, shape and indices are inconsistent.
    """
    fields = _object(fields, what)
    name = fields.get("dtype", "float32")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"the dtype of {what} must be one of {', '.join(_DTYPES)}, got {name!r}")
    flat = numbers(fields.get("data"), what, dtype)
    shape = None if fields.get("shape") is None else numbers(fields["shape"], f"the shape of {what}", np.int64)
    if fields.get("sparse_crow_indices") is not None:
        rows = numbers(fields["sparse_crow_indices"], f"the row pointers of {what}", np.int64)
        columns = numbers(fields.get("sparse_col_indices"), f"the column indices of {what}", np.int64)
        if shape is None or len(shape) != 2:
            raise ValueError(f"{what} is sparse and must have a shape of two sizes")
        return write_tensor(Sparse(flat, rows, columns, (int(shape[0]), int(shape[1]))))
    tensor = write_tensor(flat)
    if shape is not None:
        tensor.shape[:] = shape.tolist()
    return tensor


def numbers(values: Any, what: str, dtype: type[np.generic]) -> Array:
    """Return a flat list of numbers as an array.

    Raises:
        ValueError: it is not such a list, a number is not an integer where required, or is out of range.
    """
    integers = np.issubdtype(dtype, np.integer)
    flat = _flat(_list(values, what), dtype)
    if flat.ndim != 1 or flat.dtype.kind not in ("iub" if integers else "iubf"):
        raise ValueError(f"{what} must be a flat list of {'64-bit integers' if integers else 'numbers'}")
    if integers and len(flat):
        info = np.iinfo(dtype)  # type: ignore[type-var]
        if int(flat.min()) < info.min or int(flat.max()) > info.max:
            raise ValueError(f"the numbers of {what} must be between {info.min} and {info.max}")
    with np.errstate(over="ignore"):
        array = flat.astype(dtype)
    if not integers and bool((np.isinf(array) & np.isfinite(flat)).any()):
        raise ValueError(f"the numbers of {what} must be in the range of {np.dtype(dtype).name}")
    return array


def _flat(values: list[Any], dtype: type[np.generic]) -> Array:
    try:
        return np.asarray(values) if values else np.zeros(0, dtype)
    except ValueError:  # lists of different lengths
        return np.zeros((0, 0))


def pass_json(result: bytes) -> bytes:
    """Convert the result of a pass to JSON.

    Raises:
        ValueError: a number is not finite, which JSON cannot represent.
    """
    outputs, metrics = read_forward_backward_output(result)
    rows = [{name: _tensor_json(array, name) for name, array in output.items()} for output in outputs]
    for name, value in metrics.items():
        _finite(value, name)
    return _dump({"loss_fn_output_type": read_output_type(result), "loss_fn_outputs": rows, "metrics": metrics})


def sample_json(result: bytes) -> bytes:
    """Convert the result of a sampling request to JSON; values that were not computed are null.

    Raises:
        ValueError: a number of a sampled token is not finite, which JSON cannot represent.
    """
    texts, prompt = read_sample_response(result)
    body: dict[str, Any] = {"type": "sample", "sequences": [_text_json(text) for text in texts]}
    body.update(_prompt_json(prompt))
    return _dump(body)


def _prompt_json(prompt: SampledPrompt) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt_cache_hit_tokens": prompt.hits}
    if prompt.logprobs is not None:
        body["prompt_logprobs"] = [None if np.isnan(value) else value for value in prompt.logprobs.tolist()]
    if prompt.topk is not None:
        body["topk_prompt_logprobs"] = _topk_json(prompt.topk)
    return body


def _text_json(text: SampledText) -> dict[str, Any]:
    _finite(text.logprobs, "logprobs")
    body: dict[str, Any] = {"stop_reason": text.stop, "tokens": text.tokens, "logprobs": text.logprobs}
    if text.topk is not None:
        body["topk_logprobs"] = _topk_json(text.topk)
    return body


def _topk_json(topk: TopK) -> list[list[tuple[int, float]] | None]:
    rows = zip(topk.tokens.tolist(), topk.logprobs.tolist(), strict=True)
    cells = ([cell for cell in zip(*row, strict=True) if cell[1] > -99999.0] for row in rows)
    return [row or None for row in cells]


def _tensor_json(array: Array, what: str) -> dict[str, Any]:
    _finite(array, what)
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    return {"data": array.ravel(), "dtype": dtype, "shape": list(array.shape)}


def _finite(value: Array | float, what: str) -> None:
    if not np.isfinite(value).all():
        raise ValueError(f"{what} is not finite, which JSON cannot represent; use SDK 0.25 or newer")


def _dump(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _datum(fields: Mapping[str, Any], message: pb.Datum) -> None:
    write_chunks(fields.get("model_input"), message)
    for name, tensor in _object(fields.get("loss_fn_inputs") or {}, "loss_fn_inputs").items():
        message.loss_fn_inputs[name].CopyFrom(tensor_message(tensor, name))


def _chunk(fields: Mapping[str, Any], message: pb.Chunk) -> None:
    if "tokens" in fields:
        message.encoded_text.tokens = numbers(fields["tokens"], "tokens", np.int32).tobytes()
    elif "dmel" in fields:
        message.dmel.dmel = _base64(fields["dmel"], "dmel")
    elif "data" in fields:
        message.image.data = _base64(fields["data"], "data")
        message.image.format = _string(fields.get("format"), "format")
        if fields.get("expected_tokens") is not None:
            message.image.expected_tokens = int(numbers([fields["expected_tokens"]], "expected_tokens", np.int32)[0])
    else:
        raise ValueError(f"unsupported chunk type {fields.get('type')!r}; this service only reads text chunks")


def _base64(value: Any, what: str) -> bytes:
    try:
        return base64.b64decode(_string(value, what), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{what} must be base64") from error


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {_kind(value)}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list, got {_kind(value)}")
    return value


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "absent" if value is None else f"a {type(value).__name__}"
