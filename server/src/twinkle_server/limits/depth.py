"""How deep a JSON body is nested, told without parsing it and without holding up other threads for long."""

from twinkle_server.errors import BadRequest

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
        raise BadRequest(f"the body's JSON is nested deeper than {deepest}; no request of the protocol is")


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
