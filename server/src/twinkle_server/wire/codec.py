"""Conversion between the messages of the protocol and numpy arrays.

Arrays are little-endian bytes with a shape. Sizes in a message are compared with its bytes before memory is allocated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from twinkle_server.wire import tinker_pb2 as pb

__all__ = [
    "EMPTY_LOGPROB",
    "MAX_CELLS",
    "OUTPUT_TYPE",
    "Array",
    "SampledPrompt",
    "SampledText",
    "Sparse",
    "TopK",
    "datum_inputs",
    "datum_length",
    "datum_tokens",
    "forward_backward_output",
    "loss_config",
    "parse_request",
    "read_forward_backward_output",
    "read_output_type",
    "read_sample_response",
    "read_sparse",
    "read_tensor",
    "sample_response",
    "write_tensor",
]
Array = NDArray[Any]
DTYPES: Final[dict[int, np.dtype[Any]]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
MAX_CELLS: Final = 2**26
"""Maximum number of cells of a sparse array in dense form: 256 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """A validated matrix in compressed sparse row format; missing cells are 0.

    Attributes:
        values: `[nnz]`, by row and column.
        rows: `[R + 1]` int64, start of each row in `values`.
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
        """Return the dense matrix `[R, C]`.

        Raises:
            ValueError: it has more than `cells` cells.
        """
        if prod(self.shape) > cells:
            raise ValueError(f"a sparse array must have at most {cells} cells, got the shape {self.shape}")
        out = np.zeros(self.shape, self.values.dtype)
        out[np.repeat(np.arange(self.shape[0]), np.diff(self.rows)), self.columns] = self.values
        return out


def from_bytes(data: bytes, dtype: int, what: str) -> Array:
    """Read little-endian values as a flat array; bfloat16 becomes float32.

    Args:
        data: the bytes.
        dtype: a `DType` of the protocol.
        what: name of the array, for errors.

    Raises:
        ValueError: the type is unknown, or the number of bytes is not a multiple of the item size.
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
    """Return a tensor as a dense array; it is read-only if it is a view of the message's bytes.

    Raises:
        ValueError: shape, type, indices and bytes are inconsistent, or a sparse tensor has more than `cells` cells.
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
    """Return a sparse tensor without making it dense.

    Raises:
        ValueError: shape, type, indices and bytes are inconsistent.
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
    """Return an array as a tensor: floats as float32, int32 and int64 unchanged, other integers as int64."""
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
    """Return the protocol's type and the bytes of an array.

    Raises:
        ValueError: it contains neither floats nor integers.
    """
    if array.dtype.kind == "f":
        return pb.DTYPE_FLOAT32, array.astype("<f4", copy=False).tobytes()
    if array.dtype.kind not in "iub":
        raise ValueError(f"cannot encode an array of {array.dtype}; the dtype must be a float or an integer")
    if array.dtype == np.int32:
        return pb.DTYPE_INT32, array.astype("<i4", copy=False).tobytes()
    return pb.DTYPE_INT64, array.astype("<i8", copy=False).tobytes()


def write_batch(arrays: Sequence[Array]) -> pb.BatchedTensor:
    """Return arrays of one type and trailing shape (`[N_i, *trailing]`), concatenated."""
    dtype, _ = to_bytes(arrays[0][:0])
    kind = DTYPES[dtype]
    ends = np.cumsum([0, *(array.size * kind.itemsize for array in arrays)], dtype="<i8")
    data = b"".join(np.ascontiguousarray(array, kind).data for array in arrays)
    return pb.BatchedTensor(data=data, offsets=ends.tobytes(), dtype=dtype, trailing_shape=arrays[0].shape[1:])


def read_batch(batch: pb.BatchedTensor, what: str) -> list[Array]:
    """Return the arrays of a batch.

    Raises:
        ValueError: offsets, shape, type and bytes are inconsistent.
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


EMPTY_LOGPROB: Final = -99999.0
"""Log-probability of an empty cell of `TopK`; its token is 0."""
M = TypeVar("M", bound=Message)
StopReason = Literal["stop", "length"]
_STOPS: Final[dict[StopReason, pb.StopReason]] = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def parse_request(payload: bytes) -> pb.ForwardBackwardRequest:
    """Parse the request of a pass.

    Raises:
        ValueError: the bytes are not such a message.
    """
    return _parse(pb.ForwardBackwardRequest, payload)


def loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return the options of a request's loss; entries of the newer map override those of the older one.

    Raises:
        ValueError: an option of the newer map has no value.
    """
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        which = value.WhichOneof("value")
        if which is None:
            raise ValueError(f"the loss option {name!r} must have a number or a text")
        config[name] = value.number if which == "number" else value.text
    return config


def datum_tokens(datum: pb.Datum) -> NDArray[np.int32]:
    """Return the tokens of a datum's text chunks, concatenated, `[N]` int32.

    Raises:
        ValueError: a chunk is not text, or its bytes are not tokens.
    """
    parts = [_text(chunk) for chunk in datum.model_input]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, "<i4"), *parts])


