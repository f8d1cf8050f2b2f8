"""Frames between the engine and a loss worker: a JSON head, followed by the bytes of its tensors.

Nothing is unpickled, so that a plugin in a worker can send only data.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle_server.workers.framing import HEADER, BadFrame

_ALIGNED: Final = 16
_TENSOR, _ARRAY, _MAPPING = "tensor", "array", "mapping"
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def pack(head: Mapping[str, Any]) -> bytes:
    """Serialize a frame: tensors and arrays as bytes, everything else as JSON.

    Raises:
        ArgumentError: a value has a type that frames do not support.
    """
    body = _Body()
    text = json.dumps({key: _packed(value, body) for key, value in head.items()}).encode()
    return b"".join([HEADER.pack(len(text), body.size), text, *body.pieces])


def unpack(text: bytes | bytearray, body: bytearray) -> dict[str, Any]:
    """Parse a frame; its tensors share the memory of `body`.

    Raises:
        BadFrame: the bytes are not a valid frame.
    """
    try:
        fields = json.loads(text)
        return {key: _unpacked(value, body) for key, value in fields.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
        raise BadFrame(f"{type(error).__name__}: {error}") from error


class TensorFrames:
    """Frames with tensors; see `framing.Frames`."""

    invalid = "returned an invalid loss"

    def pack(self, head: Mapping[str, Any]) -> bytes:
        """See `pack`."""
        return pack(head)

    def unpack(self, text: bytes, body: bytearray) -> dict[str, Any]:
        """See `unpack`."""
        return unpack(text, body)


class _Body:
    """The bytes of the tensors of a frame, each aligned."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.size = 0

    def add(self, values: Any) -> int:
        """Append an array of bytes, and return its offset."""
        offset = self.size
        padding = -len(values) % _ALIGNED
        self.pieces += [memoryview(values), bytes(padding)]
        self.size += len(values) + padding
        return offset


def _packed(value: Any, body: _Body) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise ArgumentError(f"the dtype of a tensor must be one of {', '.join(_DTYPES)}, got {name}")
        return {_TENSOR: [name, list(value.shape), body.add(flat.view(torch.uint8).numpy())]}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise ArgumentError(f"an array must hold numbers, got {value.dtype}")
        return {
            _ARRAY: [
                value.dtype.str,
                list(value.shape),
                body.add(np.ascontiguousarray(value).reshape(-1).view(np.uint8)),
            ]
        }
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_MAPPING: {str(key): _packed(item, body) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_packed(item, body) for item in value]
    raise ArgumentError(f"a loss worker takes tensors, arrays, numbers and strings, got a {type(value).__name__}")


def _unpacked(value: Any, body: bytearray) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, body) for item in value]
    if isinstance(value, str):  # errors of plugins may contain lone surrogates, which cannot be logged
        return value.encode("utf-8", "replace").decode()
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == _MAPPING:
        return {key: _unpacked(item, body) for key, item in content.items()}
    name, shape, offset = content
    count = int(np.prod(shape, dtype=np.int64))
    if offset < 0 or count < 0:
        raise ValueError("a tensor exceeds the frame")
    if kind == _TENSOR:
        dtype = _DTYPES[name]
        return (
            torch.frombuffer(body, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        ).view(shape)
    if kind == _ARRAY:
        return np.frombuffer(body, np.dtype(name), count, offset).reshape(shape)
    raise ValueError(f"unknown kind of value {kind!r}")
