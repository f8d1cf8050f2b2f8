"""Endpoints that save checkpoints: for training, for sampling, and for export."""

from typing import Literal

from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import AppState, Caller
from twinkle_server.engine.encryption import check_recipients
from twinkle_server.errors import BadRequest
from twinkle_server.ids import check_name, new_id, sampler_id
from twinkle_server.operations import Save
from twinkle_server.requests import Metadata, Number, Numbered, Text, body_schema, submit_body
from twinkle_server.store.records import Model

router = APIRouter()
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 366 * 86400


class SaveWeights(Numbered):
    """See `save_weights`."""

    path: Text | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Numbered):
    """See `save_weights_for_sampler`."""

    path: Text | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveExternal(Numbered):
    """See `save_weights_external`."""

    path: Text
    ttl_seconds: int | None = None
    overwrite: bool = False
    age_encryption_recipients: list[Text] | None = None


@router.post("/save_weights", openapi_extra=body_schema(SaveWeights))
async def save_weights(request: Request) -> Response:
    """Save weights and optimizer state, to resume training."""
    return await submit_body(request, SaveWeights, "save", _payload)


@router.post("/save_weights_for_sampler", openapi_extra=body_schema(SaveForSampler))
async def save_weights_for_sampler(request: Request) -> Response:
    """Save weights for sampling, under a name or for a new sampling session."""
    return await submit_body(request, SaveForSampler, "save", _payload)


@router.post("/save_weights_external", openapi_extra=body_schema(SaveExternal))
async def save_weights_external(request: Request) -> Response:
    """Save weights as standard PEFT files, for export."""
    return await submit_body(request, SaveExternal, "save", _payload)


async def _payload(
    _state: AppState, _who: Caller, model: Model, body: SaveWeights | SaveForSampler | SaveExternal
) -> Save:
    save = Save(f"checkpoints/{new_id()}", "weights", overwrite=body.overwrite, ttl=check_ttl(body.ttl_seconds))
    if isinstance(body, SaveExternal):
        save.kind = "external_weights"
        save.recipients = _recipients(body.age_encryption_recipients)
    else:
        save.metadata = body.user_metadata
    if body.path is not None:
        save.name = check_name(body.path)
    if isinstance(body, SaveForSampler):
        _for_sampler(save, body, model)
    elif save.name is None:
        raise BadRequest("path is required")
    return save


def _recipients(recipients: list[str] | None) -> list[str] | None:
    if recipients is None:
        return None
    try:
        check_recipients(recipients)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return recipients


def _for_sampler(save: Save, body: SaveForSampler, model: Model) -> None:
    save.kind = "sampler_weights"
    save.inflight = body.kind == "inflight"
    if body.sampling_session_seq_id is not None:
        save.sampler = sampler_id(model.session, body.sampling_session_seq_id)
    if (save.name is None) == (save.sampler is None):
        raise BadRequest(
            "path (for a named checkpoint) or sampling_session_seq_id (for a sampling session) is required"
        )
    if save.inflight and save.sampler is None:
        raise BadRequest("kind 'inflight' requires sampling_session_seq_id instead of path")


def check_ttl(seconds: int | None) -> int | None:
    """Validate the lifetime of a checkpoint.

    Raises:
        BadRequest: it is less than an hour or more than ten years.
    """
    if seconds is not None and not SHORTEST_TTL <= seconds <= LONGEST_TTL:
        raise BadRequest(
            f"ttl_seconds must be between {SHORTEST_TTL} and {LONGEST_TTL}, or null for no expiry, got {seconds}"
        )
    return seconds
