"""Endpoints for clients at their start: capabilities, configuration, and telemetry."""

from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import app_state_of, caller_of
from twinkle_server.errors import NotFound
from twinkle_server.requests import json_response

router = APIRouter()


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    """Return the served models."""
    caller_of(request)
    info = app_state_of(request).service.info
    model = {"model_name": info.name, "trainable": True, "sampleable": True}
    if info.context:  # known once the engine is ready
        model["max_context_length"] = info.context
    return json_response({"supported_models": [model]})


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """Return the configuration of a client, requested once.

    Missing fields keep the client's defaults, which disable all optional parts of the protocol.
    """
    caller_of(request)
    settings = app_state_of(request).settings
    return json_response(
        {
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_len": min(1024, settings.limits.datums),
            "custom_loss_server_side": settings.custom_losses,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": False,
        }
    )


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> Response:
    """Return the configuration that a client requests every five minutes."""
    caller_of(request)
    return json_response(
        {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
    )


@router.post("/auth/token")
async def auth_token(request: Request) -> Response:
    """Refuse: clients use API keys directly, and `client/config` never requests tokens."""
    caller_of(request)
    raise NotFound("this service uses API keys directly and does not issue access tokens")


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accept telemetry and drop it: clients put whole requests into it, including keys."""
    caller_of(request)
    return json_response({"status": "accepted"})
