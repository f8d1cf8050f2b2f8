"""The binary form of native requests and results: JSON with tensors beside it, in one frame.

A frame is the magic `TWF1`, the length of its head (uint32, little-endian), the head, and the tensors. The head is
JSON, `{"value": ..., "tensors": [[dtype, shape], ...]}`; in the value, `{"$tensor": i}` stands for tensor i, and
`{"$list": i}` for a list of numbers with the same content. Every tensor is little-endian, in C order, and begins at a
multiple of 8 bytes from the start of the frame. Nothing in a frame is executed, and all sizes are checked before memory
is allocated.

numpy is imported when a tensor is written or read; tensors of torch are accepted without importing torch.
"""

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from twinkle_client.errors import WireError

if TYPE_CHECKING:
    import numpy as np

CONTENT_TYPE: Final = "application/x-twinkle-frame"
MAGIC: Final = b"TWF1"
MAX_TENSORS: Final = 2**17
MAX_HEAD: Final = 64 * 2**20
MAX_DIMENSIONS: Final = 8
_MAX_SIZE: Final = 2**40
_ITEMS: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8,
}  # fmt: skip
"""Bytes of an item, by dtype. Unsigned types of more than 8 bits do not exist in all versions of torch."""
_HEAD: Final = struct.Struct("<4sI")
_ALIGNED: Final = 8
_SHORTEST: Final = 16
"""Lists of numbers from this length on are sent as tensors."""
_TENSOR, _LIST = "$tensor", "$list"
Bytes = bytes | bytearray | memoryview


def pack(value: Any) -> bytes:
    """Return a value as a frame.

    Args:
        value: None, booleans, numbers, texts, lists, tuples (sent as lists), mappings with texts as keys, arrays of
            numpy, tensors of torch, and pydantic models. Long lists of numbers are sent as tensors and read as lists.

    Raises:
        WireError: the value contains something else; the message says where.
    """
    from pydantic_core import to_json

    packing = _Packing()
    plain = packing.plain(value, "")
    head = to_json({"value": plain, "tensors": packing.headers}, inf_nan_mode="constants")
    parts: list[Any] = [_HEAD.pack(MAGIC, len(head)), head]
    size = _HEAD.size + len(head)
    for data in packing.data:
        padding = -size % _ALIGNED
        parts += (bytes(padding), data)
        size += padding + data.nbytes
    return b"".join(parts)


def unpack(frame: Bytes, *, lists: bool = True) -> Any:
    """Return the value of a frame; tensors are read-only arrays of numpy, bfloat16 as float32.

    Args:
        frame: all of its bytes.
        lists: give lists of numbers as lists; otherwise as arrays, which take less memory.

    Raises:
        WireError: the bytes are not a frame; the message says what is wrong.
    """
    from pydantic_core import from_json

    view = memoryview(frame).cast("B")
    if len(view) < _HEAD.size:
        raise WireError(f"a frame must have at least {_HEAD.size} bytes, got {len(view)}")
    magic, length = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"a frame must begin with {MAGIC!r}, got {magic!r}")
    if length > min(MAX_HEAD, len(view) - _HEAD.size):
        raise WireError(f"the head of a frame of {len(view)} bytes cannot have {length} bytes")
    try:
        head = from_json(bytes(view[_HEAD.size : _HEAD.size + length]))
    except ValueError as error:
        raise WireError(f"the head of the frame is not valid JSON: {error}") from error
    if not isinstance(head, dict) or set(head) != {"value", "tensors"}:
        raise WireError("the head of a frame must have the keys 'value' and 'tensors'")
    arrays = list(_arrays(view, _HEAD.size + length, head["tensors"]))
    return _fill(head["value"], arrays, lists)


def head_of(frame: Bytes) -> bytes:
    """Return the JSON of a frame, without checking it; all bytes of what is not a frame."""
    view = memoryview(frame).cast("B")
    if len(view) < _HEAD.size:
        return bytes(view)
    magic, length = _HEAD.unpack_from(view)
    return bytes(view[_HEAD.size : _HEAD.size + length]) if magic == MAGIC else bytes(view)


