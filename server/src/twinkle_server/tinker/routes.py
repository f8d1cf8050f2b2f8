"""All endpoints of the Tinker protocol."""

from fastapi import APIRouter

from twinkle_server.routing import add_routes
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
    router = APIRouter()
    for module in MODULES:
        add_routes(router, module.router, PREFIX)
    return router
