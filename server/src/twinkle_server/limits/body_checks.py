"""Checks of a body before it is parsed: nesting, number of parts, and the memory that its objects would take."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twinkle_server.errors import BadRequest, TooLarge

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor


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
