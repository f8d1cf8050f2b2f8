"""Lines about operations: who asked for what, and how it ended. Names and figures, never what was in them."""

import logging
from contextvars import ContextVar
from typing import Any

import structlog

from twinkle_server.operations import Accepted, Operation, Submission
from twinkle_server.telemetry.logs import Room

ASKED: ContextVar[dict[str, Any] | None] = ContextVar("asked", default=None)
"""`names` of what the request that is being answered asks for, once its model is known to be the caller's."""
_log = structlog.get_logger(__name__)
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
