"""Routes by which others see whether the service is well: probes, figures, status."""

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from twinkle_server.errors import Forbidden
from twinkle_server.observe.metrics import Metrics
from twinkle_server.tenancy.auth import Caller, Keys, header, identify

PROBES = frozenset({"/healthz", "/readyz", "/api/v1/healthz"})
"""Answered to everybody."""
INSIDE = frozenset({"/metrics", "/twinkle/status"})
"""Answered to this machine and to operators."""
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


def health_routes(
    ready: Callable[[], tuple[bool, dict[str, Any]]],
    status: Callable[[], Awaitable[dict[str, Any]]],
    metrics: Metrics,
    keys: Keys | None,
) -> APIRouter:
    """Return the routes.

    Args:
        ready: says whether work would be done now, and the facts behind it.
        status: returns what `twinkle server status` shows.
        metrics: of the service.
        keys: of the service; None where none are asked for.
    """
    router = APIRouter()

    async def healthz() -> Response:
        """Answer that the process is alive."""
        return JSONResponse({"status": "ok"})

    for path in ("/healthz", "/api/v1/healthz"):
        router.get(path)(healthz)

    @router.get("/readyz")
    async def readyz() -> Response:
        """Answer 200 if the last pass worked, the store can be written and the engine is up; else 503, saying why."""
        good, facts = ready()
        return JSONResponse({"status": "ready" if good else "not ready", **facts}, 200 if good else 503)

    @router.get("/metrics")
    async def figures(request: Request) -> Response:
        """Return all figures in Prometheus's text format."""
        await _check_inside(request, keys)
        return Response(metrics.write(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/twinkle/status")
    async def status_now(request: Request) -> Response:
        """Return what the service does at the moment."""
        await _check_inside(request, keys)
        return JSONResponse(await status())

    return router


async def _check_inside(request: Request, keys: Keys | None) -> Caller | None:
    """Let this machine in, and operators.

    Raises:
        Unauthorized: a key was needed.
        Forbidden: it is a user's.
    """
    if is_local(request.scope):
        return None
    found = await identify(header(request.scope, b"x-api-key"), keys)
    if found.role != "operator":
        raise Forbidden("only an operator's key may ask this")
    return found


def is_local(scope: Any) -> bool:
    """Return whether a request comes from this machine, and not through a proxy on it."""
    client = scope.get("client")
    try:
        local = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
    return local and not any(header(scope, name) for name in _FORWARDED)
