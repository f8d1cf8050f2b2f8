"""Arrays in messages: numpy on one side, little-endian bytes with a shape on the other.

Whatever a message says about sizes is compared with the bytes that are there before anything is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from twinkle_server.wire import tinker_pb2 as pb

Array = NDArray[Any]
DTYPES: Final[dict[int, np.dtype[Any]]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
MAX_CELLS: Final = 2**26
"""Cells that a sparse array may have once it is written out: 256 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """A checked matrix in compressed sparse rows; cells that it does not list are 0.

    Attributes:
        values: `[nnz]`, by row and column.
        rows: `[R + 1]` int64, where each row begins in `values`.
        columns: `[nnz]` int64.
        shape: `(R, C)`.
    """

    values: Array
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        height, width = self.shape
        if height < 0 or width < 0:
            raise ValueError(f"the sizes of a sparse array must be at least 0, got {self.shape}")
        if len(self.rows) != height + 1 or self.rows[0] != 0 or self.rows[-1] != len(self.values):
            raise ValueError(
                f"a sparse array of {height} rows and {len(self.values)} values must have {height + 1} row pointers "
                f"from 0 to {len(self.values)}, got {len(self.rows)}"
            )
        if (np.diff(self.rows) < 0).any():
            raise ValueError("the row pointers of a sparse array must not decrease")
        if len(self.columns) != len(self.values):
            raise ValueError(
                f"a sparse array must have one column index per value ({len(self.values)}), got {len(self.columns)}"
            )
        if len(self.columns) and not (self.columns.min() >= 0 and self.columns.max() < width):
            raise ValueError(f"the column indices of a sparse array must be between 0 and {width - 1}")
        inside = np.ones(max(len(self.columns) - 1, 0), bool)
        starts = self.rows[1:-1]
        inside[starts[(starts > 0) & (starts < len(self.columns))] - 1] = False
        if (np.diff(self.columns)[inside] <= 0).any():
            raise ValueError("the column indices of a sparse array must increase within a row")

    def dense(self, cells: int = MAX_CELLS) -> Array:
        """Return the whole matrix.

        Raises:
            ValueError: it has more than `cells` cells.
        """
        if prod(self.shape) > cells:
            raise ValueError(f"a sparse array must have at most {cells} cells, got the shape {self.shape}")
        out = np.zeros(self.shape, self.values.dtype)
        out[np.repeat(np.arange(self.shape[0]), np.diff(self.rows)), self.columns] = self.values
        return out


def from_bytes(data: bytes, dtype: int, what: str) -> Array:
    """Read flat little-endian values; bfloat16 comes back as float32.

    Args:
        data: the bytes.
        dtype: a `DType` of the wire.
        what: the array's name, for errors.

    Raises:
        ValueError: the type is unknown, or the bytes are no whole number of values.
    """
    kind = DTYPES.get(dtype)
    if kind is None:
        raise ValueError(f"{what} has the unknown dtype {dtype}")
    if len(data) % kind.itemsize:
        raise ValueError(f"{what} must have a multiple of {kind.itemsize} bytes, got {len(data)}")
    flat: Array = np.frombuffer(data, kind)
    if dtype == pb.DTYPE_BFLOAT16:
        return (flat.astype("<u4") << 16).view("<f4")
    return flat


def read_tensor(tensor: pb.Tensor, what: str = "a tensor", cells: int = MAX_CELLS) -> Array:
    """Return a tensor as a dense array, read-only where it is a view of the message's bytes.

    Raises:
        ValueError: shape, type, indices and bytes do not fit together, or a sparse one has more than `cells` cells.
    """
    try:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            return read_sparse(tensor, what).dense(cells)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    flat = from_bytes(tensor.dense, tensor.dtype, what)
    shape = tuple(tensor.shape) or (len(flat),)
    if min(shape) < 0 or prod(shape) != len(flat):
        raise ValueError(f"{what} must have as many values as its shape {_shown(shape)}, got {len(flat)}")
    return flat.reshape(shape)


