"""Ids of futures: 128 random bits, and a seal that only this data directory can make for one tenant.

So an id that was given out can be told from an invented or a foreign one when its row is long gone.
"""

import hashlib
import hmac
import secrets
from typing import Final

from twinkle_server.operations import LOST

_RANDOM: Final = 32
_SEAL: Final = 16
LOST_DIGEST: Final = hashlib.sha256(b"forward\0" + LOST).digest()
"""Stands in the row of a number that was given up, so that it is told from those of requests."""


def new_request(secret: bytes, tenant: str) -> str:
    """Return an id for a tenant's future."""
    random = secrets.token_hex(_RANDOM // 2)
    return random + _seal(secret, random, tenant)


def is_ours(secret: bytes, request: str, tenant: str) -> bool:
    """Return whether an id was made by `new_request` for this tenant."""
    random, seal = request[:_RANDOM], request[_RANDOM:]
    return len(request) == _RANDOM + _SEAL and hmac.compare_digest(
        seal.encode("utf-8", "replace"), _seal(secret, random, tenant).encode()
    )


def _seal(secret: bytes, random: str, tenant: str) -> str:
    text = f"{random}\0{tenant}".encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=_SEAL // 2, key=secret, person=b"request").hexdigest()
