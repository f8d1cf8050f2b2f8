"""What the service answers when it does not do what was asked; each knows its HTTP status.

A fault that an operation meets after it was accepted is a `Failure`, which its future carries, and not one of these.
"""

import math
from typing import Any

import orjson


class ServiceError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of the HTTP answer.
        message: for the client; no secret, no path, no traceback.
    """

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(ServiceError):
    """The request makes no sense; sending it again will not help."""

    status = 400


class Unauthorized(ServiceError):
    """No key, or none that is known."""

    status = 401


class Forbidden(ServiceError):
    """The key is known and may not do this."""

    status = 403


class NotFound(ServiceError):
    """There is none of that name, or it belongs to somebody else: nobody can tell which."""

    status = 404


class Gone(ServiceError):
    """There was one, and it is over."""

    status = 410


class TooLarge(ServiceError):
    """The body is larger than the service takes."""

    status = 413


class Unprocessable(ServiceError):
    """The body can be read, and a value in it cannot be used."""

    status = 422


class SequenceConflict(ServiceError):
    """Another body came earlier under the same sequence number."""

    status = 409


class Busy(ServiceError):
    """Too much at the moment; the same request may come again.

    Attributes:
        retry_after: seconds after which it has a chance.
    """

    status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(Busy):
    """The service is draining, or its engine is starting."""

    status = 503


async def refuse(send: Any, error: ServiceError) -> None:
    """Answer a request with an error, as `{"detail": ...}`; what is left of its body is dropped as it comes."""
    body = orjson.dumps({"detail": error.message})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Busy):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class StoreError(RuntimeError):
    """The data directory cannot be used; the message says why and what to do."""


class LeaseLost(Unavailable):
    """Another process has taken over the data directory: this one must not write, and has to end."""