def read_sparse(tensor: pb.Tensor, what: str = "a tensor") -> Sparse:
    """Return a sparse tensor as it is.

    Raises:
        ValueError: shape, type, indices and bytes do not fit together.
    """
    csr, shape = tensor.sparse_csr, tuple(tensor.shape)
    if len(shape) != 2:
        raise ValueError(f"a sparse array must have two dimensions, got the shape {_shown(shape)}")
    return Sparse(
        from_bytes(csr.values, tensor.dtype, what),
        from_bytes(csr.crow_indices, pb.DTYPE_INT64, "the row pointers"),
        from_bytes(csr.col_indices, pb.DTYPE_INT64, "the column indices"),
        (shape[0], shape[1]),
    )


def write_tensor(array: Array | Sparse) -> pb.Tensor:
    """Return an array as a tensor: every float as float32, int32 and int64 as they are, other integers as int64."""
    if isinstance(array, Sparse):
        dtype, data = to_bytes(array.values)
        tensor = pb.Tensor(dtype=dtype, shape=array.shape)
        tensor.sparse_csr.values = data
        tensor.sparse_csr.crow_indices = array.rows.astype("<i8", copy=False).tobytes()
        tensor.sparse_csr.col_indices = array.columns.astype("<i8", copy=False).tobytes()
        return tensor
    dtype, data = to_bytes(array)
    return pb.Tensor(dense=data, dtype=dtype, shape=array.shape)


def to_bytes(array: Array) -> tuple[pb.DType, bytes]:
    """Return the type of the wire and the bytes of an array's values.

    Raises:
        ValueError: it holds neither floats nor integers.
    """
    if array.dtype.kind == "f":
        return pb.DTYPE_FLOAT32, array.astype("<f4", copy=False).tobytes()
    if array.dtype.kind not in "iub":
        raise ValueError(f"cannot encode an array of {array.dtype}; the dtype must be a float or an integer")
    if array.dtype == np.int32:
        return pb.DTYPE_INT32, array.astype("<i4", copy=False).tobytes()
    return pb.DTYPE_INT64, array.astype("<i8", copy=False).tobytes()


def write_batch(arrays: Sequence[Array]) -> pb.BatchedTensor:
    """Return arrays of one type and one trailing shape (`[N_i, *trailing]`), one after another."""
    dtype, _ = to_bytes(arrays[0][:0])
    kind = DTYPES[dtype]
    ends = np.cumsum([0, *(array.size * kind.itemsize for array in arrays)], dtype="<i8")
    data = b"".join(np.ascontiguousarray(array, kind).data for array in arrays)
    return pb.BatchedTensor(data=data, offsets=ends.tobytes(), dtype=dtype, trailing_shape=arrays[0].shape[1:])


def read_batch(batch: pb.BatchedTensor, what: str) -> list[Array]:
    """Return the arrays of a batch.

    Raises:
        ValueError: offsets, shape, type and bytes do not fit together.
    """
    flat = from_bytes(batch.data, batch.dtype, what)
    offsets = from_bytes(batch.offsets, pb.DTYPE_INT64, f"the offsets of {what}")
    size, row = DTYPES[batch.dtype].itemsize, prod(batch.trailing_shape)
    whole = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(batch.data)
    if not whole or (np.diff(offsets) < 0).any() or (offsets % size).any():
        raise ValueError(
            f"the offsets of {what} must increase from 0 to {len(batch.data)} bytes in multiples of the item size"
        )
    if min(batch.trailing_shape, default=1) < 1 or (np.diff(offsets) % (size * row)).any():
        raise ValueError(
            f"the sizes of the arrays of {what} must be multiples of the trailing shape {_shown(batch.trailing_shape)}"
        )
    parts = np.split(flat, offsets[1:-1] // size) if len(offsets) > 1 else []
    return [part.reshape(len(part) // row, *batch.trailing_shape) for part in parts]


def _shown(shape: Sequence[int]) -> str:
    sizes = [str(size) for size in shape[:4]]
    return f"({', '.join(sizes)}{', …' if len(shape) > 4 else ''})"
