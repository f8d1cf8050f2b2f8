"""The bound of a request's body: its bytes, seconds, nesting and parts, and the memory of all bodies together.

A small compressed body that stands for a huge one stops at the bound.
"""

import asyncio
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import zstandard

from twinkle_server.errors import BadRequest, Busy, ServiceError, TooLarge, refuse
from twinkle_server.settings import Limits
from twinkle_server.tenancy.auth import header

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


class Budget:
    """A number of bytes that requests share; threads may ask.

    Args:
        size: bytes in all.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Take bytes.

        Raises:
            Busy: there are not so many left.
        """
        with self._lock:
            if self.used + count > self.size:
                raise Busy(f"request memory is full ({self.used} of {self.size} bytes in use); retry later")
            self.used += count

    def give(self, count: int) -> None:
        """Give bytes back."""
        with self._lock:
            self.used -= count


class Share:
    """What one request has taken of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.taken = 0

    def take(self, count: int) -> None:
        """Take more.

        Raises:
            Busy: the budget has not so much left.
        """
        self._budget.take(count)
        self.taken += count

    def give(self, count: int) -> None:
        """Give some back."""
        self._budget.give(count)
        self.taken -= count

    def close(self) -> None:
        """Give everything back."""
        self.give(self.taken)


class Turnstile:
    """Lets one through in each turn of the event loop; nobody who is slow behind it holds up those before it."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def through(self) -> None:
        """Wait for a turn of the loop that is nobody else's."""
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


_GRACE = 30.0  # seconds that a body may take, whatever its size
_SLOWEST = 64 * 2**10  # bytes a second beyond that
_ON_A_THREAD = 96 * 2**10  # larger ones would hold up the loop; a pass of 4,096 tokens has 64
_PARTS = 64  # of a row; those that are meant have up to 30
PASSES = frozenset({"/api/v1/forward_backward", "/api/v1/forward"})
"""Paths whose bodies may be protobuf; all others are JSON, whatever they call themselves."""


class _Timeout(ServiceError):
    status = 408


class _Left(Exception):
    """The client is gone."""


class BodyLimitMiddleware:
    """Gives the application a body that is complete, decompressed and small enough, or answers instead of it.

    Args:
        app: what comes behind it.
        limits: sizes.
        budget: bytes over all requests; each body counts until its request is answered.
    """

    def __init__(self, app: Any, limits: Limits, budget: Budget | None = None) -> None:
        self._app = app
        self._limits = limits
        self._turnstile = Turnstile()
        self.budget = budget or Budget(limits.inflight_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = Share(self.budget)
        try:
            body = await self._body(scope, receive, share)
        except ServiceError as error:
            share.close()
            await refuse(send, error)
            return
        except _Left:
            share.close()
            return
        try:
            if len(body) > _ON_A_THREAD:
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
            packed, body = body, await asyncio.to_thread(decompress, body, self._limits.decompressed_bytes, share.take)
            share.give(len(packed))
        large = len(body) > _ON_A_THREAD
        if scope["path"] in PASSES and "protobuf" in (header(scope, b"content-type") or ""):
            if large:
                await asyncio.to_thread(check_parts, body, _PARTS * self._limits.datums)
        elif large or not is_flat(body):
            await asyncio.to_thread(self._check_json, body, share)
        return body

    def _check_json(self, body: bytes, share: Share) -> None:
        check_depth(body)
        if len(body) > _ON_A_THREAD:
            check_weight(body, self.budget.size - share.taken, share.take)

    async def _read(self, receive: Any, share: Share) -> bytes:
        pieces: list[bytes] = []
        began = time.monotonic()
        while True:
            allowed = _GRACE + share.taken / _SLOWEST
            if pieces:
                await self._turnstile.through()
            try:
                async with asyncio.timeout(began + allowed - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise _Timeout(f"the body came too slowly: {share.taken} bytes in {allowed:.0f} s") from error
            if message["type"] == "http.disconnect":
                raise _Left
            piece = message.get("body", b"")
            if share.taken + len(piece) > self._limits.body_bytes:
                raise self._too_large()
            share.take(len(piece))
            if not message.get("more_body", False):
                return b"".join((*pieces, piece)) if pieces else piece
            pieces.append(piece)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._limits.body_bytes} bytes; send fewer rows at a time")


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI `receive` that gives the body once, and then what the connection says."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


DEEPEST = 64
_PLAIN = bytes(set(range(256)) - set(b'"[]{}'))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_QUOTE, _OPEN, _CLOSE = b'"[]'
_PIECE = 2**18


def check_depth(body: bytes, deepest: int = DEEPEST) -> None:
    """Refuse JSON that is nested deeper than anything of the protocol.

    Args:
        body: JSON, or what claims to be.
        deepest: brackets that may be open at once.

    Raises:
        BadRequest: it is deeper.
    """
    if not is_flat(body, deepest) and _is_deeper(body, deepest):
        raise BadRequest(f"the JSON of the request body must be nested at most {deepest} levels deep")


def is_flat(body: bytes, deepest: int = DEEPEST) -> bool:
    """Return whether a body has so few brackets that it cannot be too deep."""
    return body.count(b"[") + body.count(b"{") <= deepest


def _is_deeper(body: bytes, deepest: int) -> bool:
    import numpy as np  # not needed for most bodies

    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body.translate(_ALIKE, _PLAIN), np.uint8)
    depth, inside = 0, 0
    for start in range(0, len(marks), _PIECE):  # in pieces, so that memory stays small
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


def check_parts(body: bytes, most: int) -> None:
    """Refuse a pass of more messages and numbers than any that is meant; arrays are bytes, and count as one.

    Args:
        body: a `ForwardBackwardRequest`, or what claims to be; what cannot be read is left to the parser.
        most: parts.

    Raises:
        TooLarge: it has more.
    """
    from twinkle_server.wire import tinker_pb2 as pb

    left = _count(pb.ForwardBackwardRequest.DESCRIPTOR, body, 0, len(body), most)
    if left < 0:
        raise TooLarge(f"the body has more than {most} parts; send fewer rows at a time")


def _count(kind: "Descriptor", body: bytes, place: int, end: int, left: int) -> int:
    """Return how many parts are left after those of a message; negative if there are not so many."""
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
"""Bytes of what stands behind a mark: a number, a list, an object and its entries, half a text."""


def check_weight(body: bytes, most: int, take: Callable[[int], None]) -> None:
    """Count what a body will weigh, before it is read.

    Args:
        body: JSON, or what claims to be.
        most: bytes.
        take: is told the weight; may raise.

    Raises:
        TooLarge: it is more.
    """
    weight = 0
    for start in range(0, len(body), _STRIDE):  # in pieces, so that other threads go on
        weight += sum(body.count(mark, start, start + _STRIDE) * each for mark, each in _WEIGHTS.items())
        if weight > most:
            raise TooLarge("the body has more values than fit into memory; send fewer rows at a time")
    take(weight)


_OUTPUT = 2**20
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
        while piece := reader.read(min(_OUTPUT, limit + 1 - total)):
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
