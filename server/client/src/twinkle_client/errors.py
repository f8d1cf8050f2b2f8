"""Errors of the client: one tree, and each error is also the builtin that scripts usually catch.

TwinkleClientError (twinkle.errors.TwinkleError)
├── WireError (ValueError)              a value cannot be sent, or an answer cannot be read
├── ConnectionFailed (ConnectionError)  the service did not answer, however often the request was repeated
├── RequestRefused (ValueError)         400, 413, 422: the request itself is wrong
├── AuthenticationError (PermissionError)  401, 403: the key is missing, unknown, or does not permit this
├── NotFound (LookupError)              404: it does not exist, or belongs to someone else
├── Gone (LookupError)                  410: it existed, and no longer does
├── Conflict (RuntimeError)             409: the number was used by another request
├── Reserved (RuntimeError)             423: the service is reserved for someone else, or in use by others
├── Overloaded (RuntimeError)           429, 503: a limit was exceeded for longer than the client retries
├── ServiceError (RuntimeError)         500 and other answers that a service should not give
└── OperationFailed (RuntimeError)      the service accepted the call, and it failed: see `category`
    └── Cancelled                       the call was cancelled before it ran
"""

from twinkle.errors import TwinkleError


class TwinkleClientError(TwinkleError):
    """Anything that goes wrong between a script and its service.

    Attributes:
        status: HTTP status of the answer; None without one.
        kind: name of the class in `twinkle.errors` that a local call raises; None if the service named none.
    """

    status: int | None = None
    kind: str | None = None


class WireError(TwinkleClientError, ValueError):
    """A value has no form on the wire, or received bytes are not a frame."""


class ConnectionFailed(TwinkleClientError, ConnectionError):
    """The service did not answer for as long as the client retries. The call may have been carried out.

    The same call, made again, gets the result of the first one if there is one; see `AdapterQueue`.
    """


class RequestRefused(TwinkleClientError, ValueError):
    """The service refused the request; repeating it does not help."""


class AuthenticationError(TwinkleClientError, PermissionError):
    """The key is missing, unknown or revoked, or does not permit the request."""


class NotFound(TwinkleClientError, LookupError):
    """What the request names does not exist for this key."""


class Gone(TwinkleClientError, LookupError):
    """What the request names existed, and no longer does: an unloaded model, a finished session, an old result."""


class Conflict(TwinkleClientError, RuntimeError):
    """Another request has used the number or the name."""


class Reserved(TwinkleClientError, RuntimeError):
    """A full-parameter training of someone else has the service, or others use it, so that it cannot be reserved."""


class Overloaded(TwinkleClientError, RuntimeError):
    """A limit of the service was exceeded during all attempts."""


class ServiceError(TwinkleClientError, RuntimeError):
    """The service failed; its log has the reason."""


class OperationFailed(TwinkleClientError, RuntimeError):
    """A call was accepted and then failed.

    Attributes:
        category: who caused it: "user", "server" or "unknown".
    """

    def __init__(self, message: str, category: str = "unknown") -> None:
        super().__init__(message)
        self.category = category


class Cancelled(OperationFailed):
    """The call was cancelled before it ran."""


_BY_STATUS: dict[int, type[TwinkleClientError]] = {
    400: RequestRefused,
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFound,
    405: NotFound,
    409: Conflict,
    410: Gone,
    413: RequestRefused,
    422: RequestRefused,
    423: Reserved,
    429: Overloaded,
    503: Overloaded,
}


def error_of(status: int, message: str, kind: str | None = None) -> TwinkleClientError:
    """Return the error of an HTTP answer."""
    error = _BY_STATUS.get(status, ServiceError)(message)
    error.status, error.kind = status, kind
    return error
