"""Decompression that counts: a small body that stands for a huge one stops at the bound."""

import io
from collections.abc import Callable, Iterator

import zstandard

from twinkle_server.errors import BadRequest, TooLarge

_PIECE = 2**20
_WINDOW = 2**23  # bytes that each body which is decompressed may need beside its own; what any decoder must offer
_BLOCK = 2**17  # bytes of one at most
_BLOCKS = 2**16
_CHECKSUM, _BLOCK_HEADER = 4, 3
_RLE, _COMPRESSED = 1, 2


def decompress(body: bytes, limit: int, take: Callable[[int], None]) -> bytes:
    """Return what a zstd body stands for.

    The size that a frame claims is not believed: output is made a piece at a time and counted.

    Args:
        body: one frame or several.
        limit: bytes of the result.
        take: is told the size of each piece before it is kept; may raise.

    Raises:
        TooLarge: the result is larger than the limit.
        BadRequest: the body is no zstd, or is cut off.
    """
    try:
        if _largest(body) > limit:
            for _ in _pieces(body, limit):  # nothing is kept of what turns out to be too large
                pass
        kept = io.BytesIO()
        for piece in _pieces(body, limit):
            take(len(piece))
            kept.write(piece)
    except zstandard.ZstdError as error:
        raise BadRequest(
            "cannot decompress the zstd request body with a window of 8 MiB: "
            "use zstd level 19 or lower, or send the body uncompressed"
        ) from error
    return kept.getvalue()


def _pieces(body: bytes, limit: int) -> Iterator[bytes]:
    """Yield what a body stands for, up to the limit."""
    total = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        while piece := reader.read(min(_PIECE, limit + 1 - total)):
            total += len(piece)
            if total > limit:
                raise TooLarge(f"the body is larger than {limit} bytes once decompressed; send fewer rows at a time")
            yield piece


def _largest(body: bytes) -> int:
    """Return how many bytes a body can stand for at most, from the heads of its blocks.

    Raises:
        BadRequest: it ends inside a frame, which the decompressor would take for a short one.
    """
    place = blocks = size = 0
    while place < len(body):
        place, inside, more = _frame(body, place, _BLOCKS - blocks)
        blocks, size = blocks + inside, size + more
    if place != len(body) or not body:
        raise BadRequest("the zstd frame of the request body is truncated")
    return size


def _frame(body: bytes, start: int, allowed: int) -> tuple[int, int, int]:
    """Return where a frame ends (perhaps behind the body), its blocks, and their bytes at most (RFC 8878, 3.1)."""
    head = body[start : start + 18]
    frame = zstandard.get_frame_parameters(head)
    place, last, count, largest = start + zstandard.frame_header_size(head), False, 0, 0
    while not last:
        header = int.from_bytes(body[place : place + _BLOCK_HEADER], "little")
        if place + _BLOCK_HEADER > len(body) or count == allowed:
            raise BadRequest("the zstd frame of the request body is truncated or has too many blocks")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        place += _BLOCK_HEADER + (1 if kind == _RLE else size)
        largest += _BLOCK if kind == _COMPRESSED else size
        count += 1
    return place + (_CHECKSUM if frame.has_checksum else 0), count, largest
