"""The router of the native protocol."""

from fastapi import APIRouter

from twinkle_server.native import futures, models, runs, sampling, sessions, streaming
from twinkle_server.requests import add_routes

PREFIX = "/twinkle"
# Routes are tried in order, so the most frequent ones come first.
MODULES = (models, futures, sampling, streaming, sessions, runs)


def native_routes() -> APIRouter:
    """Return the endpoints of the native protocol."""
    router = APIRouter()
    for module in MODULES:
        add_routes(router, module.router, PREFIX)
    return router
