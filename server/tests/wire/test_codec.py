"""Messages say exactly what the SDK's own codec reads and writes, and hostile ones are refused in words."""

import numpy as np
import pytest

from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import (
    SampledPrompt,
    SampledText,
    Sparse,
    TopK,
    datum_inputs,
    datum_length,
    datum_tokens,
    forward_backward_output,
    loss_config,
    parse_request,
    read_forward_backward_output,
    read_sample_response,
    read_tensor,
    sample_response,
    write_tensor,
)

OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f7264123e123a0a086c6f6770726f6273122e0a10000080bf000000c0000040c0000080c0121800000000000000"
    "000c000000000000001000000000000000180118021a130a086c6f73733a73756d110000000000001440"
)
SAMPLE = bytes.fromhex("0a160801120805000000060000001a08000000bf000080be12080000c07f0000c0bf2001")


def f4(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_golden_request_is_decoded_to_exactly_its_arrays(golden_request: bytes):
    request = parse_request(golden_request)
    assert (request.model_id, request.seq_id, request.loss_fn, request.forward_only) == (
        "m",
        1,
        "cross_entropy",
        False,
    )
    [datum] = request.data
    inputs = datum_inputs(datum)
    assert datum_tokens(datum).tolist() == [1, 2, 3]
    assert datum_length(datum) == 3
    assert (inputs["target_tokens"].dtype, inputs["target_tokens"].tolist()) == (np.int64, [2, 3, 4])
    assert (inputs["weights"].dtype, inputs["weights"].tolist()) == (np.float32, [0, 1, 1])
    assert parse_request(golden_request + bytes.fromhex("3001")).forward_only


def test_the_golden_results_are_written_bit_for_bit():
    assert forward_backward_output([{"logprobs": f4(-1, -2, -3)}, {"logprobs": f4(-4)}], {"loss:sum": 5.0}) == OUTPUT
    text = SampledText(np.array([5, 6], np.int32), f4(-0.5, -0.25), "length")
    assert sample_response([text], SampledPrompt(logprobs=f4(np.nan, -1.5), hits=1)) == SAMPLE


def test_results_with_several_widths_take_several_records_and_come_back_in_order():
    outputs = [f4(1, 2), f4(3), np.arange(6, dtype=np.float32).reshape(3, 2), f4(), np.zeros((2, 4), np.float32)]
    data = forward_backward_output([{"logprobs": array} for array in outputs], {"loss:sum": 1.0, "n:sum": 2.0})
    assert len(pb.ForwardBackwardOutput.FromString(data).loss_fn_outputs) == 4
    back, metrics = read_forward_backward_output(data)
    assert [output["logprobs"].tolist() for output in back] == [array.tolist() for array in outputs]
    assert metrics == {"loss:sum": 1.0, "n:sum": 2.0}


def test_the_newer_options_of_a_loss_win_over_the_older():
    request = pb.ForwardBackwardRequest(loss_fn_config={"a": 1.0, "b": 2.0})
    request.loss_fn_config_v2["a"].number = 3.0
    request.loss_fn_config_v2["name"].text = "x"
    assert loss_config(request) == {"a": 3.0, "b": 2.0, "name": "x"}
    request.loss_fn_config_v2["empty"].SetInParent()
    with pytest.raises(ValueError, match="'empty' must have a number or a text"):
        loss_config(request)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.int32])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3)])
def test_dense_arrays_come_back_as_they_were(dtype: type, shape: tuple[int, ...]):
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    back = read_tensor(write_tensor(array))
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, shape, array.tolist())


def test_bfloat16_is_widened_exactly():
    halves = np.array([0x3F80, 0xC000, 0x7F80], "<u2")
    assert read_tensor(pb.Tensor(dense=halves.tobytes(), dtype=pb.DTYPE_BFLOAT16)).tolist() == [1.0, -2.0, np.inf]


def test_a_sparse_array_equals_the_dense_one_it_stands_for():
    dense = np.array([[0, 7, 0], [0, 0, 0], [1, 0, 2]], np.int64)
    tensor = write_tensor(Sparse(np.array([7, 1, 2]), np.array([0, 1, 1, 3]), np.array([1, 0, 2]), (3, 3)))
    assert read_tensor(tensor).tolist() == dense.tolist()


