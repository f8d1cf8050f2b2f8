"""The binary frame: what it carries, and what it refuses."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from twinkle_client import wire
from twinkle_client.errors import WireError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_unchanged(value: object) -> None:
    assert wire.unpack(wire.pack(value)) == value


@given(
    arrays.arrays(
        st.sampled_from(["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]), arrays.array_shapes(min_side=0)
    )
)
def test_arrays_come_back_bit_for_bit(array: np.ndarray) -> None:
    back = wire.unpack(wire.pack({"x": [array]}))["x"][0]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16) | st.lists(st.floats(), min_size=16))
def test_long_lists_of_numbers_are_tensors_and_come_back_as_lists(values: list) -> None:
    frame = wire.pack(values)
    assert isinstance(wire.unpack(frame, lists=False), np.ndarray)
    back = wire.unpack(frame)
    assert [type(item) for item in back] == [type(item) for item in values]
    assert [struct.pack("d", x) for x in back] == [struct.pack("d", x) for x in values]


def test_a_token_id_costs_four_bytes() -> None:
    assert len(wire.pack({"input_ids": list(range(10_000))})) < 40_100


def test_bfloat16_of_torch_is_read_as_the_same_numbers_in_float32() -> None:
    tensor = torch.randn(3, 5).bfloat16()
    back = wire.unpack(wire.pack(tensor))
    assert back.dtype == np.float32
    assert np.array_equal(back, tensor.float().numpy())


def test_numbers_that_json_does_not_have() -> None:
    back = wire.unpack(wire.pack([math.nan, math.inf, -math.inf, np.float32(0.5), torch.tensor(2)]))
    assert math.isnan(back[0])
    assert back[1:4] == [math.inf, -math.inf, 0.5]
    assert back[4].item() == 2


def test_noncontiguous_and_big_endian_arrays() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    assert wire.unpack(wire.pack(array)).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"rows": [{"model": object()}]}, r"cannot send rows\[0\].model: a object has no form"),
        ({1: 2}, "keys must be texts"),
        ({"$tensor": 0}, "keys must be texts other than"),
        (2**64, "at most 64 bits"),
        (np.array(["a"]), "its dtype is str32"),
        (torch.zeros(2, dtype=torch.complex64), "dtype complex64"),
    ],
)
def test_what_has_no_form_is_refused_by_its_place(value: object, message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.pack(value)


def frame(value: object, tensors: object, data: bytes = b"") -> bytes:
    head = json.dumps({"value": value, "tensors": tensors}).encode()
    start = struct.pack("<4sI", wire.MAGIC, len(head)) + head
    return start + bytes(-len(start) % 8) * bool(data) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "at least 8 bytes"),
        (b"PK\3\4" + bytes(20), "must begin with"),
        (struct.pack("<4sI", wire.MAGIC, 2**31) + b"{}", "cannot have"),
        (struct.pack("<4sI", wire.MAGIC, 2) + b"{]", "not valid JSON"),
        (struct.pack("<4sI", wire.MAGIC, 2) + b"[]", "must have the keys"),
        (struct.pack("<4sI", wire.MAGIC, 5000) + b"[" * 5000, "not valid JSON"),
        (frame(1, {}), "must be a list"),
        (frame(1, [["object", [1]]], bytes(8)), "header must be"),
        (frame(1, [["int64", [-1]]], bytes(8)), "shape must be"),
        (frame(1, [["int64", [True]]], bytes(8)), "shape must be"),
        (frame(1, [["int64", [2**40, 2**40]]], bytes(8)), "needs"),
        (frame(1, [["int64", [2]]], bytes(8)), "needs 16 bytes"),
        (frame(1, [], bytes(8)), "bytes after its tensors"),
        (frame({"$tensor": 1}, [["int64", [1]]], bytes(8)), "refers to tensor 1"),
        (frame({"$tensor": "x"}, []), "refers to tensor x"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.unpack(data)


@given(st.binary(max_size=200), st.integers(0, 200), st.binary(max_size=4))
def test_damaged_frames_raise_no_other_error(data: bytes, at: int, patch: bytes) -> None:
    good = bytearray(wire.pack({"x": np.arange(5), "y": [1.0] * 20, "z": data.hex()}))
    good[at : at + len(patch)] = patch
    try:
        wire.unpack(good)
    except WireError:
        return
