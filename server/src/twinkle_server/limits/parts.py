"""How many parts a protobuf of a pass has, told without making them: two bytes may stand for a hundred in memory."""

from typing import TYPE_CHECKING, Any

from twinkle_server.errors import TooLarge

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

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
