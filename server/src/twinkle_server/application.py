"""The ASGI application of a service: endpoints, error responses, and middleware."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException as StarletteHTTPException

from twinkle_server import ports
from twinkle_server.app_state import AppState, Records
from twinkle_server.checkpoints.links import Links, download_routes
from twinkle_server.errors import Busy, SequenceConflict, ServiceError
from twinkle_server.limits.body import BodyLimitMiddleware
from twinkle_server.limits.head import RequestHeadMiddleware
from twinkle_server.native import routes as native
from twinkle_server.requests import add_routes, json_response
from twinkle_server.runtime.arrivals import ArrivalMiddleware
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store
from twinkle_server.telemetry.health import INSIDE, PROBES, Access, folder_token, health_routes
from twinkle_server.telemetry.metrics import Metrics, TelemetryMiddleware
from twinkle_server.tenancy.auth import AuditMiddleware, Authentication
from twinkle_server.tenancy.keys import Keyring
from twinkle_server.tenancy.quotas import Limited, Meter
from twinkle_server.tinker import (
    accounts,
    client,
    copying,
    futures,
    models,
    runs,
    sampling,
    saves,
    sessions,
    training,
)

_log = logging.getLogger(__name__)


def assemble(settings: Settings, store: Store, service: Service, metrics: Metrics) -> Any:
    """Return the outermost ASGI application.

    Args:
        settings: of the service.
        store: an open store.
        service: the runtime.
        metrics: of the service.
    """
    keys = Keyring(store.keys.all) if settings.auth else None
    links = Links(settings.data, store.secret)
    meter = Meter(service.queued)
    application = create_application(Limited(service, meter), store, settings, links)
    add_routes(application.router, download_routes(links))

    async def status() -> dict[str, Any]:
        return await service.status()

    access = Access(keys, folder_token(store.secret), settings.local_metrics)
    application.router.add_api_route("/openapi.json", _openapi, methods=["GET"], include_in_schema=False)
    add_routes(application.router, health_routes(service.ready, status, metrics, access))
    bodies = BodyLimitMiddleware(AuditMiddleware(application, store.audit), settings.limits)
    metrics.watch("body_bytes", "Bytes of requests in memory.", lambda: float(bodies.budget.used))
    guarded = Authentication(ArrivalMiddleware(bodies, service.arrivals), keys, PROBES | INSIDE)
    return RequestHeadMiddleware(TelemetryMiddleware(guarded, metrics))


def create_application(
    service: ports.Service,
    store: Records,
    settings: Settings,
    links: Links | None = None,
    router: APIRouter | None = None,
) -> FastAPI:
    """Return the application without authentication and body limits.

    Args:
        service: runs operations.
        store: the tables.
        settings: of the service.
        links: creates signed links to files; None disables downloads.
        router: with the endpoints; None creates it.
    """
    application = Application(
        title="Twinkle",
        version=API_VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        default_response_class=Response,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the service has its own
    )
    application.state.state = AppState(service, store, settings, links)
    add_routes(application.router, router or all_routes())
    application.add_exception_handler(ServiceError, _service_error)
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(StarletteHTTPException, _http_error)
    application.add_exception_handler(HTTPException, _http_error)
    application.add_exception_handler(Exception, _failure)
    return application


class Application(FastAPI):
    """FastAPI with fewer layers around its routes: the service has its own telemetry and body limits."""

    def build_middleware_stack(self) -> Any:
        """Return the router in added middleware, error handling, and the exit stack that endpoints of FastAPI need."""
        app: Any = ErrorMiddleware(AsyncExitStackMiddleware(self.router), self.exception_handlers)
        for kind, args, options in reversed(self.user_middleware):
            app = kind(app, *args, **options)
        return app


class ErrorMiddleware:
    """Converts exceptions to responses.

    It does in one layer what Starlette does in two, and does not raise the exception again after its response.

    Args:
        app: the next application.
        handlers: function that makes the response, by class of the exception.
    """

    def __init__(self, app: Any, handlers: Mapping[Any, Callable[[Request, Any], Any]]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection; an exception after the start of its response is raised, which closes it."""
        started = False

        async def observe(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if started or handler is None or scope["type"] != "http":
                raise
            response = handler(Request(scope, receive), error)
            if inspect.isawaitable(response):
                response = await response
            await response(scope, receive, send)


PREFIX = "/api/v1"
API_VERSION = "1"
# Routes are tried in order, so the most frequent ones come first.
MODULES = (futures, training, sampling, sessions, models, saves, client, runs, copying, accounts)


def describe_routes() -> dict[str, Any]:
    """Return the OpenAPI description of all protocols, without a running service."""
    application = Application(title="Twinkle", version=API_VERSION, openapi_url=None, docs_url=None, redoc_url=None)
    add_routes(application.router, all_routes())
    return application.openapi()


def tinker_routes() -> APIRouter:
    """Return the endpoints of the Tinker protocol."""
    router = APIRouter()
    for module in MODULES:
        add_routes(router, module.router, PREFIX)
    return router


def all_routes() -> APIRouter:
    """Return the endpoints of all protocols."""
    router = tinker_routes()
    add_routes(router, native.native_routes())
    return router


async def _openapi(request: Request) -> Response:
    """Describe all routes of the service."""
    return json_response(request.app.openapi())


def _service_error(_request: Request, error: Any) -> Response:
    response = json_response({"detail": error.message}, error.status)
    if isinstance(error, Busy):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, SequenceConflict):
        response.headers["X-Should-Retry"] = "false"
    return response


def _invalid(_request: Request, error: Any) -> Response:
    errors = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:8]]
    return json_response({"detail": "; ".join(errors)[:2000]}, 422)


def _http_error(request: Request, error: Any) -> Response:
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"{request.url.path[:300]!r} does not exist on this service"
    if error.status_code == 405:
        detail = f"{request.url.path[:300]!r} does not support {request.method}"
    response = json_response({"detail": detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _failure(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.scope.get("path", "")[:300], exc_info=error)
    return json_response({"detail": "internal server error; see the log of the service"}, 500)
