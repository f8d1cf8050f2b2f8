"""All endpoints of this face."""

from fastapi import APIRouter

from twinkle_server.tinker import (
    accounts,
    client,
    copying,
    futures,
    models,
    passes,
    runs,
    sampling,
    saves,
    sessions,
    updates,
)

PREFIX = "/api/v1"


def tinker_routes() -> APIRouter:
    """Return the endpoints of the Tinker protocol."""
    router = APIRouter(prefix=PREFIX)
    for room in (client, sessions, models, passes, updates, saves, sampling, futures, runs, copying, accounts):
        router.include_router(room.router)
    return router
