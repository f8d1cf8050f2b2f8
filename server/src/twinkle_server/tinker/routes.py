"""All endpoints of the Tinker protocol."""

from fastapi import APIRouter
from fastapi.routing import APIRoute

from twinkle_server.tinker import (
    accounts,
    client,
    copying,
    custom_losses,
    futures,
    models,
    runs,
    sampling,
    saves,
    sessions,
    training,
)

PREFIX = "/api/v1"
# Routes are tried one after another: what is asked for all the time comes first.
MODULES = (futures, training, sampling, sessions, models, saves, client, runs, copying, accounts, custom_losses)


def tinker_routes() -> APIRouter:
    """Return the endpoints of the Tinker protocol."""
    router = APIRouter(prefix=PREFIX)
    for module in MODULES:
        for route in module.router.routes:
            if isinstance(route, APIRoute):  # one flat list: each router in a router is searched on its own
                extra = route.openapi_extra
                router.add_api_route(
                    route.path, route.endpoint, methods=sorted(route.methods or ()), openapi_extra=extra
                )
    return router
