"""The short way to endpoints: a look at a table, without the layers of a framework that these do not use."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


class Direct:
    """Calls endpoints of a FastAPI application whose path is fixed and that take the request alone; it does the others.

    Nothing but time tells the two ways apart: a third of what a small request costs this process is spent between the
    application and its endpoint (`benchmarks/server_capacity.py`).

    Args:
        application: with all endpoints.
        routes: those of them that are looked up here.
    """

    def __init__(self, application: FastAPI, routes: Iterable[BaseRoute]) -> None:
        self._application = application
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, APIRoute) and list(inspect.signature(route.endpoint).parameters) == ["request"]
            for method in route.methods or ()
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._application(scope, receive, send)
            return
        scope["app"], scope["route"] = self._application, route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except Exception as error:  # the application has a handler for each kind, the last for any
            response = self._handler(error)(request, error)
        await response(scope, receive, send)

    def _handler(self, error: Exception) -> Callable[[Request, Exception], Any]:
        handlers = self._application.exception_handlers
        return next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
