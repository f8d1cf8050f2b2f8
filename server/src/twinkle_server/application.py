"""The application: endpoints, and how errors are told."""

import logging
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from twinkle_server.checkpoints.links import Links
from twinkle_server.errors import Busy, SequenceConflict, ServiceError
from twinkle_server.ports import Service
from twinkle_server.routing import add_routes
from twinkle_server.settings import Settings
from twinkle_server.tinker.answers import answer
from twinkle_server.tinker.app_state import AppState, Records
from twinkle_server.tinker.routes import tinker_routes

_log = logging.getLogger(__name__)


def create_application(
    service: Service,
    store: Records,
    settings: Settings,
    links: Links | None = None,
    router: APIRouter | None = None,
) -> FastAPI:
    """Return the application, without the middleware that knows keys and bounds bodies.

    Args:
        service: runs operations.
        store: the records.
        settings: of the service.
        links: makes signed links to files; without it the service hands out none.
        router: with the endpoints of the face; None makes one.
    """
    application = FastAPI(
        title="Twinkle",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        default_response_class=Response,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the service has its own
    )
    application.state.state = AppState(service, store, settings, links)
    add_routes(application.router, router or tinker_routes())
    application.add_exception_handler(ServiceError, _service_error)
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(StarletteHTTPException, _http_error)
    application.add_exception_handler(HTTPException, _http_error)
    application.add_exception_handler(Exception, _failure)
    return application


def _service_error(_request: Request, error: Any) -> Response:
    response = answer({"detail": error.message}, error.status)
    if isinstance(error, Busy):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, SequenceConflict):
        response.headers["X-Should-Retry"] = "false"
    return response


def _invalid(_request: Request, error: Any) -> Response:
    places = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:8]]
    return answer({"detail": "; ".join(places)[:2000]}, 422)


def _http_error(request: Request, error: Any) -> Response:
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"there is no {request.url.path[:300]!r} here"
    if error.status_code == 405:
        detail = f"{request.url.path[:300]!r} does not take {request.method}"
    response = answer({"detail": detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _failure(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.scope.get("path", "")[:300], exc_info=error)
    return answer({"detail": "internal server error; see the log of the service"}, 500)
