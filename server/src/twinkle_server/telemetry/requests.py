"""ASGI middleware that counts and logs requests: names and figures, never what was sent."""

import time
from typing import Any

import structlog

from twinkle_server.telemetry.logs import REQUEST, Room
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.telemetry.operations import ASKED
from twinkle_server.tenancy.auth import Caller

UNMATCHED = "unmatched"
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_log = structlog.get_logger(__name__)


class TelemetryMiddleware:
    """Counts every request by the template of its route; its lines carry the request's id.

    Args:
        app: what comes behind it.
        metrics: where to count.
    """

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._room = Room("refused requests")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        REQUEST.set(scope.get("request_id"))
        ASKED.set(None)
        began, status, seconds = time.perf_counter(), 0, 0.0

        async def counted(message: Any) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.perf_counter() - began
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._count(scope, status, seconds or time.perf_counter() - began)

    def _count(self, scope: Any, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or UNMATCHED
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.answered(method, route, status, seconds)
        if status < 400 or not self._room.take():
            return
        who = scope.get("caller")
        tenant = who.tenant if isinstance(who, Caller) else None
        write = _log.error if status >= 500 and status != 503 else _log.info
        fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        write("refused", outcome="refused", tenant=tenant, **fields, **(ASKED.get() or {}))
