"""Routes for monitoring: probes, metrics, status."""

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from twinkle_server.errors import Forbidden
from twinkle_server.openapi import returns
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.telemetry.status import FOLDER_TOKEN
from twinkle_server.tenancy.auth import Keys, check_local, header, identify, key_of

PROBES = frozenset({"/healthz", "/readyz", "/api/v1/healthz"})
"""Paths without authentication."""
INSIDE = frozenset({"/metrics", "/twinkle/status"})
"""Paths for operators, and for processes that can read the data folder."""
SCOPED = frozenset({"/twinkle/overview"})
"""Paths for the same, and for users, who see their tenant alone."""
_FORWARDED = (b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip")
_FORWARDED_PREFIXES = (b"x-forwarded", b"cf-", b"x-original-", b"x-envoy-")


def health_routes(
    ready: Callable[[], tuple[bool, dict[str, Any]]],
    status: Callable[[], Awaitable[dict[str, Any]]],
    metrics: Metrics,
    access: "Access",
    overview: Callable[[str | None], Awaitable[dict[str, Any]]] | None = None,
) -> APIRouter:
    """Return the routes.

    Args:
        ready: returns whether the service can do work, and the details.
        status: returns the data of `twinkle server status`.
        metrics: of the service.
        access: controls access to metrics and status.
        overview: returns the data of `twinkle top` for a tenant, or for all; None leaves out its route.
    """
    router = APIRouter()

    async def healthz() -> Response:
        """Report that the process is alive."""
        return JSONResponse({"status": "ok"})

    for path in ("/healthz", "/api/v1/healthz"):
        router.get(path)(healthz)

    @router.get("/readyz")
    async def readyz() -> Response:
        """Return 200 if the last pass worked, the store can be written and the engine is up; otherwise 503."""
        good, facts = ready()
        return JSONResponse({"status": "ready" if good else "not ready", **facts}, 200 if good else 503)

    @router.get("/metrics", openapi_extra=returns("text/plain", json=False))
    async def figures(request: Request) -> Response:
        """Return all metrics in Prometheus's text format."""
        await access.check(request)
        return Response(metrics.write(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/twinkle/status")
    async def status_now(request: Request) -> Response:
        """Return the current status of the service."""
        await access.check(request)
        return JSONResponse(await status())

    if overview is not None:

        @router.get("/twinkle/overview")
        async def overview_now(request: Request) -> Response:
            """Return what `twinkle top` shows: of the whole service to operators, else of the caller's tenant."""
            return JSONResponse(await overview(await access.scope(request)))

    return router


@dataclass(frozen=True, slots=True)
class Access:
    """Access control for metrics and status.

    A local client address proves little, because a local proxy may forward requests without saying so.

    Attributes:
        keys: of the service; None without authentication.
        token: required value of the header `FOLDER_TOKEN`; "" disables it.
        local: whether to admit every program on this machine.
    """

    keys: Keys | None
    token: str = ""
    local: bool = False

    async def scope(self, request: Request) -> str | None:
        """Return the tenant whose data a request may see; None is all.

        Raises:
            Unauthorized: the key is missing, unknown or revoked.
            Forbidden: the service has no keys, and a proxy forwarded the request.
        """
        key = key_of(request.scope)
        if key and self.keys is not None and header(request.scope, FOLDER_TOKEN.lower().encode()) is None:
            caller = await identify(key, self.keys)
            return None if caller.role == "operator" else caller.tenant
        await self.check(request)
        return None

    async def check(self, request: Request) -> None:
        """Admit operators, processes that can read the data folder, and local requests if allowed.

        Raises:
            Unauthorized: the key is missing, unknown or revoked.
            Forbidden: the key is not an operator's, or the service has no keys and a proxy forwarded the request.
        """
        scope = request.scope
        token = header(scope, FOLDER_TOKEN.lower().encode()) or ""
        if self.token and hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return
        if self.keys is None:
            check_local(scope)
            if not is_local(scope):
                raise Forbidden("without keys, the service only accepts local requests that no proxy forwarded")
        elif not (self.local and is_local(scope)):
            caller = await identify(key_of(scope), self.keys)
            if caller.role != "operator":
                raise Forbidden("this request requires an operator key")


def folder_token(secret: bytes) -> str:
    """Derive the token of a data folder from its secret."""
    return hashlib.blake2b(b"figures and status", digest_size=16, key=secret[:64]).hexdigest()


def is_local(scope: Any) -> bool:
    """Return whether a request comes from this machine, without headers of a proxy."""
    client = scope.get("client")
    try:
        local = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
    return local and not any(name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES) for name, _ in scope["headers"])
