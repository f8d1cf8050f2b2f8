"""How FastAPI calls the endpoints that read the request themselves."""

import inspect
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute


class RequestRoute(APIRoute):
    """Calls an endpoint whose only parameter is `request` without solving dependencies.

    Such an endpoint reads the body and builds the response itself, so FastAPI has nothing to convert. Solving its empty
    set of dependencies costs a third of what the service spends on a small request (`benchmarks/server_capacity.py`).
    Other endpoints are called as FastAPI calls them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._takes_request_alone = list(inspect.signature(self.endpoint).parameters) == ["request"]

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request whose path matched."""
        if not self._takes_request_alone or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive))
        await response(scope, receive, send)


def add_routes(target: APIRouter, router: APIRouter, prefix: str = "") -> None:
    """Add the endpoints of `router` to the list of `target`.

    `include_router` keeps a router inside a router and searches each on its own, for every request.
    """
    for route in router.routes:
        if isinstance(route, APIRoute):
            target.add_api_route(
                prefix + route.path,
                route.endpoint,
                methods=sorted(route.methods or ()),
                openapi_extra=route.openapi_extra,
                include_in_schema=route.include_in_schema,
                route_class_override=RequestRoute,
            )
