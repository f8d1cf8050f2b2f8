"""Ids, paths and payloads: what goes in comes out, and nothing else gets in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_server.engine.messages import SIZES, Message
from twinkle_server.errors import BadRequest
from twinkle_server.ids import KINDS, CheckpointPath, check_name, model_id, new_id, sampler_id
from twinkle_server.operations import Create, Sample, Save
from twinkle_server.tenancy.keys import new_key

NAMES = st.text("abcXYZ019._-", min_size=1, max_size=128).filter(lambda name: name.strip("."))


def test_ids_have_128_bits_and_no_slash() -> None:
    made = {new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(len(id_) == 32 and int(id_, 16) < 2**128 for id_ in made)


def test_models_and_samplers_are_named_as_the_sdk_names_them() -> None:
    assert model_id("s", 3) == "s:train:3"
    assert sampler_id("s", 0) == "s:sample:0"


@given(NAMES, st.sampled_from(KINDS))
def test_a_path_is_read_as_it_was_written(name: str, kind: str) -> None:
    path = CheckpointPath("s:train:0", kind, name)
    assert CheckpointPath.parse(str(path)) == path


@pytest.mark.parametrize(
    "text",
    ["", "tinker://", "tinker://a/weights", "tinker://a/weights/b/c", "tinker:///weights/b", "tinker://a/other/b",
     "tinker://a/weights/..", "tinker://a/weights/b\0", "file://a/weights/b", "tinker://a/weights/" + "b" * 129],
)  # fmt: skip
def test_anything_else_is_no_path(text: str) -> None:
    with pytest.raises(BadRequest):
        CheckpointPath.parse(text)


@pytest.mark.parametrize("name", ["", ".", "...", "a/b", "a\\b", "a b", "ä", "a\n", "x" * 129])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="a checkpoint name must be"):
        check_name(name)


def test_a_name_with_a_key_in_it_is_refused() -> None:
    assert check_name("tml-first-run") == "tml-first-run"
    with pytest.raises(BadRequest, match="must not contain an API key"):
        check_name(f"of-{new_key()}")


@pytest.mark.parametrize(
    "payload",
    [Create(rank=8, seed=1), Save(folder="f", kind="weights", name="n"), Sample(tokens=[1, 2], stop=["a"], top_p=0.5)],
)
def test_a_payload_is_read_as_it_was_written_and_always_as_the_same_bytes(payload: Create | Save | Sample) -> None:
    data = payload.dump()
    assert type(payload).parse(data) == payload
    assert type(payload).parse(data).dump() == data


@given(st.dictionaries(st.text(max_size=5).filter(lambda k: k != "type"), st.integers(-(2**53), 2**53)), st.binary())
def test_a_message_is_read_as_it_was_sent(head: dict[str, int], body: bytes) -> None:
    frame = Message("run", head, body).pack()
    size, rest = SIZES.unpack_from(frame)
    start = SIZES.size
    read = Message.unpack(frame[start : start + size], frame[start + size : start + size + rest])
    assert (read.type, read.head, read.body) == ("run", head, body)
