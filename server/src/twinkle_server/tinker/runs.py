"""Endpoints for training runs and their checkpoints: lists, expiry, publication, downloads."""

import asyncio
from email.utils import formatdate
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from twinkle_server.app_state import app_state_of, caller_of, now
from twinkle_server.errors import BadRequest, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.openapi import JSON, returns
from twinkle_server.requests import (
    Body,
    Limit,
    Offset,
    Text,
    body_schema,
    cursor,
    isoformat,
    json_response,
    read,
    without_none,
)
from twinkle_server.store.records import Checkpoint, Model
from twinkle_server.tinker.saves import check_ttl

router = APIRouter()
Scope = Literal["owned", "accessible"]
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


class TtlBody(Body):
    """See `set_ttl`."""

    ttl_seconds: int | None


class WeightsInfo(Body):
    """See `weights_info`."""

    tinker_path: Text


@router.get("/training_runs")
async def training_runs(
    request: Request,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """List the caller's training runs, newest first; runs of other tenants are never accessible."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.models.page(caller.tenant, limit, offset, project_id)
    latest = await state.store.checkpoints.latest(caller.tenant, [row.id for row in page.rows], now())
    runs = [_run(row, latest) for row in page.rows]
    return json_response({"training_runs": runs, "cursor": cursor(page, limit, offset)})


@router.get("/training_runs/{run}")
async def training_run(request: Request, run: str, access_scope: Scope = "owned") -> Response:
    """Describe a training run."""
    caller, state = caller_of(request), app_state_of(request)
    model = await state.store.models.get(caller.tenant, run)
    return json_response(_run(model, await state.store.checkpoints.latest(caller.tenant, [run], now())))


@router.get("/training_runs/{run}/checkpoints")
async def checkpoints_of_run(
    request: Request,
    run: str,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    offset: Offset = 0,
) -> Response:
    """List the checkpoints of a training run, newest first."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.checkpoints.page(caller.tenant, now(), limit, offset, run)
    if not page.total:
        await state.store.models.get(caller.tenant, run)
    return json_response(
        {"checkpoints": [_checkpoint(row) for row in page.rows], "cursor": cursor(page, limit, offset)}
    )


@router.get("/checkpoints")
async def checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the caller's checkpoints, newest first."""
    caller, state = caller_of(request), app_state_of(request)
    page = await state.store.checkpoints.page(caller.tenant, now(), limit, offset)
    return json_response(
        {"checkpoints": [_checkpoint(row) for row in page.rows], "cursor": cursor(page, limit, offset)}
    )


@router.delete(_CHECKPOINT)
async def delete_checkpoint(request: Request, run: str, kind: str, name: str) -> Response:
    """Delete a checkpoint; sampling sessions created from it keep working."""
    caller, state = caller_of(request), app_state_of(request)
    await state.store.checkpoints.delete(caller.tenant, _path(run, kind, name), now())
    return json_response({})


@router.post(f"{_CHECKPOINT}/publish")
async def publish(request: Request, run: str, kind: str, name: str) -> Response:
    """Allow all tenants to load a checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    await state.store.checkpoints.publish(caller.tenant, _path(run, kind, name), now(), True)
    return json_response({})


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish(request: Request, run: str, kind: str, name: str) -> Response:
    """Allow only the owner to load a checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    await state.store.checkpoints.publish(caller.tenant, _path(run, kind, name), now(), False)
    return json_response({})


@router.put(f"{_CHECKPOINT}/ttl", openapi_extra=body_schema(TtlBody))
async def set_ttl(request: Request, run: str, kind: str, name: str) -> Response:
    """Set the remaining lifetime of a checkpoint; null is unlimited."""
    caller, state = caller_of(request), app_state_of(request)
    seconds = check_ttl((await read(request, TtlBody)).ttl_seconds)
    expires = None if seconds is None else now() + seconds
    await state.store.checkpoints.set_expiry(caller.tenant, _path(run, kind, name), now(), expires)
    return json_response({})


@router.get(f"{_CHECKPOINT}/external_weights_urls")
async def external_weights_urls(request: Request, run: str, kind: str, name: str) -> Response:
    """Return a signed link to each file of an external checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    path = _path(run, kind, name)
    checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
    if kind != "external_weights":
        raise BadRequest(f"{path} is not an external checkpoint; create one with save_weights_external")
    urls, expires = await asyncio.to_thread(state.require_links().files, str(request.base_url), checkpoint.folder)
    return json_response({"urls": urls, "expires": isoformat(expires)})


@router.get(f"{_CHECKPOINT}/archive", openapi_extra=returns(JSON, status=302, description="Link to the archive"))
async def archive(request: Request, run: str, kind: str, name: str) -> Response:
    """Redirect to a tar archive of a checkpoint, by a signed link. Clients before 0.36 use this."""
    caller, state = caller_of(request), app_state_of(request)
    checkpoint = await state.store.checkpoints.find(caller.tenant, _path(run, kind, name), now())
    url, expires = state.require_links().archive(str(request.base_url), checkpoint.folder)
    headers = {"Location": url, "Expires": formatdate(expires, usegmt=True)}
    body = json_response({"url": url, "expires": isoformat(expires)}, 302)
    body.headers.update(headers)
    return body


@router.post("/weights_info", openapi_extra=body_schema(WeightsInfo))
async def weights_info(request: Request) -> Response:
    """Return the properties that a model must have to load a checkpoint."""
    caller, state = caller_of(request), app_state_of(request)
    body = await read(request, WeightsInfo)
    checkpoint = await state.store.checkpoints.find(caller.tenant, CheckpointPath.parse(body.tinker_path), now())
    return json_response(
        {
            "base_model": checkpoint.base,
            "optimizer_config": {"type": "adamw"},
            "is_lora": checkpoint.rank > 0,
            "lora_rank": checkpoint.rank,
            "train_unembed": checkpoint.train_unembed,
            "train_mlp": checkpoint.train_mlp,
            "train_attn": checkpoint.train_attn,
        }
    )


def _path(run: str, kind: str, name: str) -> CheckpointPath:
    """Return the path of a checkpoint in a route.

    Raises:
        NotFound: the path is invalid.
    """
    try:
        return CheckpointPath.parse(f"tinker://{run}/{kind}/{name}")
    except BadRequest:
        raise NotFound(f"checkpoint {name[:140]!r} of kind {kind[:40]!r} does not exist") from None


def _checkpoint(row: Checkpoint) -> dict[str, Any]:
    return without_none(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=_TYPES[row.kind],
        time=isoformat(row.created),
        tinker_path=str(row.path),
        size_bytes=row.size,
        public=row.public,
        user_metadata=row.metadata,
        expires_at=None if row.expires is None else isoformat(row.expires),
    )


def _run(row: Model, latest: dict[tuple[str, str], Checkpoint]) -> dict[str, Any]:
    weights, sampler = latest.get((row.id, "weights")), latest.get((row.id, "sampler_weights"))
    return without_none(
        training_run_id=row.id,
        base_model=row.base,
        model_owner=row.tenant,
        is_lora=row.rank > 0,
        corrupted=row.status == "corrupted",
        lora_rank=row.rank,
        last_request_time=isoformat(row.last_request),
        last_checkpoint=weights and _checkpoint(weights),
        last_sampler_checkpoint=sampler and _checkpoint(sampler),
        user_metadata=row.metadata,
    )
