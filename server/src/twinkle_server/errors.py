"""Errors of requests, each with its HTTP status.

An operation that fails after it was accepted has an `Outcome` with an error instead.
"""


class ServiceError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status of the response.
        message: for the client, without secrets, paths and tracebacks.
        kind: name of the class in `twinkle.errors` that a local call raises; None if there is none.
    """

    status = 500
    kind: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(ServiceError):
    """The request is invalid; a retry does not help."""

    status = 400


class Unauthorized(ServiceError):
    """The key is missing, unknown or revoked."""

    status = 401


class Forbidden(ServiceError):
    """The key does not permit this request."""

    status = 403


class NotFound(ServiceError):
    """It does not exist, or belongs to another tenant; the response is the same."""

    status = 404


class Gone(ServiceError):
    """It existed, but no longer does."""

    status = 410


class TooLarge(ServiceError):
    """The body exceeds a limit."""

    status = 413


class Unprocessable(ServiceError):
    """The body can be parsed, but contains an invalid value.

    Attributes:
        param: name of the field, where it is known.
    """

    status = 422

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SequenceConflict(ServiceError):
    """The sequence number was used with another body."""

    status = 409


class Locked(ServiceError):
    """The service is reserved for another tenant, or cannot be reserved because others use it."""

    status = 423


class Busy(ServiceError):
    """A limit is exceeded temporarily; the same request may be repeated.

    Attributes:
        retry_after: seconds after which to retry.
    """

    status = 429

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(Busy):
    """The service cannot handle the request at the moment, for example while it starts or shuts down."""

    status = 503


class StoreError(RuntimeError):
    """The data folder cannot be used; the message says why and what to do."""


class LeaseLost(Unavailable):
    """Another process has taken over the data folder; this process must not write, and must exit."""
