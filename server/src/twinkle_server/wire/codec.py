"""The protocol's messages with numpy on our side: what a pass asks for, and what passes and samples give back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.arrays import (
    MAX_CELLS,
    Array,
    Sparse,
    from_bytes,
    read_batch,
    read_sparse,
    read_tensor,
    write_batch,
    write_tensor,
)

__all__ = [
    "EMPTY_LOGPROB",
    "MAX_CELLS",
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
    "read_sample_response",
    "read_sparse",
    "read_tensor",
    "sample_response",
    "write_tensor",
]

EMPTY_LOGPROB: Final = -99999.0
"""Log-probability of a cell of `TopK` that holds nothing; its token is 0."""
M = TypeVar("M", bound=Message)
StopReason = Literal["stop", "length"]
_STOPS: Final[dict[StopReason, pb.StopReason]] = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def parse_request(payload: bytes) -> pb.ForwardBackwardRequest:
    """Read a pass's request.

    Raises:
        ValueError: the bytes are no such message.
    """
    return _parse(pb.ForwardBackwardRequest, payload)


def loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return the options of a request's loss: the newer map where it says something, else the older one.

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
    """Return the tokens of a datum's text chunks, one after another.

    Raises:
        ValueError: there is a chunk that is no text, or its bytes are no tokens.
    """
    parts = [_text(chunk) for chunk in datum.model_input]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, "<i4"), *parts])


def datum_length(datum: pb.Datum) -> int:
    """Return about how many tokens a datum has, without reading them: what it costs, also where it is wrong."""
    size = sum(len(chunk.encoded_text.tokens) + 4 * max(chunk.image.expected_tokens, 0) for chunk in datum.model_input)
    return int(size) // 4


def datum_inputs(datum: pb.Datum, cells: int = MAX_CELLS) -> dict[str, Array]:
    """Return the inputs of a datum's loss by name, as dense arrays in the types that were sent.

    Args:
        datum: a row of the request.
        cells: that each sparse one may have once it is written out.

    Raises:
        ValueError: an array's shape, type, indices and bytes do not fit together; the message names it.
    """
    return {name: read_tensor(datum.loss_fn_inputs[name], name, cells) for name in sorted(datum.loss_fn_inputs)}


def forward_backward_output(outputs: Sequence[Mapping[str, Array]], metrics: Mapping[str, float]) -> bytes:
    """Write what a pass gives.

    Args:
        outputs: for each datum its arrays by name, `[N]` or `[N, K]`; the names are the same for all.
        metrics: by `name:reduction`.
    """
    records = []
    for group in _alike(outputs):
        record = pb.ArrayRecord(num_datums=len(group))
        for name in group[0]:
            record.fields[name].CopyFrom(write_batch([output[name] for output in group]))
        records.append(record)
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=metrics)
    return bytes(message.SerializeToString(deterministic=True))


def read_forward_backward_output(data: bytes) -> tuple[list[dict[str, Array]], dict[str, float]]:
    """Return the arrays of each datum, and the metrics.

    Raises:
        ValueError: the bytes are no such message, or what it says of its arrays does not fit.
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


@dataclass(frozen=True, slots=True)
class TopK:
    """The likeliest tokens of some positions, likeliest first; a cell without one holds token 0 and `EMPTY_LOGPROB`.

    Attributes:
        tokens: `[N, K]` int32.
        logprobs: `[N, K]` float32.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def message(self) -> pb.TopkLogprobs:
        """Return it as a message."""
        length, k = self.tokens.shape
        return pb.TopkLogprobs(token_ids=_i4(self.tokens), logprobs=_f4(self.logprobs), k=k, length=length)

    @classmethod
    def read(cls, message: pb.TopkLogprobs) -> "TopK":
        """Read a message.

        Raises:
            ValueError: its sizes do not fit its bytes.
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
        tokens: `[N]` int32, N ≥ 1, stopping tokens included.
        logprobs: `[N]` float32, one for each.
        stop: why it ended.
        topk: alternatives for each token, if they were asked for.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop: StopReason
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """What a sampling request says about its prompt of P tokens.

    Attributes:
        logprobs: `[P]` float32; NaN where none was computed, and first.
        topk: alternatives for each prompt token.
        hits: prompt tokens that were found in a cache.
        targets: scores of the tokens that were asked for, in the layout of the question.
        alternatives: drawn tokens `[P - 1, K]` int64 and their log-probabilities.
    """

    logprobs: NDArray[np.float32] | None = None
    topk: TopK | None = None
    hits: int = 0
    targets: Array | Sparse | None = None
    alternatives: tuple[Array, Array] | None = field(default=None)


def sample_response(sequences: Sequence[SampledText], prompt: SampledPrompt | None = None) -> bytes:
    """Write what a sampling request gives.

    Raises:
        ValueError: a sequence is empty, or has another number of log-probabilities than tokens.
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
    """Return the sequences, and what is said about the prompt.

    Raises:
        ValueError: the bytes are no such message, or what it says of its arrays does not fit.
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
    )


def _layout(tensor: pb.Tensor) -> Array | Sparse:
    return read_sparse(tensor) if tensor.WhichOneof("encoding") == "sparse_csr" else read_tensor(tensor)


def _text(chunk: pb.Chunk) -> NDArray[np.int32]:
    which = chunk.WhichOneof("chunk")
    if which != "encoded_text":
        raise ValueError(f"chunks of model_input must be text for this model, got {which or 'an empty chunk'}")
    return from_bytes(chunk.encoded_text.tokens, pb.DTYPE_INT32, "the tokens of a chunk")


def _alike(outputs: Sequence[Mapping[str, Array]]) -> Iterator[Sequence[Mapping[str, Array]]]:
    """Cut a list where the shape behind the first axis, or the type, changes: a record holds one of each."""
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
