"""Routes by which others see whether the service is well: probes, figures, status."""

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from twinkle_server.errors import Forbidden
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.telemetry.status import FOLDER_TOKEN
from twinkle_server.tenancy.auth import Keys, check_local, header, identify

PROBES = frozenset({"/healthz", "/readyz", "/api/v1/healthz"})
"""Answered to everybody."""
INSIDE = frozenset({"/metrics", "/twinkle/status"})
"""Answered to operators, and to who can read the data directory."""
_FORWARDED = (b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip")
_FORWARDED_PREFIXES = (b"x-forwarded", b"cf-", b"x-original-", b"x-envoy-")


def health_routes(
    ready: Callable[[], tuple[bool, dict[str, Any]]],
    status: Callable[[], Awaitable[dict[str, Any]]],
    metrics: Metrics,
    access: "Access",
) -> APIRouter:
    """Return the routes.

    Args:
        ready: says whether work would be done now, and the facts behind it.
        status: returns what `twinkle server status` shows.
        metrics: of the service.
        access: says who may see figures and status.
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
        await access.check(request)
        return Response(metrics.write(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/twinkle/status")
    async def status_now(request: Request) -> Response:
        """Return what the service does at the moment."""
        await access.check(request)
        return JSONResponse(await status())

    return router


@dataclass(frozen=True, slots=True)
class Access:
    """Who may see figures and status.

    That a request comes from this machine says little: a proxy on it forwards those of others, and need not say so.

    Attributes:
        keys: of the service; None where none are asked for.
        token: that the value of `FOLDER_TOKEN` must be; "" lets nobody in by it.
        local: let every program on this machine in.
    """

    keys: Keys | None
    token: str = ""
    local: bool = False

    async def check(self, request: Request) -> None:
        """Let operators in, who can read the data directory, and this machine where that is allowed.

        Raises:
            Unauthorized: a key was needed.
            Forbidden: the key is a user's, or the service asks for no keys and the request came through a proxy.
        """
        scope = request.scope
        given = header(scope, FOLDER_TOKEN.lower().encode()) or ""
        if self.token and hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
            return
        if self.keys is None:
            check_local(scope)
            if not is_local(scope):
                raise Forbidden("without keys, the service only accepts local requests that no proxy forwarded")
        elif not (self.local and is_local(scope)):
            found = await identify(header(scope, b"x-api-key"), self.keys)
            if found.role != "operator":
                raise Forbidden("this request requires an operator key")


def folder_token(secret: bytes) -> str:
    """Return the token of a data directory, from its secret."""
    return hashlib.blake2b(b"figures and status", digest_size=16, key=secret[:64]).hexdigest()


def is_local(scope: Any) -> bool:
    """Return whether a request comes from this machine, and says nothing of a proxy that forwarded it."""
    client = scope.get("client")
    try:
        local = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
    return local and not any(name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES) for name, _ in scope["headers"])