def datum_length(datum: pb.Datum) -> int:
    """Estimate the number of tokens of a datum without reading them, for its cost; works for invalid datums, too."""
    size = sum(len(chunk.encoded_text.tokens) + 4 * max(chunk.image.expected_tokens, 0) for chunk in datum.model_input)
    return int(size) // 4


def datum_inputs(datum: pb.Datum, cells: int = MAX_CELLS) -> dict[str, Array]:
    """Return the inputs of a datum's loss by name, as dense arrays of the sent types.

    Args:
        datum: a row of the request.
        cells: maximum number of cells of each sparse input in dense form.

    Raises:
        ValueError: shape, type, indices and bytes of an array are inconsistent; the message names it.
    """
    return {name: read_tensor(datum.loss_fn_inputs[name], name, cells) for name in sorted(datum.loss_fn_inputs)}


OUTPUT_TYPE: Final = "ArrayRecord"
"""`loss_fn_output_type` of a pass: a text without a colon, which clients pass on."""


def forward_backward_output(
    outputs: Sequence[Mapping[str, Array]], metrics: Mapping[str, float], kind: str = OUTPUT_TYPE
) -> bytes:
    """Serialize the result of a pass.

    Args:
        outputs: for each datum, its arrays by name, `[N]` or `[N, K]`; all datums have the same names.
        metrics: by `name:reduction`.
        kind: `loss_fn_output_type`.
    """
    records = []
    for group in _groups(outputs):
        record = pb.ArrayRecord(num_datums=len(group))
        for name in group[0]:
            record.fields[name].CopyFrom(write_batch([output[name] for output in group]))
        records.append(record)
    message = pb.ForwardBackwardOutput(loss_fn_output_type=kind, loss_fn_outputs=records, metrics=metrics)
    return bytes(message.SerializeToString(deterministic=True))


def read_forward_backward_output(data: bytes) -> tuple[list[dict[str, Array]], dict[str, float]]:
    """Return the arrays of each datum, and the metrics.

    Raises:
        ValueError: the bytes are not such a message, or its arrays are inconsistent.
    """
    message = _parse(pb.ForwardBackwardOutput, data)
    outputs: list[dict[str, Array]] = []
    for record in message.loss_fn_outputs:
        fields = {name: read_batch(batch, name) for name, batch in record.fields.items()}
        counts = {len(arrays) for arrays in fields.values()} | {record.num_datums}
        if len(counts) != 1 or not 0 <= record.num_datums <= len(data):
            raise ValueError(f"the arrays of a record must cover its {record.num_datums} datums, got {sorted(counts)}")
        outputs += [{name: arrays[i] for name, arrays in fields.items()} for i in range(record.num_datums)]
    return outputs, dict(message.metrics)


def read_output_type(data: bytes) -> str:
    """Return `loss_fn_output_type` of a pass.

    Raises:
        ValueError: the bytes are not such a message.
    """
    return str(_parse(pb.ForwardBackwardOutput, data).loss_fn_output_type)


@dataclass(frozen=True, slots=True)
class TopK:
    """The most likely tokens of positions, in descending order; empty cells contain token 0 and `EMPTY_LOGPROB`.

    Attributes:
        tokens: `[N, K]` int32.
        logprobs: `[N, K]` float32.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def message(self) -> pb.TopkLogprobs:
        """Return the message."""
        length, k = self.tokens.shape
        return pb.TopkLogprobs(token_ids=_i4(self.tokens), logprobs=_f4(self.logprobs), k=k, length=length)

    @classmethod
    def read(cls, message: pb.TopkLogprobs) -> "TopK":
        """Read a message.

        Raises:
            ValueError: its sizes and bytes are inconsistent.
        """
        tokens = from_bytes(message.token_ids, pb.DTYPE_INT32, "top-k tokens")
        logprobs = from_bytes(message.logprobs, pb.DTYPE_FLOAT32, "top-k logprobs")
        if not len(tokens) == len(logprobs) == message.k * message.length:
            raise ValueError(
                f"a top-k must have {message.length} x {message.k} cells, got {len(tokens)} and {len(logprobs)}"
            )
        shape = (message.length, message.k)
        return cls(tokens.reshape(shape), logprobs.reshape(shape))


@dataclass(frozen=True, slots=True)
class SampledText:
    """One sampled sequence.

    Attributes:
        tokens: `[N]` int32, N ≥ 1, including stop tokens.
        logprobs: `[N]` float32.
        stop: why it ended.
        topk: alternatives for each token, if requested.
        sampled: `[N]` float32, log-probabilities in the distribution that was sampled from, if requested.
        raw: `[N]` float32, log-probabilities at temperature 1 without filters, if requested.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop: StopReason
    topk: TopK | None = None
    sampled: NDArray[np.float32] | None = None
    raw: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """Data about the prompt of a sampling request, of P tokens.

    Attributes:
        logprobs: `[P]` float32; NaN for the first token, and where not computed.
        topk: alternatives for each prompt token.
        hits: number of prompt tokens found in a cache.
        targets: scores of the requested tokens, in the layout of the request.
        alternatives: drawn tokens `[P - 1, K]` int64 and their log-probabilities.
    """

    logprobs: NDArray[np.float32] | None = None
    topk: TopK | None = None
    hits: int = 0
    targets: Array | Sparse | None = None
    alternatives: tuple[Array, Array] | None = field(default=None)


