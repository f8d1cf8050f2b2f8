"""Logging of all libraries as JSON lines on standard error, with secrets removed.

Lines about operations contain names and figures, never their content.
"""

import hmac
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from twinkle_server.operations import Accepted, Operation, Submission

_SECRETS = re.compile(
    r"tml-[A-Za-z0-9_-]{6,}"
    r"|eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,2}"
    r"|(?<=download/)[A-Za-z0-9_-]{20,}(?:\.[A-Za-z0-9_-]+)*"
    r"|(?P<header>(?:x-api-key|authorization|cookie)[\"'\]]*\s*[:=,]\s*[b\"'\\]*)[^\"'\s,}\\]+",
    re.IGNORECASE,
)
_KEY = re.compile(r"tml-[A-Za-z0-9_-]{43}")
HIDDEN = "[hidden]"


def redact(text: str) -> str:
    """Remove keys, tokens, signed links, and the headers that contain them from a text."""
    return _SECRETS.sub(lambda match: (match["header"] or "") + HIDDEN, text)


def holds_key(text: str) -> bool:
    """Return whether a text contains an API key; names must not, because they are shown and stored."""
    return _KEY.search(text) is not None


def tenant_mark(tenant: str, secret: bytes) -> str:
    """Return the pseudonym of a tenant for logs and metrics; it cannot be inverted without the secret."""
    return hmac.digest(secret, b"tenant\0" + tenant.encode(), "sha256").hex()[:12]


REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Id of the current request; added to every log line."""
_LINES = 50  # per second
_log = structlog.get_logger(__name__)


class _Tenants:
    """Processor that replaces the field `tenant` by its pseudonym, or removes it without a secret."""

    secret: bytes | None = None

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        tenant = event.pop("tenant", None)
        if tenant is not None and self.secret is not None:
            event["tenant"] = tenant_mark(str(tenant), self.secret)
        return event


_tenants = _Tenants()


def mark_tenants(secret: bytes) -> None:
    """Add pseudonyms of tenants to log lines, the same as in metrics.

    Args:
        secret: of the data folder.
    """
    _tenants.secret = secret


class LineLimiter:
    """Limits the log lines of one kind per second, so that a flood of user errors cannot fill the disk.

    Args:
        what: subject of the lines.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._second = 0
        self._written = 0

    def take(self) -> bool:
        """Return whether another line may be written; reports the number of lines suppressed in the previous second."""
        second = int(time.monotonic())
        if second != self._second:
            suppressed, self._second, self._written = self._written - _LINES, second, 0
            if suppressed > 0:
                _log.warning(f"suppressed log lines about {self._what}", count=suppressed)
        self._written += 1
        return self._written <= _LINES


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Route all logging of this process through one formatter.

    Args:
        level: minimum level.
        stream: destination; standard error by default.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _request,
        _tenants,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _render, _redact],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if level != "DEBUG" else "INFO")  # debug lines of other libraries may contain secrets
    logging.getLogger("twinkle_server").setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in ("uvicorn.error", "asyncio", "alembic", "httpx"):  # their routine messages are noise
        logging.getLogger(name).setLevel("WARNING")


def _request(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    if request := REQUEST.get():
        event.setdefault("request", request)
    return event


def _render(logger: WrappedLogger, name: str, event: EventDict) -> str:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def _redact(logger: WrappedLogger, name: str, event: EventDict | str) -> str:
    return redact(str(event))


OPERATION: ContextVar[dict[str, Any] | None] = ContextVar("asked", default=None)
"""`names` of the operation of the current request, set once its model is known to be the caller's."""
_standard = logging.getLogger(__name__)
_limiter = LineLimiter("operations that failed")


def names(of: Submission | Operation) -> dict[str, Any]:
    """Return the log fields that identify an operation."""
    return {"model" if of.ordered else "sampler": of.queue_id, "kind": of.kind, "number": of.number}


def log_accepted(submission: Submission, accepted: Accepted) -> None:
    """Log that an operation was accepted; the outcome "known" marks a retry."""
    if _standard.isEnabledFor(logging.DEBUG):
        outcome = "taken" if accepted.fresh else "known"
        _log.debug("operation", outcome=outcome, tenant=submission.tenant, future=accepted.request, **names(submission))


def log_ended(operation: Operation, outcome: str, seconds: float) -> None:
    """Log the end of an operation: server failures as warnings, user errors up to a rate, others at level DEBUG.

    Args:
        operation: that ended.
        outcome: "done", "cancelled", or the category of its failure.
        seconds: since its acceptance.
    """
    level = {"done": logging.DEBUG, "cancelled": logging.DEBUG, "user": logging.INFO}.get(outcome, logging.WARNING)
    if not _standard.isEnabledFor(level) or (level == logging.INFO and not _limiter.take()):
        return
    fields = {"operation": operation.id, "future": operation.request, "seconds": round(seconds, 4), **names(operation)}
    if operation.http_request is not None:
        fields["request"] = operation.http_request
    _log.log(level, "operation", outcome=outcome, tenant=operation.tenant, tokens=operation.tokens, **fields)
