"""How deep a JSON body is nested, told without parsing it."""

import re

from twinkle_server.errors import BadRequest

DEEPEST = 64
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # a text that does not end is one token, too


def check_depth(body: bytes, deepest: int = DEEPEST) -> None:
    """Refuse JSON that is nested deeper than anything of the protocol.

    Args:
        body: JSON, or what claims to be.
        deepest: brackets that may be open at once.

    Raises:
        BadRequest: it is deeper.
    """
    if body.count(b"[") + body.count(b"{") <= deepest:
        return
    depth = 0
    for token in _TOKEN.finditer(body):
        mark = body[token.start()]
        if mark in b"[{":
            depth += 1
            if depth > deepest:
                raise BadRequest(f"the body's JSON is nested deeper than {deepest}; no request of the protocol is")
        elif mark in b"]}":
            depth -= 1
