"""The ASGI application of a service: endpoints, error responses, and middleware."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException as StarletteHTTPException

from twinkle_server import ports
from twinkle_server.app_state import AppState, Records
from twinkle_server.chat import anthropic, embeddings, openai
from twinkle_server.chat.render import Renderer
from twinkle_server.checkpoints.links import Links, download_routes
from twinkle_server.checkpoints.merge_jobs import MergeJobs
from twinkle_server.checkpoints.merge_routes import merge_routes
from twinkle_server.dashboard.pages import PREFIX as PREFIX_OF_PAGES
from twinkle_server.dashboard.pages import Dashboard
from twinkle_server.data import routes as data_routes
from twinkle_server.data.serving import data_resources
from twinkle_server.error_forms import PREFIX as CHAT_PREFIX
from twinkle_server.error_forms import error_path, form, status_of
from twinkle_server.errors import Busy, SequenceConflict, ServiceError
from twinkle_server.hub_uploads import routes as upload_routes
from twinkle_server.hub_uploads.serving import hub_uploads
from twinkle_server.limits.body import BodyLimitMiddleware
from twinkle_server.limits.forwarded import ForwardedMiddleware
from twinkle_server.limits.head import RequestHeadMiddleware
from twinkle_server.native import routes as native
from twinkle_server.openapi import complete
from twinkle_server.requests import add_routes, json_response
from twinkle_server.runtime.arrivals import ArrivalMiddleware
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store
from twinkle_server.telemetry.health import INSIDE, PROBES, SCOPED, Access, folder_token, health_routes
from twinkle_server.telemetry.metrics import Metrics, TelemetryMiddleware
from twinkle_server.telemetry.overview import Overview
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
from twinkle_server.tokenizer import tokenizer_routes

if TYPE_CHECKING:
    from twinkle_server.telemetry.traces import Traces

_log = logging.getLogger(__name__)


def assemble(
    settings: Settings, store: Store, service: Service, metrics: Metrics, traces: "Traces | None" = None
) -> Any:
    """Return the outermost ASGI application.

    Args:
        settings: of the service.
        store: an open store.
        service: the runtime.
        metrics: of the service.
        traces: of the service; None records none.
    """
    keys = Keyring(store.keys.all) if settings.auth else None
    links = Links(settings.data, store.secret)
    meter = Meter(service.queued)
    renderer = Renderer(settings.model, settings.template)
    service.on_close.append(renderer.close)
    application = create_application(
        Limited(service, meter, settings.limits.adapters), store, settings, links, renderer=renderer
    )
    add_routes(application.router, download_routes(links))
    merges = MergeJobs(settings.data, Path(settings.model), store.database, store.checkpoints)
    add_routes(application.router, merge_routes(merges))
    add_routes(application.router, tokenizer_routes(Path(settings.model), lambda: bool(service.info.tokenizer)))

    async def status() -> dict[str, Any]:
        return await service.status()

    data = application.state.state.data = data_resources(settings, store)
    service.on_close.append(data.close)
    service.janitor.add("data resources", min(10.0, settings.times.session / 4), data.sweep)
    if settings.uploads.enabled:
        uploads = application.state.state.uploads = hub_uploads(settings, store)
        service.janitor.add("hub uploads", _UPLOADS, uploads.sweep)
        service.on_close.append(uploads.close)
    add_routes(application.router, data_routes.router, native.PREFIX)
    add_routes(application.router, upload_routes.router, native.PREFIX)
    metrics.watch("data_processes", "Processes of data resources.", lambda: float(data.processes))
    access = Access(keys, folder_token(store.secret), settings.local_metrics)
    application.router.add_api_route("/openapi.json", _openapi, methods=["GET"], include_in_schema=False)
    overview = Overview(service, store, metrics.window)
    add_routes(application.router, health_routes(service.ready, status, metrics, access, overview.read))
    if settings.dashboard:
        add_routes(application.router, Dashboard(service, store, settings, overview, keys).router())
    bodies = BodyLimitMiddleware(AuditMiddleware(application, store.audit), settings.limits)
    metrics.watch("body_bytes", "Bytes of requests in memory.", lambda: float(bodies.budget.used))
    paths, prefixes = PROBES | INSIDE | SCOPED, tuple[str, ...]()
    if settings.dashboard:
        paths, prefixes = paths | {"/"}, (PREFIX_OF_PAGES,)
    guarded = Authentication(ArrivalMiddleware(bodies, service.arrivals), keys, paths, prefixes)
    observed: Any = TelemetryMiddleware(guarded, metrics)
    if settings.trusted_proxies or settings.root_path:
        observed = ForwardedMiddleware(observed, settings.trusted_proxies, settings.root_path)
    if traces is not None:
        from twinkle_server.telemetry.traces import TraceMiddleware

        observed = TraceMiddleware(observed, traces)
    return RequestHeadMiddleware(observed)


def create_application(
    service: ports.Service,
    store: Records,
    settings: Settings,
    links: Links | None = None,
    router: APIRouter | None = None,
    renderer: Renderer | None = None,
) -> FastAPI:
    """Return the application without authentication and body limits.

    Args:
        service: runs operations.
        store: the tables.
        settings: of the service.
        links: creates signed links to files; None disables downloads.
        router: with the endpoints; None creates it.
        renderer: of text; None disables the chat endpoints.
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
    application.state.state = AppState(service, store, settings, links, renderer)
    if router is None:
        application.router.routes.extend(all_routes().routes)
    else:
        add_routes(application.router, router)
    application.add_exception_handler(ServiceError, _service_error)
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(StarletteHTTPException, _http_error)
    application.add_exception_handler(HTTPException, _http_error)
    application.add_exception_handler(Exception, _failure)
    return application