def test_alternatives_and_scores_of_a_prompt_come_back_in_their_layout():
    topk = TopK(np.array([[0, 0], [4, 2]], np.int32), f4(-99999, -99999, -0.5, -1).reshape(2, 2))
    scores = Sparse(f4(-0.25), np.array([0, 1]), np.array([2]), (1, 3))
    text = SampledText(np.array([9], np.int32), f4(-1), "stop", topk)
    drawn = (np.array([[3, 3]]), f4(-2, -2).reshape(1, 2))
    prompt = SampledPrompt(f4(np.nan, -0.5), topk, 0, scores, drawn)
    [back], said = read_sample_response(sample_response([text], prompt))
    assert back.stop == "stop"
    assert back.topk is not None
    assert back.topk.tokens.tolist() == topk.tokens.tolist()
    assert isinstance(said.targets, Sparse)
    assert said.targets.dense().tolist() == [[0.0, 0.0, -0.25]]
    assert said.alternatives is not None
    assert said.alternatives[0].tolist() == [[3, 3]]


def test_an_empty_sequence_is_never_written():
    with pytest.raises(ValueError, match=r"one logprob per token .0., got 0"):
        sample_response([SampledText(np.zeros(0, np.int32), f4(), "stop")])


def sparse(values: int, rows: list[int], columns: list[int], shape: list[int]) -> pb.Tensor:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
    tensor.sparse_csr.values = f4(*range(1, values + 1)).tobytes()
    tensor.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    return tensor


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (pb.Tensor(dense=b"12345", dtype=pb.DTYPE_FLOAT32), "multiple of 4 bytes, got 5"),
        (pb.Tensor(dense=b"1234"), "unknown dtype 0"),
        (pb.Tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32, shape=[2]), r"shape \(2\), got 1"),
        (pb.Tensor(dense=b"12341234", dtype=pb.DTYPE_FLOAT32, shape=[-1, -2]), "shape"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[2**62, 2**62, 9, 9, 9, 9]), "…"),
        (sparse(1, [0, 1], [0], [1]), "two dimensions"),
        (sparse(0, [0, 0], [], [1, 2**40]), "at most"),
        (sparse(0, [0], [], [2**60, 1]), "row pointers"),
        (sparse(1, [0, 1], [5], [1, 5]), "between 0 and 4"),
        (sparse(1, [0, 1], [-1], [1, 5]), "between 0 and 4"),
        (sparse(2, [0, 3, 2], [0, 1], [2, 5]), "must not decrease"),
        (sparse(2, [0, 2], [1, 1], [1, 5]), "increase within a row"),
        (sparse(2, [0, 2], [1], [1, 5]), "one column index per value .2., got 1"),
        (sparse(1, [0, 2], [1], [1, 5]), "row pointers from 0 to 1"),
        (sparse(0, [], [], [-1, 5]), "sizes of a sparse array must be at least 0"),
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_is_refused_with_its_name(tensor: pb.Tensor, words: str):
    with pytest.raises(ValueError, match=words) as caught:
        read_tensor(tensor, "weights")
    assert "weights" in str(caught.value)


def batch(data: bytes, offsets: list[int], trailing: list[int], count: int) -> bytes:
    record = pb.ArrayRecord(num_datums=count)
    record.fields["logprobs"].CopyFrom(
        pb.BatchedTensor(
            data=data, offsets=np.array(offsets, "<i8").tobytes(), dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing
        )
    )
    return pb.ForwardBackwardOutput(loss_fn_outputs=[record]).SerializeToString()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (batch(b"12341234", [0, 4], [], 1), "offsets"),
        (batch(b"12341234", [0, 6, 8], [], 2), "offsets"),
        (batch(b"12341234", [0, 12, 8], [], 2), "offsets"),
        (batch(b"", [], [], 0), "offsets"),
        (batch(b"12341234", [0, 8], [3], 1), "trailing shape"),
        (batch(b"12341234", [0, 8], [0], 1), "trailing shape"),
        (batch(b"12341234", [0, 8], [], 2), "record must cover its 2 datums"),
        (pb.ForwardBackwardOutput(loss_fn_outputs=[pb.ArrayRecord(num_datums=2**40)]).SerializeToString(), "datums"),
        (b"\xff\xff", "cannot parse 2 bytes as ForwardBackwardOutput"),
    ],
)
def test_a_result_that_does_not_fit_its_bytes_is_refused(data: bytes, words: str):
    with pytest.raises(ValueError, match=words):
        read_forward_backward_output(data)


def test_chunks_that_are_no_text_are_refused_and_still_have_a_cost():
    datum = pb.Datum()
    datum.model_input.add().image.CopyFrom(pb.ImageChunk(data=b"x", format="png", expected_tokens=7))
    assert datum_length(datum) == 7
    with pytest.raises(ValueError, match="must be text for this model, got image"):
        datum_tokens(datum)
    with pytest.raises(ValueError, match="an empty chunk"):
        datum_tokens(pb.Datum(model_input=[pb.Chunk()]))
