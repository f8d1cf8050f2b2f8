"""Decompression stops at its bound, whatever a frame claims, and takes no body that is cut off."""

import contextlib
import io
import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_server.errors import BadRequest, Busy, TooLarge
from twinkle_server.limits.body import decompress

MIB = 2**20


def nothing(count: int) -> None:
    """Count nothing."""


def streamed(data: bytes) -> bytes:
    """Compress without telling the size."""
    target = io.BytesIO()
    with zstandard.ZstdCompressor(write_checksum=True).stream_writer(target, closefd=False) as writer:
        writer.write(data)
    return target.getvalue()


@pytest.mark.parametrize("compress", [zstandard.compress, streamed, lambda data: zstandard.compress(data, level=19)])
@pytest.mark.parametrize("data", [b"", b"x", b"abc" * 500_000, os.urandom(300_000)])
def test_what_was_compressed_comes_back(compress, data: bytes) -> None:
    assert decompress(compress(data), 2 * MIB, nothing) == data


def test_frames_after_each_other_are_one_body() -> None:
    assert decompress(zstandard.compress(b"one ") + streamed(b"two"), MIB, nothing) == b"one two"


@pytest.mark.parametrize("compress", [zstandard.compress, streamed])
def test_a_bomb_stops_at_the_bound(compress) -> None:
    bomb = compress(bytes(256 * MIB))
    assert len(bomb) < 64 * 1024
    told = []
    tracemalloc.start()
    with pytest.raises(TooLarge, match="the decompressed body must have at most 4194304 bytes"):
        decompress(bomb, 4 * MIB, told.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not told, "nothing of it was kept"
    assert peak < 4 * MIB


def test_a_window_that_takes_much_memory_is_refused() -> None:
    data = os.urandom(2**10) * (9 * 2**10)
    for window, taken in ((23, True), (24, False), (27, False)):
        parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        body = compressor.compress(data) + compressor.flush()
        with contextlib.nullcontext() if taken else pytest.raises(BadRequest, match="window of 8 MiB"):
            assert decompress(body, 16 * MIB, nothing) == data


def test_exactly_the_bound_is_taken() -> None:
    assert len(decompress(zstandard.compress(bytes(MIB)), MIB, nothing)) == MIB
    with pytest.raises(TooLarge):
        decompress(zstandard.compress(bytes(MIB + 1)), MIB, nothing)


def test_every_cut_is_noticed() -> None:
    for compress in (zstandard.compress, streamed):
        whole = compress(b"abcdefgh" * 60_000 + os.urandom(2000))
        for length in (*range(0, 40), len(whole) // 2, *range(len(whole) - 8, len(whole))):
            with pytest.raises(BadRequest):
                decompress(whole[:length], MIB, nothing)


@pytest.mark.parametrize("body", [b"", b"no zstd at all", zstandard.compress(b"x") + b"more", bytes(100)])
def test_what_is_no_zstd_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decompress(body, MIB, nothing)


def test_whoever_counts_may_end_it() -> None:
    def refuse(count: int) -> None:
        raise Busy("full")

    with pytest.raises(Busy):
        decompress(zstandard.compress(b"x" * 100), MIB, refuse)


def test_blocks_without_end_are_refused_early() -> None:
    head = zstandard.compress(b"")[:-3]
    with pytest.raises(BadRequest, match="too many blocks"):
        decompress(head + bytes(3) * 200_000, MIB, nothing)


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.data())
def test_bytes_that_were_changed_raise_words_or_give_bytes(payload: bytes, data) -> None:
    body = bytearray(zstandard.compress(payload * 20))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadRequest, TooLarge):
        assert len(decompress(bytes(body), MIB, nothing)) <= MIB
