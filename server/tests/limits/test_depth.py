"""Nesting is bounded before anybody parses."""

import contextlib

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_server.errors import BadRequest
from twinkle_server.limits.body import check_depth


def depth_of(value) -> int:
    """Count by recursion over the parsed value."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def test_the_bound_itself_passes_and_one_more_does_not() -> None:
    check_depth(b"[" * 64 + b"]" * 64)
    with pytest.raises(BadRequest, match="nested at most 64 levels"):
        check_depth(b"[" * 65 + b"]" * 65)


def test_brackets_side_by_side_and_in_texts_do_not_count() -> None:
    check_depth(orjson.dumps([[] for _ in range(1000)]))
    check_depth(orjson.dumps(["[" * 1000, '\\"' + "{" * 1000]))


@pytest.mark.parametrize("body", [b"[" * 10**6, b'{"a":' * 10**5, b'"' + b"[" * 1000, b'"\\' * 50_000 + b"[" * 100])
def test_what_does_not_end_is_told_in_time_that_grows_with_its_length_only(body: bytes) -> None:
    with contextlib.suppress(BadRequest):  # a quadratic one would take minutes
        check_depth(body * 10)


values = st.recursive(
    st.none() | st.text(alphabet='[]{}"\\a', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(values, st.integers(1, 6))
def test_it_agrees_with_a_parser(value, deepest: int) -> None:
    body = orjson.dumps(value)
    if depth_of(value) > deepest:
        with pytest.raises(BadRequest):
            check_depth(body, deepest)
    else:
        check_depth(body, deepest)
