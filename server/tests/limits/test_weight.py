"""A body is refused for what it would become in memory, before it becomes that."""

import tracemalloc
from collections.abc import Callable

import orjson
import pytest
from server_raw import datum, pass_body

from twinkle_server.errors import Busy, TooLarge
from twinkle_server.limits.body import check_parts, check_weight
from twinkle_server.settings import Limits
from twinkle_server.wire import tinker_pb2 as wire

MOST = 64 * Limits().datums


def weigh(body: bytes) -> int:
    told: list[int] = []
    check_weight(body, 2**40, told.append)
    return sum(told)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "value",
    [
        list(range(10**6, 10**6 + 50_000)),
        [0.5 + number for number in range(50_000)],
        [[] for _ in range(50_000)],
        [{} for _ in range(50_000)],
        [{"a": number} for number in range(20_000)],
        {str(number): number for number in range(50_000)},
        [str(number) for number in range(50_000)],
        [[[number]] for number in range(20_000)],
    ],
    ids=lambda value: f"{type(value).__name__} of {str(next(iter(value)))[:12]}",
)
def test_json_weighs_at_least_what_it_becomes(value: object) -> None:
    body = orjson.dumps(value)
    tracemalloc.start()
    kept = orjson.loads(body)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept is not None
    assert size <= weigh(body) + len(body) <= 4 * size, "a body that is meant is not taken for a bomb"


def test_json_that_would_weigh_too_much_is_refused_unread() -> None:
    body = b"[" + b"1," * 100_000 + b"1]"
    with pytest.raises(TooLarge, match="fewer rows"):
        check_weight(body, 1_000_000, lambda size: None)

    def full(size: int) -> None:
        raise Busy("full")

    with pytest.raises(Busy):
        check_weight(body, 10_000_000, full)


def part(number: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    size, rest = b"", len(content)
    while rest > 127:
        size, rest = size + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + content


BOMBS: dict[str, Callable[[int], bytes]] = {
    "rows": lambda count: part(3, b"") * count,
    "chunks": lambda count: part(3, part(1, b"") * count),
    "inputs": lambda count: part(3, part(2, b"") * count),
    "sizes": lambda count: part(3, part(2, part(2, part(4, b"\x01" * count)))),
    "options": lambda count: part(7, b"") * count,
    "fields that nobody knows": lambda count: b"\xf8\x01\x01" * count,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pass_of_countless_parts_is_refused_unread(name: str) -> None:
    make = BOMBS[name]
    check_parts(make(1000), 1010)
    for most in (900, 0):
        with pytest.raises(TooLarge, match=f"at most {most} parts"):
            check_parts(make(1000), most)
    wire.ForwardBackwardRequest.FromString(make(1000))


def test_the_largest_pass_that_is_meant_has_room() -> None:
    row = datum([1] * 64, **{f"input_{at}": [[0.5] * 4] * 16 for at in range(6)})
    body = pass_body("m" * 100, 1, [row] * Limits().datums, "ppo", config={"beta": 0.5, "name": "x"})
    assert len(body) > 2**20
    check_parts(body, MOST)


@pytest.mark.parametrize("cut", range(1, 60))
def test_what_is_cut_off_is_left_to_the_parser(cut: int) -> None:
    body = pass_body("model", 1, [datum([1, 2, 3], weights=[1.0, 1.0, 1.0])])
    check_parts(body[:-cut], 1000)
    check_parts(bytes(byte ^ cut for byte in body), 1000)
