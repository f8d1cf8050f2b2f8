"""Limits on request bodies: size, duration, nesting, number of parts, and the memory of all bodies together.

Decompression of a small body with a huge content stops at the limit.
"""

import asyncio
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import zstandard

from twinkle_client import wire
from twinkle_server.error_forms import error_path, refuse
from twinkle_server.errors import BadRequest, Busy, ServiceError, TooLarge
from twinkle_server.settings import Limits
from twinkle_server.tenancy.auth import header

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


class Budget:
    """A number of bytes shared by all requests; thread-safe.

    Args:
        size: total number of bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, count: int) -> None:
        """Reserve bytes.

        Raises:
            Busy: not enough bytes are left.
        """
        with self._lock:
            if self.used + count > self.size:
                raise Busy(f"request memory is full ({self.used} of {self.size} bytes in use); retry later")
            self.used += count

    def release(self, count: int) -> None:
        """Release bytes."""
        with self._lock:
            self.used -= count


class Share:
    """The bytes that one request has reserved from a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.reserved = 0

    def reserve(self, count: int) -> None:
        """Reserve more bytes.

        Raises:
            Busy: not enough bytes are left.
        """
        self._budget.reserve(count)
        self.reserved += count

    def release(self, count: int) -> None:
        """Release some bytes."""
        self._budget.release(count)
        self.reserved -= count

    def close(self) -> None:
        """Release all bytes."""
        self.release(self.reserved)


class Turnstile:
    """Lets one waiter pass per iteration of the event loop, so that work after it does not delay other tasks."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def through(self) -> None:
        """Wait for an iteration of the loop without another waiter."""
        if not self._turning:
            self._next_turn()
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self) -> None:
        self._turning = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._next_turn()
                return


_GRACE = 30.0  # seconds that a body may reserve, whatever its size
_SLOWEST = 64 * 2**10  # minimum bytes per second after that
ON_A_THREAD = 96 * 2**10
"""Size in bytes above which a body is processed on a thread; a pass of 4,096 tokens has 64 KiB (50 µs)."""
PARTS = 64
"""Maximum number of parts per row of a pass; legitimate rows have up to 30."""
PASSES = frozenset({"/api/v1/forward_backward", "/api/v1/forward"})
"""Paths whose bodies may be protobuf."""
NATIVE = "/twinkle/"
"""Prefix of the paths whose bodies may be frames; all other bodies are JSON, whatever their content type."""


class _Timeout(ServiceError):
    status = 408


class _Disconnected(Exception):
    """The client has disconnected."""


class BodyLimitMiddleware:
    """Gives the application a complete, decompressed body within the limits, or sends an error response.

    Args:
        app: the next application.
        limits: sizes.
        budget: bytes of all requests; each body counts until its response is sent.
    """

    def __init__(self, app: Any, limits: Limits, budget: Budget | None = None) -> None:
        self._app = app
        self._limits = limits
        self._turnstile = Turnstile()
        self.budget = budget or Budget(limits.inflight_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = Share(self.budget)
        try:
            body = await self._body(scope, receive, share)
        except ServiceError as error:
            share.close()
            await refuse(send, error, error_path(scope))
            return
        except _Disconnected:
            share.close()
            return
        try:
            if len(body) > ON_A_THREAD:
                await self._turnstile.through()
            await self._app(scope, _replay(body, receive), send)
        finally:
            share.close()

    async def _body(self, scope: Any, receive: Any, share: Share) -> bytes:
        encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
        if encoding not in ("identity", "zstd"):
            raise BadRequest(f"Content-Encoding must be zstd or absent, got {encoding[:40]!r}")
        declared = header(scope, b"content-length") or "0"
        if declared.isdecimal() and int(declared) > self._limits.body_bytes:
            raise self._too_large()
        body = await self._read(receive, share)
        if encoding == "zstd":
            scope["headers"] = [
                (name, value)
                for name, value in scope["headers"]
                if name not in (b"content-encoding", b"content-length")
            ]
            packed, body = (
                body,
                await asyncio.to_thread(decompress, body, self._limits.decompressed_bytes, share.reserve),
            )
            share.release(len(packed))
        if scope["path"] in PASSES and "protobuf" in (header(scope, b"content-type") or ""):
            return body  # its endpoint calls `check_parts` on the thread that parses it
        if scope["path"].startswith(NATIVE) and wire.CONTENT_TYPE in (header(scope, b"content-type") or ""):
            text = wire.head_of(body)
        else:
            text = body
        if len(body) > ON_A_THREAD or not is_flat(text):
            await asyncio.to_thread(self._check_json, text, share)
        return body

    def _check_json(self, body: bytes, share: Share) -> None:
        check_depth(body)
        if len(body) > ON_A_THREAD:
            check_weight(body, self.budget.size - share.reserved, share.reserve)

    async def _read(self, receive: Any, share: Share) -> bytes:
        pieces: list[bytes] = []
        began = time.monotonic()
        while True:
            allowed = _GRACE + share.reserved / _SLOWEST
            if pieces:
                await self._turnstile.through()
            try:
                async with asyncio.timeout(began + allowed - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise _Timeout(f"the request body is too slow: {share.reserved} bytes in {allowed:.0f} s") from error
            if message["type"] == "http.disconnect":
                raise _Disconnected
            piece = message.get("body", b"")
            if share.reserved + len(piece) > self._limits.body_bytes:
                raise self._too_large()
            share.reserve(len(piece))
            if not message.get("more_body", False):
                return b"".join((*pieces, piece)) if pieces else piece
            pieces.append(piece)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the request body must have at most {self._limits.body_bytes} bytes; send fewer rows at a time"
        )


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI `receive` that returns the body once, and then the messages of the connection."""
    given = False

    async def replay() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