def sample_response(sequences: Sequence[SampledText], prompt: SampledPrompt | None = None) -> bytes:
    """Serialize the result of a sampling request.

    Raises:
        ValueError: a sequence is empty, or its numbers of tokens and log-probabilities differ.
    """
    prompt = prompt or SampledPrompt()
    message = pb.SampleResponse(prompt_cache_hit_tokens=prompt.hits)
    for text in sequences:
        if not len(text.tokens) or len(text.tokens) != len(text.logprobs):
            raise ValueError(
                f"a sequence must have one logprob per token ({len(text.tokens)}), got {len(text.logprobs)}"
            )
        part = message.sequences.add(
            stop_reason=_STOPS[text.stop], tokens=_i4(text.tokens), logprobs=_f4(text.logprobs)
        )
        if text.sampled is not None:
            part.twinkle_sampled_logprobs = _f4(text.sampled)
        if text.raw is not None:
            part.twinkle_raw_logprobs = _f4(text.raw)
        if text.topk is not None:
            part.topk_sampled_logprobs.CopyFrom(text.topk.message())
    if prompt.logprobs is not None:
        message.prompt_logprobs = _f4(prompt.logprobs)
    if prompt.topk is not None:
        message.topk_prompt_logprobs.CopyFrom(prompt.topk.message())
    if prompt.targets is not None:
        message.target_prompt_logprobs.CopyFrom(write_tensor(prompt.targets))
    if prompt.alternatives is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(write_tensor(prompt.alternatives[0]))
        message.prompt_alt_tokens.logprobs.CopyFrom(write_tensor(prompt.alternatives[1]))
    return bytes(message.SerializeToString(deterministic=True))


def read_sample_response(data: bytes) -> tuple[list[SampledText], SampledPrompt]:
    """Return the sequences, and the data about the prompt.

    Raises:
        ValueError: the bytes are not such a message, or its arrays are inconsistent.
    """
    message = _parse(pb.SampleResponse, data)
    alternatives = None
    if message.HasField("prompt_alt_tokens"):
        drawn = message.prompt_alt_tokens
        alternatives = (read_tensor(drawn.tokens), read_tensor(drawn.logprobs))
    logprobs = from_bytes(message.prompt_logprobs, pb.DTYPE_FLOAT32, "prompt logprobs")
    prompt = SampledPrompt(
        logprobs if message.HasField("prompt_logprobs") else None,
        TopK.read(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
        message.prompt_cache_hit_tokens,
        _layout(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None,
        alternatives,
    )
    return [_sampled(part) for part in message.sequences], prompt


def _sampled(part: pb.SampledSequence) -> SampledText:
    return SampledText(
        from_bytes(part.tokens, pb.DTYPE_INT32, "sampled tokens"),
        from_bytes(part.logprobs, pb.DTYPE_FLOAT32, "sampled logprobs"),
        "stop" if part.stop_reason == pb.STOP_REASON_STOP else "length",
        TopK.read(part.topk_sampled_logprobs) if part.HasField("topk_sampled_logprobs") else None,
        _optional(part, "twinkle_sampled_logprobs"),
        _optional(part, "twinkle_raw_logprobs"),
    )


def _optional(part: pb.SampledSequence, name: str) -> NDArray[np.float32] | None:
    return from_bytes(getattr(part, name), pb.DTYPE_FLOAT32, name) if part.HasField(name) else None


def _layout(tensor: pb.Tensor) -> Array | Sparse:
    return read_sparse(tensor) if tensor.WhichOneof("encoding") == "sparse_csr" else read_tensor(tensor)


def _text(chunk: pb.Chunk) -> NDArray[np.int32]:
    which = chunk.WhichOneof("chunk")
    if which != "encoded_text":
        raise ValueError(f"chunks of model_input must be text for this model, got {which or 'an empty chunk'}")
    return from_bytes(chunk.encoded_text.tokens, pb.DTYPE_INT32, "the tokens of a chunk")


def _groups(outputs: Sequence[Mapping[str, Array]]) -> Iterator[Sequence[Mapping[str, Array]]]:
    """Split a list where names, trailing shapes or types change; a record holds arrays of one form."""
    begin = 0
    for i in range(1, len(outputs) + 1):
        if i == len(outputs) or _form(outputs[i]) != _form(outputs[begin]):
            yield outputs[begin:i]
            begin = i


def _form(output: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (array.shape[1:], array.dtype.kind + str(array.dtype.itemsize)) for name, array in output.items()}


def _parse(kind: type[M], data: bytes) -> M:
    try:
        message: M = kind.FromString(data)
    except DecodeError:
        raise ValueError(f"cannot parse {len(data)} bytes as {kind.__name__}") from None
    return message


def _i4(array: Array) -> bytes:
    return np.asarray(array).astype("<i4", copy=False).tobytes()


def _f4(array: Array) -> bytes:
    return np.asarray(array).astype("<f4", copy=False).tobytes()
