"""What a client asks before anything else: what is served, how it should behave; and the telemetry that it sends."""

from fastapi import APIRouter, Request, Response

from twinkle_server.errors import NotFound
from twinkle_server.tinker.app_state import app_state_of, caller
from twinkle_server.tinker.requests import answer

router = APIRouter()


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    """Return the models that are served."""
    caller(request)
    info = app_state_of(request).service.info
    model = {"model_name": info.name, "trainable": True, "sampleable": True}
    if info.context:  # the engine has told
        model["max_context_length"] = info.context
    return answer({"supported_models": [model]})


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """Return how a client should behave; it asks once.

    What is not said has the client's own default, which leaves every optional part of the protocol off.
    """
    caller(request)
    settings = app_state_of(request).settings
    return answer(
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
    """Return how a client should behave; it asks again every five minutes."""
    caller(request)
    return answer({"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64})


@router.post("/auth/token")
async def auth_token(request: Request) -> Response:
    """Say that keys are used as they are: `client/config` never asks for tokens."""
    caller(request)
    raise NotFound("this service uses API keys directly and does not issue access tokens")


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Take telemetry and keep nothing of it: clients put whole requests into it, keys included."""
    caller(request)
    return answer({"status": "accepted"})