DEEPEST = 64
_PLAIN = bytes(set(range(256)) - set(b'"[]{}'))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_QUOTE, _OPEN, _CLOSE = b'"[]'
_PIECE = 2**18


def check_depth(body: bytes, deepest: int = DEEPEST) -> None:
    """Refuse JSON that is nested too deeply.

    Args:
        body: JSON, not yet parsed.
        deepest: maximum number of open brackets.

    Raises:
        BadRequest: the limit is exceeded.
    """
    if not is_flat(body, deepest) and _is_deeper(body, deepest):
        raise BadRequest(f"the JSON of the request body must be nested at most {deepest} levels deep")


def is_flat(body: bytes, deepest: int = DEEPEST) -> bool:
    """Return whether a body has too few brackets to exceed the depth."""
    return body.count(b"[") + body.count(b"{") <= deepest


def _is_deeper(body: bytes, deepest: int) -> bool:
    import numpy as np  # limit bodies do not need it

    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body.translate(_ALIKE, _PLAIN), np.uint8)
    depth, inside = 0, 0
    for start in range(0, len(marks), _PIECE):  # in pieces, to limit memory
        piece = marks[start : start + _PIECE]
        quotes = np.cumsum(piece == _QUOTE, dtype=np.int32) + inside
        counts = (quotes & 1) == 0
        steps = ((piece == _OPEN) & counts).astype(np.int32) - ((piece == _CLOSE) & counts)
        depths = np.cumsum(steps, dtype=np.int32) + depth
        if depths.max() > deepest:
            return True
        depth, inside = int(depths[-1]), int(quotes[-1]) & 1
    return False


_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_SKIPPED = {_EIGHT: 8, _FOUR: 4}


def check_parts(body: bytes, limit: int) -> None:
    """Refuse a pass with too many messages and numbers; an array is bytes, and counts as one part.

    Args:
        body: a serialized `ForwardBackwardRequest`, not yet parsed; errors are left to the parser.
        limit: maximum number of parts.

    Raises:
        TooLarge: the limit is exceeded.
    """
    if not has_parts(body, limit):
        raise TooLarge(f"the request body must have at most {limit} parts; send fewer rows at a time")


def has_parts(body: bytes, limit: int) -> bool:
    """Return whether a pass has at most `limit` parts; see `check_parts`."""
    from twinkle_server.wire import tinker_pb2 as pb

    return _count(pb.ForwardBackwardRequest.DESCRIPTOR, body, 0, len(body), limit) >= 0


