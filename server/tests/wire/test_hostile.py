"""Whatever the bytes, reading them ends in an answer or in words, and never in anything else."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import (
    datum_inputs,
    datum_tokens,
    loss_config,
    parse_request,
    read_forward_backward_output,
    read_sample_response,
    read_tensor,
)
from twinkle_server.wire.json_bodies import pass_message, tensor_message

INDICES = st.lists(st.integers(-3, 9), max_size=6)
SHAPES = st.lists(st.one_of(st.integers(-2, 5), st.integers(2**30, 2**62)), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def is_read_or_refused(read: Any, *arguments: Any) -> None:
    said = "it was read"
    try:
        read(*arguments)
    except ValueError as error:
        said = str(error)
    assert len(said) > 8


def read_all(data: bytes) -> None:
    request = parse_request(data)
    loss_config(request)
    for datum in request.data:
        datum_tokens(datum)
        datum_inputs(datum, 1000)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes):
    is_read_or_refused(read_all, data)
    is_read_or_refused(read_forward_backward_output, data)
    is_read_or_refused(read_sample_response, data)


@given(place=st.integers(0, 106), value=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_with_one_byte_changed_is_read_or_refused(golden_request: bytes, place: int, value: int):
    data = bytearray(golden_request)
    data[place] = value
    is_read_or_refused(read_all, bytes(data))
    is_read_or_refused(read_all, bytes(data[:place]))


@given(st.binary(max_size=40), INDICES, INDICES, SHAPES, st.integers(0, 5))
@settings(max_examples=300)
def test_any_sparse_tensor_is_written_out_or_refused(
    values: bytes, rows: list[int], columns: list[int], shape: list[int], dtype: int
):
    import numpy as np

    tensor = pb.Tensor(shape=shape)
    tensor.dtype = dtype  # type: ignore[assignment]
    tensor.sparse_csr.values = values
    tensor.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    is_read_or_refused(read_tensor, tensor, "weights", 1000)


@given(JSON)
@settings(max_examples=200)
def test_any_json_is_a_pass_or_refused(work: Any):
    is_read_or_refused(lambda: pass_message({"model_id": "m", "seq_id": 1}, work, forward_only=False))
    row = {"model_input": work, "loss_fn_inputs": work}
    body = {"data": [row], "loss_fn": "x", "loss_fn_config": work}
    is_read_or_refused(lambda: pass_message({"model_id": "m", "seq_id": 1}, body, forward_only=False))


@pytest.mark.full
@given(JSON, JSON, JSON, JSON)
@settings(max_examples=200)
def test_any_json_is_a_tensor_or_refused(data: Any, shape: Any, rows: Any, columns: Any):
    fields = {"data": data, "shape": shape, "sparse_crow_indices": rows, "sparse_col_indices": columns}
    is_read_or_refused(lambda: read_tensor(tensor_message({**fields, "dtype": "int64"}, "weights"), "weights", 1000))