class Application(FastAPI):
    """FastAPI with fewer layers around its routes: the service has its own telemetry and body limits."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description of all routes."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema

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
_UPLOADS = 2.0  # seconds
# Routes are tried in order, so the most frequent ones come first.
MODULES = (futures, training, sampling, sessions, models, saves, client, runs, copying, accounts)


def describe_routes() -> dict[str, Any]:
    """Return the OpenAPI description of all routes but the pages of the dashboard, without a running service."""
    nothing: Any = None
    application = Application(title="Twinkle", version=API_VERSION, openapi_url=None, docs_url=None, redoc_url=None)
    add_routes(application.router, all_routes())
    for router in (
        download_routes(nothing), merge_routes(nothing), tokenizer_routes(nothing, nothing),
        health_routes(nothing, nothing, nothing, nothing, overview=lambda tenant: nothing),
    ):  # fmt: skip
        add_routes(application.router, router)
    for router in (data_routes.router, upload_routes.router):
        add_routes(application.router, router, native.PREFIX)
    return application.openapi()


@functools.cache
def all_routes() -> APIRouter:
    """Return the endpoints of all protocols; they have no state, so that applications of a process share them."""
    chat = (openai, anthropic, embeddings)
    router = APIRouter(default_response_class=Response)
    for prefix, modules in ((PREFIX, MODULES), (native.PREFIX, native.MODULES), (CHAT_PREFIX, chat)):
        for module in modules:
            add_routes(router, module.router, prefix)
    return router


async def _openapi(request: Request) -> Response:
    """Describe all routes of the service."""
    return json_response(request.app.openapi())


def _service_error(request: Request, error: Any) -> Response:
    response = _error_response(request, error.status, error.message, error)
    if isinstance(error, Busy):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, SequenceConflict):
        response.headers["X-Should-Retry"] = "false"
    return response


def _error_response(request: Request, status: int, message: str, error: ServiceError | None = None) -> Response:
    path = error_path(request.scope)
    status = status_of(path, status)
    return json_response(form(path, status, message, error), status)


def _invalid(request: Request, error: Any) -> Response:
    errors = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:8]]
    return _error_response(request, 422, "; ".join(errors)[:2000])


def _http_error(request: Request, error: Any) -> Response:
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"{request.url.path[:300]!r} does not exist on this service"
    if error.status_code == 405:
        detail = f"{request.url.path[:300]!r} does not support {request.method}"
    response = _error_response(request, error.status_code, detail)
    response.headers.update(error.headers or {})
    return response


def _failure(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.scope.get("path", "")[:300], exc_info=error)
    return _error_response(request, 500, "internal server error; see the log of the service")
