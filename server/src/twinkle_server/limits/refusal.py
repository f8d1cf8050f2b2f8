"""Answers that are given before the application is asked."""

import math
from typing import Any

import orjson

from twinkle_server.errors import Busy, ServiceError


async def refuse(send: Any, error: ServiceError) -> None:
    """Answer a request with an error, as `{"detail": ...}`; what is left of its body is dropped as it comes."""
    body = orjson.dumps({"detail": error.message})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Busy):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