def _count(kind: "Descriptor", body: bytes, place: int, end: int, left: int) -> int:
    """Subtract the number of parts of a message from `left`; the result is negative if the limit is exceeded."""
    fields: dict[int, Any] = kind.fields_by_number
    while place < end and left >= 0:
        left -= 1
        key, place = _varint(body, place, end)
        wire = key & 7
        if wire == _VARINT:
            _, place = _varint(body, place, end)
        elif wire == _LENGTH:
            size, place = _varint(body, place, end)
            field = fields.get(key >> 3)
            if field is not None and field.message_type is not None:
                left = _count(field.message_type, body, place, min(end, place + size), left)
            elif field is not None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):  # packed numbers
                left -= size
            place += size
        elif wire in _SKIPPED:
            place += _SKIPPED[wire]
        else:
            return left
    return left


def _varint(body: bytes, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while place < end:
        byte = body[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128 or shift > 63:
            break
        shift += 7
    return value, place


_STRIDE = 2**20
_WEIGHTS = {b",": 40, b"[": 80, b"{": 240, b":": 80, b'"': 40}
"""Estimated bytes of the Python objects for each mark: a number, a list, an object, its entries, half a string."""


def check_weight(body: bytes, limit: int, reserve: Callable[[int], None]) -> None:
    """Estimate the memory of a parsed body before parsing it.

    Args:
        body: JSON, not yet parsed.
        limit: limit in bytes.
        reserve: called with the estimate; may raise.

    Raises:
        TooLarge: the limit is exceeded.
    """
    weight = 0
    for start in range(0, len(body), _STRIDE):  # in pieces, so that other threads can run
        weight += sum(body.count(mark, start, start + _STRIDE) * each for mark, each in _WEIGHTS.items())
        if weight > limit:
            raise TooLarge("the request body has more values than fit into memory; send fewer rows at a time")
    reserve(weight)


_OUTPUT = 2**20
_WINDOW = 2**23  # maximum memory of a decompressor; every decoder must support this window size
_BLOCK = 2**17  # maximum bytes of a block
_BLOCKS = 2**16
_CHECKSUM, _BLOCK_HEADER = 4, 3
_RLE, _COMPRESSED = 1, 2


def decompress(body: bytes, limit: int, reserve: Callable[[int], None]) -> bytes:
    """Decompress a zstd body.

    The content size in the frame header is not trusted: the output is produced and counted in pieces.

    Args:
        body: one or more frames.
        limit: maximum size of the result in bytes.
        reserve: called with the size of each piece before it is kept; may raise.

    Raises:
        TooLarge: the result exceeds the limit.
        BadRequest: the body is not valid zstd, or is truncated.
    """
    try:
        if _largest(body) > limit:
            for _ in _pieces(body, limit):  # a first run without keeping the output, which may exceed the limit
                pass
        kept = io.BytesIO()
        for piece in _pieces(body, limit):
            reserve(len(piece))
            kept.write(piece)
    except zstandard.ZstdError as error:
        raise BadRequest(
            "cannot decompress the zstd request body with a window of 8 MiB: "
            "use zstd level 19 or lower, or send the body uncompressed"
        ) from error
    return kept.getvalue()


def _pieces(body: bytes, limit: int) -> Iterator[bytes]:
    """Yield the decompressed body in pieces, up to the limit."""
    total = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        while piece := reader.read(min(_OUTPUT, limit + 1 - total)):
            total += len(piece)
            if total > limit:
                raise TooLarge(f"the decompressed body must have at most {limit} bytes; send fewer rows at a time")
            yield piece


def _largest(body: bytes) -> int:
    """Return an upper bound of the decompressed size, from the headers of the blocks.

    Raises:
        BadRequest: the body ends inside a frame, which the decompressor would accept.
    """
    place = blocks = size = 0
    while place < len(body):
        place, inside, more = _frame(body, place, _BLOCKS - blocks)
        blocks, size = blocks + inside, size + more
    if place != len(body) or not body:
        raise BadRequest("the zstd frame of the request body is truncated")
    return size


def _frame(body: bytes, start: int, allowed: int) -> tuple[int, int, int]:
    """Return the end of a frame (possibly after the body), its number of blocks, and their maximum size (RFC 8878)."""
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
