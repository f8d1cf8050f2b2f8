"""Logs: one JSON object a line on standard error, whatever library speaks; secrets are taken out last.

Lines about operations say who asked for what, and how it ended: names and figures, never what was in them.
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
    """Return a text without keys, tokens, signed links and the headers that carry them."""
    return _SECRETS.sub(lambda found: (found["header"] or "") + HIDDEN, text)


def holds_key(text: str) -> bool:
    """Return whether a text has an API key in it: no name may, for names are shown and kept."""
    return _KEY.search(text) is not None


def tenant_mark(tenant: str, secret: bytes) -> str:
    """Return what stands for a tenant in logs and figures; it cannot be turned back without the secret."""
    return hmac.digest(secret, b"tenant\0" + tenant.encode(), "sha256").hex()[:12]


REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Id of the request that is being answered; every line that is written meanwhile carries it."""
_LINES = 50  # a second
_log = structlog.get_logger(__name__)


class _Tenants:
    """The processor that puts a mark in the place of the field `tenant`; without a secret there is no such field."""

    secret: bytes | None = None

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        tenant = event.pop("tenant", None)
        if tenant is not None and self.secret is not None:
            event["tenant"] = tenant_mark(str(tenant), self.secret)
        return event


_tenants = _Tenants()


def mark_tenants(secret: bytes) -> None:
    """Let lines say whose they are: by marks, as in the figures.

    Args:
        secret: of the data directory.
    """
    _tenants.secret = secret


class Room:
    """Room for lines of one sort, so many a second: a flood of what users do wrong shall not fill the disk.

    Args:
        what: the lines are about.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._second = 0
        self._written = 0

    def take(self) -> bool:
        """Return whether this second has room for another line; what the one before had none for is counted in one."""
        second = int(time.monotonic())
        if second != self._second:
            left_out, self._second, self._written = self._written - _LINES, second, 0
            if left_out > 0:
                _log.warning(f"suppressed log lines about {self._what}", count=left_out)
        self._written += 1
        return self._written <= _LINES


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logging of this process through one formatter.

    Args:
        level: of what is written.
        stream: where to; standard error by default.
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
    root.setLevel(level if level != "DEBUG" else "INFO")  # other libraries' details may hold anything
    logging.getLogger("twinkle_server").setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in ("uvicorn.error", "asyncio", "alembic", "httpx"):  # what they say of their ordinary work is not ours
        logging.getLogger(name).setLevel("WARNING")


def _request(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    if request := REQUEST.get():
        event.setdefault("request", request)
    return event


def _render(logger: WrappedLogger, name: str, event: EventDict) -> str:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def _redact(logger: WrappedLogger, name: str, event: EventDict | str) -> str:
    return redact(str(event))


ASKED: ContextVar[dict[str, Any] | None] = ContextVar("asked", default=None)
"""`names` of what the request that is being answered asks for, once its model is known to be the caller's."""
_standard = logging.getLogger(__name__)
_room = Room("operations that failed")


def names(of: Submission | Operation) -> dict[str, Any]:
    """Return the fields that say which operation a line is about."""
    return {"model" if of.ordered else "sampler": of.queue_id, "kind": of.kind, "number": of.number}


def log_taken(submission: Submission, accepted: Accepted) -> None:
    """Write that an operation is in the log; "known" is one that came before, and comes again."""
    if _standard.isEnabledFor(logging.DEBUG):
        outcome = "taken" if accepted.fresh else "known"
        _log.debug("operation", outcome=outcome, tenant=submission.tenant, future=accepted.request, **names(submission))


def log_ended(operation: Operation, outcome: str, seconds: float) -> None:
    """Write how an operation ended: what failed always, by users' faults so many a second; the rest for those who look.

    Args:
        operation: that is over.
        outcome: "done", "cancelled", or whose fault a failure was.
        seconds: since it was taken.
    """
    level = {"done": logging.DEBUG, "cancelled": logging.DEBUG, "user": logging.INFO}.get(outcome, logging.WARNING)
    if not _standard.isEnabledFor(level) or (level == logging.INFO and not _room.take()):
        return
    fields = {"operation": operation.id, "future": operation.request, "seconds": round(seconds, 4), **names(operation)}
    if operation.asked_by is not None:
        fields["request"] = operation.asked_by
    _log.log(level, "operation", outcome=outcome, tenant=operation.tenant, tokens=operation.tokens, **fields)
