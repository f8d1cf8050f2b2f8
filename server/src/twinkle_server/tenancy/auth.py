"""Authentication of requests before their bodies are read, and audit entries of their changes."""

import functools
import ipaddress
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import structlog
from starlette.requests import Request

from twinkle_server.error_forms import error_path, refuse
from twinkle_server.errors import Forbidden, ServiceError, Unauthorized
from twinkle_server.store.records import AuditEntry
from twinkle_server.store.tenants import Audit

Role = Literal["user", "operator"]
LOCAL_TENANT = "local"
"""The only tenant of a service without keys."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request.

    Attributes:
        tenant: owner of the data that the caller creates and may see.
        key: id of the key, not the key itself.
        role: an operator may also see figures of the whole service.
        quotas: limits of this key; missing ones are the service's.
    """

    tenant: str
    key: str
    role: Role = "user"
    quotas: Mapping[str, float] = field(default_factory=dict)


LOCAL = Caller(LOCAL_TENANT, LOCAL_TENANT, "operator")
CURRENT: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the current request."""


class Keys(Protocol):
    """Looks up keys."""

    async def find(self, key: str) -> Caller | None:
        """Return the caller of a key; None if the key is unknown or revoked."""


async def identify(key: str | None, keys: Keys | None) -> Caller:
    """Return the caller of a key.

    Args:
        key: see `key_of`.
        keys: None accepts all requests as the tenant "local".

    Raises:
        Unauthorized: the key is missing, unknown or revoked.
    """
    if keys is None:
        return LOCAL
    if not key:
        raise Unauthorized("an API key is required; send it in the header X-API-Key, or as Authorization: Bearer")
    caller = await keys.find(key)
    if caller is None:
        raise Unauthorized("the API key in X-API-Key or Authorization is unknown or revoked")
    return caller


def key_of(scope: Mapping[str, Any]) -> str | None:
    """Return the key of a request: `X-API-Key`, or else `Authorization: Bearer`; None without one."""
    if key := header(scope, b"x-api-key"):
        return key
    kind, _, token = (header(scope, b"authorization") or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def caller_of(request: Request) -> Caller:
    """Return the caller of a request, set by the middleware `Authentication`.

    Raises:
        Unauthorized: the application runs without this middleware.
    """
    caller = request.scope.get("caller")
    if not isinstance(caller, Caller):
        raise Unauthorized("the request is not authenticated")
    return caller


def operator(request: Request) -> Caller:
    """Return the caller of a request, who must be an operator.

    Raises:
        Forbidden: the caller is a user.
    """
    caller = caller_of(request)
    if caller.role != "operator":
        raise Forbidden("this request requires an operator key")
    return caller


class Authentication:
    """ASGI middleware that sets the `Caller` in the scope, or responds 401 without reading the body.

    Args:
        app: the next application.
        keys: see `identify`.
        open_paths: paths without authentication; links below `/download/` are always open, since they are signed.
        open_prefixes: beginnings of further paths that authenticate by themselves.
    """

    def __init__(
        self, app: Any, keys: Keys | None, open_paths: frozenset[str] = frozenset(), open_prefixes: tuple[str, ...] = ()
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths
        self._prefixes = ("/download/", *open_prefixes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                if self._keys is None:
                    check_local(scope)
                caller = await identify(key_of(scope), self._keys)
            except ServiceError as error:
                await refuse(send, error, error_path(scope))
                return
            scope["caller"] = caller
            CURRENT.set(caller)
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(self._prefixes)


def check_local(scope: Mapping[str, Any]) -> None:
    """Refuse cross-site requests from browsers on this machine to a service without keys.

    Raises:
        Forbidden: the Host header is not local, or the Origin header is another site.
    """
    place = header(scope, b"host") or "localhost"
    if not is_loopback(_host(place)):
        raise Forbidden(f"without keys, the host must be http://127.0.0.1 or http://localhost, got {place[:200]!r}")
    if (page := header(scope, b"origin")) is not None and not is_loopback(_host(page.partition("://")[2])):
        raise Forbidden("without keys, the service rejects cross-site requests")


@functools.lru_cache(maxsize=64)  # clients use few hosts; parsing one costs as much as routing a request
def is_loopback(host: str) -> bool:
    """Return whether an address or host name is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host(place: str) -> str:
    """Return a host without its port."""
    return place.partition("]")[0].removeprefix("[") if place.startswith("[") else place.partition(":")[0].lower()


def header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """Return a header of a request; None if it is absent.

    Args:
        scope: the ASGI scope.
        name: in lower case.
    """
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


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
    ("POST", "merge"): "checkpoint.merge",
    ("POST", "publish"): "checkpoint.publish",
    ("DELETE", "publish"): "checkpoint.unpublish",
    ("PUT", "ttl"): "checkpoint.ttl",
    ("GET", "external_weights_urls"): "checkpoint.download",
    ("GET", "archive"): "checkpoint.download",
    ("DELETE", "{checkpoint}"): "checkpoint.delete",
    ("POST", "login"): "dashboard.login",
    ("POST", "cancel"): "operation.cancel",
    ("POST", "drain"): "service.drain",
    ("POST", "forget"): "rollouts.delete",
}
"""Events by method and last segment of the route; any path parameter is written as `{checkpoint}`."""
_log = structlog.get_logger(__name__)


class AuditMiddleware:
    """ASGI middleware that writes an audit entry after a successful response."""

    def __init__(self, app: Any, audit: Audit) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        status = 0

        async def observe(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, observe)
        if scope["type"] == "http" and 200 <= status < 400 and (event := _event(scope)):
            await self._write(scope, event)

    async def _write(self, scope: Any, event: str) -> None:
        caller: Caller = scope["caller"]
        details = {"key": caller.key, "request": scope.get("request_id"), **_ids(scope)}
        try:
            await self._audit.record(AuditEntry(time.time(), caller.tenant, event, details))
        except ServiceError as error:  # the response was already sent
            _log.error("audit entry lost", event_name=event, reason=error.message)


def _event(scope: Any) -> str | None:
    path = getattr(scope.get("route"), "path", None)
    if not path or not isinstance(scope.get("caller"), Caller):
        return None
    last = path.rstrip("/").rpartition("/")[2]
    return EVENTS.get((scope["method"], "{checkpoint}" if last.startswith("{") else last))


def _ids(scope: Any) -> dict[str, str]:
    return {name: str(value)[:200] for name, value in scope.get("path_params", {}).items()}
