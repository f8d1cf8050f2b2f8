"""Who did what: a row for each request that changed something of lasting value."""

import time
from collections.abc import Mapping
from typing import Any

import structlog

from twinkle_server.errors import ServiceError
from twinkle_server.store.audit import Audit
from twinkle_server.store.records import AuditEntry
from twinkle_server.tenancy.auth import Caller

EVENTS: Mapping[tuple[str, str], str] = {
    ("POST", "create_session"): "session.create",
    ("POST", "finish"): "session.finish",
    ("PUT", "project"): "session.project",
    ("POST", "create_model"): "model.create",
    ("POST", "load_weights"): "model.load",
    ("POST", "unload_model"): "model.unload",
    ("POST", "save_weights"): "checkpoint.save",
    ("POST", "save_weights_for_sampler"): "checkpoint.save",
    ("POST", "save_weights_external"): "checkpoint.save",
    ("POST", "copy_weights"): "checkpoint.copy",
    ("POST", "publish"): "checkpoint.publish",
    ("DELETE", "publish"): "checkpoint.unpublish",
    ("PUT", "ttl"): "checkpoint.ttl",
    ("GET", "external_weights_urls"): "checkpoint.download",
    ("GET", "archive"): "checkpoint.download",
    ("DELETE", "{checkpoint}"): "checkpoint.delete",
}
"""Events by method and last part of the route's template; any parameter's name counts as `{checkpoint}`."""
_log = structlog.get_logger(__name__)


class AuditMiddleware:
    """ASGI middleware: after an answer that is a success, writes who did what to which id."""

    def __init__(self, app: Any, audit: Audit) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        status = 0

        async def seen(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, seen)
        if scope["type"] == "http" and 200 <= status < 400 and (event := _event(scope)):
            await self._write(scope, event)

    async def _write(self, scope: Any, event: str) -> None:
        caller: Caller = scope["caller"]
        details = {"key": caller.key, "request": scope.get("request_id"), **_ids(scope)}
        try:
            await self._audit.record(AuditEntry(time.time(), caller.tenant, event, details))
        except ServiceError as error:  # the answer is given; what is asked next will meet the store's trouble itself
            _log.error("audit entry lost", event_name=event, reason=error.message)


def _event(scope: Any) -> str | None:
    path = getattr(scope.get("route"), "path", None)
    if not path or not isinstance(scope.get("caller"), Caller):
        return None
    last = path.rstrip("/").rpartition("/")[2]
    return EVENTS.get((scope["method"], "{checkpoint}" if last.startswith("{") else last))


def _ids(scope: Any) -> dict[str, str]:
    return {name: str(value)[:200] for name, value in scope.get("path_params", {}).items()}
