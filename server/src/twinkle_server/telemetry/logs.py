"""Logs: one JSON object a line on standard error, whatever library speaks; secrets are taken out last."""

import logging
import sys
import time
from contextvars import ContextVar
from typing import TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from twinkle_server.telemetry.redaction import redact, tenant_mark

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
