"""What a JSON body weighs once it is read: a list of lists, say, is thirty times its text."""

from collections.abc import Callable

from twinkle_server.errors import TooLarge

_PIECE = 2**20
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
    for start in range(0, len(body), _PIECE):  # in pieces, so that other threads go on
        weight += sum(body.count(mark, start, start + _PIECE) * each for mark, each in _WEIGHTS.items())
        if weight > most:
            raise TooLarge("the body has more values than fit into memory; send fewer rows at a time")
    take(weight)
