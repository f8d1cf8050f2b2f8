"""Logs: one JSON object a line on standard error, whatever library speaks; secrets are taken out last."""

import logging
import sys
from contextvars import ContextVar
from typing import TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from twinkle_server.observe.redaction import redact

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Id of the request that is being answered; every line that is written meanwhile carries it."""


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logging of this process through one formatter.

    Args:
        level: of what is written.
        stream: where to; standard error by default.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _request,
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
        event["request"] = request
    return event


def _render(logger: WrappedLogger, name: str, event: EventDict) -> str:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def _redact(logger: WrappedLogger, name: str, event: EventDict | str) -> str:
    return redact(str(event))