class _Packing:
    """Replaces tensors by placeholders, and collects them."""

    def __init__(self) -> None:
        self.headers: list[tuple[str, list[int]]] = []
        self.data: list[memoryview] = []

    def plain(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, str | bool):
            return value
        if isinstance(value, int | float):
            return _number(value, where)
        if isinstance(value, Mapping):
            return {key: self.plain(item, f"{where}.{key}") for key, item in _items(value, where)}
        if isinstance(value, list | tuple | range):
            dtype = _list_dtype(value)
            if dtype is not None:
                return {_LIST: self._add(_array(value, dtype), dtype)}
            return [self.plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            return {_TENSOR: self._add(*_of_torch(value))}
        if hasattr(value, "dtype") and hasattr(value, "tolist"):
            return self._of_numpy(value, where)
        if hasattr(value, "model_dump"):
            return self.plain(value.model_dump(), where)
        raise WireError(
            f"cannot send {where.lstrip('.') or 'the value'}: a {type(value).__name__} has no form on the wire; send "
            "numbers, texts, lists, mappings, arrays, or the name of a component that is installed on the service"
        )

    def _of_numpy(self, value: Any, where: str) -> Any:
        import numpy as np

        if isinstance(value, np.generic):
            return self.plain(value.item(), where)
        array = np.asarray(value)
        name = array.dtype.name
        if name not in _ITEMS:
            raise WireError(f"cannot send {where.lstrip('.') or 'the array'}: its dtype is {name}; use {_names()}")
        return {_TENSOR: self._add(array, name)}

    def _add(self, array: "np.ndarray[Any, Any]", name: str) -> int:
        if len(self.headers) == MAX_TENSORS:
            raise WireError(f"a frame holds at most {MAX_TENSORS} tensors; send fewer rows at once")
        if array.ndim > MAX_DIMENSIONS:
            raise WireError(f"a tensor must have at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
        self.headers.append((name, list(array.shape)))
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False).reshape(-1)
        self.data.append(little.data.cast("B") if little.size else memoryview(b""))
        return len(self.headers) - 1


def _number(value: int | float, where: str) -> int | float:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError(f"cannot send {where.lstrip('.') or 'the value'}: integers must have at most 64 bits")
    return int(value) if isinstance(value, int) else float(value)


def _items(value: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if not isinstance(key, str) or key in (_TENSOR, _LIST):
            raise WireError(
                f"cannot send {where.lstrip('.') or 'the mapping'}: keys must be texts other than {_TENSOR!r} and "
                f"{_LIST!r}, got {key!r}"
            )
        yield key, item


def _list_dtype(values: Sequence[Any]) -> str | None:
    """Return the dtype in which a list of numbers is sent; None for any other list."""
    if len(values) < _SHORTEST:
        return None
    if isinstance(values, range):
        return "int64"
    kinds = set(map(type, values))
    if kinds == {float}:
        return "float64"
    if kinds != {int}:
        return None
    least, most = min(values), max(values)
    if least >= -(2**31) and most < 2**31:
        return "int32"
    return "int64" if least >= -(2**63) and most < 2**63 else None


def _array(values: Sequence[Any], dtype: str) -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.array(values, dtype)


def _of_torch(tensor: Any) -> tuple["np.ndarray[Any, Any]", str]:
    host = tensor.detach().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    if name not in _ITEMS:
        raise WireError(f"cannot send a tensor of dtype {name}; use {_names()}")
    bits = host.view(sys.modules["torch"].int16) if name == "bfloat16" else host
    return bits.numpy(), name


def _names() -> str:
    return ", ".join(_ITEMS)


def _arrays(view: memoryview, start: int, headers: Any) -> Iterator["np.ndarray[Any, Any]"]:
    if not isinstance(headers, list) or len(headers) > MAX_TENSORS:
        raise WireError(f"the tensors of a frame must be a list of at most {MAX_TENSORS} headers")
    at = start
    for index, header in enumerate(headers):
        dtype, shape = _header(header, index)
        size = prod(shape) * _ITEMS[dtype]
        at += -at % _ALIGNED
        if size > len(view) - at:
            raise WireError(
                f"tensor {index} ({dtype}{shape}) needs {size} bytes, the frame has {max(0, len(view) - at)}"
            )
        yield _read(view[at : at + size], dtype, shape)
        at += size
    if at != len(view):
        raise WireError(f"the frame has {len(view) - at} bytes after its tensors")


def _header(header: Any, index: int) -> tuple[str, list[int]]:
    if not (isinstance(header, list) and len(header) == 2 and isinstance(header[0], str) and header[0] in _ITEMS):
        raise WireError(f"tensor {index}: its header must be [dtype, shape] with a dtype of {_names()}")
    shape = header[1]
    valid = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    if not valid or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise WireError(f"tensor {index}: its shape must be at most {MAX_DIMENSIONS} sizes of at least 0")
    return header[0], shape


def _read(data: memoryview, dtype: str, shape: list[int]) -> "np.ndarray[Any, Any]":
    import numpy as np

    if dtype == "bfloat16":  # the upper half of a float32
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    array = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    array.setflags(write=False)
    return array


def _fill(value: Any, arrays: list["np.ndarray[Any, Any]"], lists: bool) -> Any:
    if isinstance(value, list):
        return [_fill(item, arrays, lists) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, index) = next(iter(value.items()))
        if key in (_TENSOR, _LIST):
            if type(index) is not int or not 0 <= index < len(arrays):
                raise WireError(f"the frame refers to tensor {str(index)[:20]}, and has {len(arrays)}")
            return arrays[index].tolist() if lists and key == _LIST else arrays[index]
    return {key: _fill(item, arrays, lists) for key, item in value.items()}
